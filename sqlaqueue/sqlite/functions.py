"""The functions that the library adds to each connection of a prepared engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlaqueue.sqlite.types import moment_in, moment_text

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _moved(moment: str | None, seconds: float | None) -> str | None:
    if moment is None or seconds is None:
        return None
    return moment_text(moment_in(moment) + timedelta(seconds=seconds))


def _epoch(moment: str | None) -> float | None:
    return None if moment is None else (moment_in(moment).replace(tzinfo=UTC) - _EPOCH).total_seconds()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def _uuid_text(value: str | None) -> str | None:
    return None if value is None else str(UUID(value))


def _concat_ws(separator: str, *values: Any) -> str:
    return separator.join(str(value) for value in values if value is not None)


_FUNCTIONS = {
    "sqlaqueue_moved": (2, _moved),
    "sqlaqueue_epoch": (1, _epoch),
    "sqlaqueue_bytes": (1, _bytes),
    "sqlaqueue_uuid_text": (1, _uuid_text),
    "concat_ws": (-1, _concat_ws),
}


def add_functions(connection: Any, notify: Callable[[str, str], None]) -> None:
    """Add the functions to a driver's connection.

    :param notify: sends a notification when the transaction is committed.
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
    for name, (arguments, function) in _FUNCTIONS.items():
        connection.create_function(name, arguments, function, deterministic=True)
