"""The type of moments, in UTC with microseconds, and the collation of texts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from sqlaqueue.engines.types import moment_text, undecorated

MICROSECONDS = 6
"""The digits after the second that the database stores."""


JSON_TEXT = "LONGTEXT CHARACTER SET utf8mb4"
"""The type of texts in JSON; without a character set it would have that of the database."""
_JSON_TYPES = {
    sa.Boolean: "TINYINT",
    sa.Integer: "BIGINT",
    sa.Float: "DOUBLE",
    sa.Interval: "DOUBLE",
    sa.Numeric: "DECIMAL(65,30)",
    sa.DateTime: "DATETIME(6)",
    sa.Date: "DATE",
}


def json_type(type_: Any) -> str:
    """Return the SQL of the type by which a value is read from JSON."""
    plain = undecorated(type_)
    return next((rendered for known, rendered in _JSON_TYPES.items() if isinstance(plain, known)), JSON_TEXT)


def binary_collation(dialect: Any) -> str:
    """Return the collation by which texts of the library are compared: "a", "A" and "a " differ."""
    return "utf8mb4_nopad_bin" if dialect.is_mariadb else "utf8mb4_0900_bin"


class Moment(mysql.DATETIME):
    """A moment; with a time zone it is stored in UTC, and returned in UTC."""

    def __init__(self, timezone: bool = False, fsp: int | None = MICROSECONDS) -> None:  # noqa: FBT002 - SQLAlchemy's signature
        super().__init__(fsp=fsp)
        self.timezone = timezone

    def bind_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - the base class says it
        def process(value: Any) -> Any:
            if not isinstance(value, datetime):
                return value
            # Without a time zone as the drivers do, which leave out that of the value.
            return moment_text(value if self.timezone else value.replace(tzinfo=None))

        return process

    def literal_processor(self, dialect: sa.Dialect) -> Any:  # noqa: D102 - as above
        process = self.bind_processor(dialect)
        return lambda value: f"'{process(value)}'"

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:  # noqa: D102 - as above
        zone = UTC if self.timezone else None

        def process(value: Any) -> Any:
            # An expression, such as a sum with a span, may be a text for the driver.
            moment = datetime.fromisoformat(value) if isinstance(value, str) else value
            return moment.replace(tzinfo=zone) if isinstance(moment, datetime) else moment

        return process
