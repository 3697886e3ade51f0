"""Periods of equal length, for jobs that are unique within one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from sqlaqueue.queue.portable import with_plain_form

_MONDAY = 4 * 86400
"""Monday, 1970-01-05, 00:00 UTC, in seconds since 1970: days begin at midnight, and weeks on Monday."""


def period(length: timedelta, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return the beginning of the period to which ``moment`` belongs.

    The length and the origin are written as the server prints them by default, so that Alembic finds the index
    unchanged.
    """
    origin: sa.ColumnElement[Any] = sa.literal_column(f"to_timestamp({_MONDAY}::double precision)")
    if not getattr(moment.type, "timezone", False):
        origin = sa.literal_column("'1970-01-05 00:00:00'::timestamp without time zone")
    begin = sa.func.date_bin(sa.literal_column(f"'{_clock_text(length)}'::interval"), moment, origin, type_=moment.type)
    return with_plain_form(begin, lambda: _number(length, moment))


def _number(length: timedelta, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return the number of the period, which serves as well where no function returns its beginning."""
    milliseconds: sa.ColumnElement[Any] = sa.literal_column(str(length // timedelta(milliseconds=1)))
    return sa.func.sqlaqueue_period(moment, milliseconds, sa.literal_column(str(_MONDAY * 1000)), type_=moment.type)


def _clock_text(length: timedelta) -> str:
    """Return a length in hours, minutes and seconds: PostgreSQL would keep days apart from hours."""
    minutes, rest = divmod(length, timedelta(minutes=1))
    fraction = f".{rest.microseconds:06}".rstrip("0").rstrip(".")
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest.seconds:02}{fraction}"
