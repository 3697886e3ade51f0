"""One job in a list, and the columns of a statement that return it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog_indexes import shown_text, stored_size
from sqlaqueue.queue.run import key_text
from sqlaqueue.web.data.job_columns import JobColumn, kind_of_type
from sqlaqueue.web.data.job_sources import Exposed

SHOWN = 200
"""The number of characters that a list shows of a value. The database cuts it."""


@dataclass(frozen=True)
class Cell:
    """The value of a column of one job, as a text."""

    column: JobColumn
    text: str | None
    """None for null, for a redacted value, and for a value that is too large to be read in a list."""
    is_cut: bool = False
    """Whether the value is longer."""
    size: int | None = None
    """The stored bytes of a value that is too large."""

    @property
    def is_redacted(self) -> bool:
        """Whether the value must not be shown."""
        return self.column.is_redacted

    @property
    def moment(self) -> datetime | date | None:
        """The value as a moment or a day; None if it is no such value, or none that Python has, such as infinity."""
        if self.text is None or self.column.kind not in {"moment", "naive_moment", "date"}:
            return None
        try:
            if self.column.kind == "date":
                return date.fromisoformat(self.text)
            moment = datetime.fromisoformat(self.text)
            return moment.astimezone(UTC) if moment.tzinfo is not None else moment
        except (ValueError, OverflowError):
            return None


@dataclass(frozen=True)
class JobRow:
    """One job in a list."""

    key: str
    """Its key as a text, see :func:`sqlaqueue.queue.run.key_text`."""
    state: str
    cells: Sequence[Cell]
    position: tuple[str | None, ...]
    """The values by which the list is sorted."""


class Results:
    """The columns of a statement that returns jobs, by which its rows are read."""

    def __init__(self, shown: Sequence[JobColumn]) -> None:
        self.shown = shown

    def columns(self, jobs: Exposed, position: Sequence[sa.ColumnElement[Any]]) -> list[sa.ColumnElement[Any]]:
        """Return the columns to select.

        :param position: the values by which jobs are sorted.
        """
        found: list[sa.ColumnElement[Any]] = [jobs.state.label("state")]
        found += [sa.cast(key, sa.Text()).label(f"key_{number}") for number, key in enumerate(jobs.keys)]
        found += [_exact(value).label(f"position_{number}") for number, value in enumerate(position)]
        for number, column in enumerate(self.shown):
            if column.is_redacted or column.kind == "state":
                continue
            value = jobs.values[column.name]
            found.append(shown_text(value, column.form, SHOWN + 1).label(f"text_{number}"))
            if column.form == "large":
                found.append(stored_size(value).label(f"size_{number}"))
        return found

    def job(self, row: Any) -> JobRow:
        """Return the job of a row of the statement."""
        keys = [getattr(row, name) for name in row._fields if name.startswith("key_")]
        position = [getattr(row, name) for name in row._fields if name.startswith("position_")]
        cells = [self._cell(row, number, column) for number, column in enumerate(self.shown)]
        return JobRow(key_text(keys), row.state, cells, tuple(position))

    def _cell(self, row: Any, number: int, column: JobColumn) -> Cell:
        if column.is_redacted:
            return Cell(column, None)
        if column.kind == "state":
            return Cell(column, row.state)
        text: str | None = getattr(row, f"text_{number}")
        size: int | None = getattr(row, f"size_{number}", None) if text is None else None
        if text is None:
            return Cell(column, None, size=size, is_cut=size is not None)
        return Cell(column, text[:SHOWN], is_cut=len(text) > SHOWN)


def _exact(value: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    """Return a value as a text from which the database reads the same value, whatever the settings of the session."""
    if kind_of_type(value.type) in {"moment", "naive_moment", "date"}:
        return shown_text(value, "moment", SHOWN)
    return sa.cast(value, sa.Text())
