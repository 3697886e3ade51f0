"""The type of moments: texts in UTC."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from sqlaqueue.engines.types import moment_text


def moment_in(text: str) -> datetime:
    """Return the moment in a text, without a time zone."""
    return datetime.fromisoformat(text)


class Moment(sqlite.DATETIME):
    """A moment; with a time zone it is stored in UTC, and returned in UTC.

    Without a time zone it is stored and returned as SQLAlchemy's type does, and so is one with a format of the program.
    """

    def __init__(self, timezone: bool = False, **options: Any) -> None:  # noqa: FBT002 - SQLAlchemy's signature
        super().__init__(**options)
        self.timezone = timezone

    @property
    def _has_format(self) -> bool:
        return self._storage_format != sqlite.DATETIME._storage_format or self._reg is not None  # noqa: SLF001 - not public

    def bind_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - the base class says it
        if self._has_format:
            return super().bind_processor(dialect)

        def process(value: Any) -> Any:
            if isinstance(value, datetime):
                return moment_text(value if self.timezone else value.replace(tzinfo=None))
            return moment_text(datetime.combine(value, time())) if isinstance(value, date) else value

        return process

    def literal_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - as above
        process: Any = self.bind_processor(dialect)
        return lambda value: f"'{process(value)}'"

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:  # noqa: D102 - as above
        if self._has_format:
            return super().result_processor(dialect, coltype)

        def process(value: Any) -> Any:
            if not isinstance(value, str):
                return value
            moment = moment_in(value)
            if not self.timezone:
                return moment
            # Another program may have written it with its distance to UTC.
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)

        return process
