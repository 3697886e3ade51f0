"""The functions that the library adds to each connection of a prepared engine."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlaqueue.engines.types import moment_text
from sqlaqueue.sqlite.types import moment_in

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _moved(moment: str | None, seconds: float | None) -> str | None:
    if moment is None or seconds is None:
        return None
    try:
        return moment_text(moment_in(moment) + timedelta(seconds=seconds))
    except OverflowError:
        # A moment that Python cannot represent is earlier or later than all others.
        return "0001-01-01 00:00:00.000000" if seconds < 0 else "9999-12-31 23:59:59.999999"


def _epoch(moment: str | None) -> float | None:
    return None if moment is None else (moment_in(moment).replace(tzinfo=UTC) - _EPOCH).total_seconds()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def _uuid_text(value: str | None) -> str | None:
    return None if value is None else str(UUID(value))


def _concat_ws(separator: str, *values: Any) -> str:
    return separator.join(str(value) for value in values if value is not None)


def _regexp_replace(text: str | None, pattern: str, by: str) -> str | None:
    return None if text is None else re.sub(pattern, by, text, count=1)


def _digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


_FUNCTIONS = {
    "sqlaqueue_moved": (2, _moved),
    "sqlaqueue_epoch": (1, _epoch),
    "sqlaqueue_bytes": (1, _bytes),
    "sqlaqueue_uuid_text": (1, _uuid_text),
    "regexp_replace": (3, _regexp_replace),
    "sqlaqueue_digest": (-1, _digest),
    "concat_ws": (-1, _concat_ws),
}


def add_functions(
    connection: Any, notify: Callable[[str, str], None], is_written_here: Callable[[str, int], bool]
) -> None:
    """Add the functions to a driver's connection.

    :param notify: sends a notification when the transaction is committed.
    :param is_written_here: tells whether the transaction has inserted a row of a table, by its ``rowid``.
    """

    def pg_notify(channel: str, text: str) -> str:
        notify(channel, text)
        return ""

    driver: Any = getattr(connection, "driver_connection", connection)
    numbers = itertools.count(1)

    def txid_current() -> int:
        # Two calls in one transaction have to return the same number; outside of any they have to differ.
        return 0 if driver.in_transaction else next(numbers)

    connection.create_function("pg_notify", 2, pg_notify)
    connection.create_function("txid_current", 0, txid_current)
    connection.create_function("sqlaqueue_written_here", 2, is_written_here)
    for name, (arguments, function) in _FUNCTIONS.items():
        connection.create_function(name, arguments, function, deterministic=True)
