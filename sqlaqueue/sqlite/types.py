"""The type of moments: texts in UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from sqlaqueue.engines.types import moment_text


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
