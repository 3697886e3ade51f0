"""The types of a prepared engine: moments in UTC, spans in seconds, JSON as a text, arrays as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite


def moment_text(moment: datetime) -> str:
    """Return a moment as the database stores it: in UTC, of one length, so that texts sort as moments do."""
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond:06}".rjust(26, "0")


def moment_in(text: str) -> datetime:
    """Return the moment in a text, without a time zone."""
    return datetime.fromisoformat(text)


class Moment(sqlite.DATETIME):
    """A moment; with a time zone it is stored in UTC, and returned in UTC."""

    def __init__(self, timezone: bool = False, **options: Any) -> None:  # noqa: FBT002 - SQLAlchemy's signature
        super().__init__(**options)
        self.timezone = timezone

    def bind_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - the base class says it
        def process(value: Any) -> Any:
            return moment_text(value) if isinstance(value, datetime) else value

        return process

    def literal_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - as above
        return lambda value: f"'{moment_text(value)}'"

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:  # noqa: D102 - as above
        zone = UTC if self.timezone else None

        def process(value: Any) -> Any:
            return moment_in(value).replace(tzinfo=zone) if isinstance(value, str) else value

        return process


class Span(sa.types.UserDefinedType[timedelta]):
    """A span of time, in seconds."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:  # noqa: D102 - as above
        return "REAL"

    def bind_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - as above
        return lambda value: value.total_seconds() if isinstance(value, timedelta) else value

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:  # noqa: D102 - as above
        return lambda value: None if value is None else timedelta(seconds=value)


class Array(sa.types.UserDefinedType[Sequence[Any]]):
    """An array of values as JSON; a value is written as a column of its type has it."""

    cache_ok = True

    def __init__(self, element: Any = None, item_type: Any = None) -> None:
        self.element = item_type if element is None else element
        if isinstance(self.element, type):
            self.element = self.element()

    def get_col_spec(self, **_: Any) -> str:  # noqa: D102 - as above
        return "JSON"

    def bind_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - as above
        write = self.element.dialect_impl(dialect).bind_processor(dialect)

        def process(value: Any) -> Any:
            if value is None:
                return None
            written = [each if each is None or write is None else write(each) for each in value]
            return json.dumps(written, default=_plain)

        return process

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:  # noqa: D102 - as above
        read = self.element.dialect_impl(dialect).result_processor(dialect, coltype)

        def process(value: Any) -> Any:
            if value is None:
                return None
            return [each if each is None or read is None else read(each) for each in json.loads(value)]

        return process


def _plain(value: Any) -> Any:
    return value.hex if isinstance(value, UUID) else str(value)
