"""Which rows of queues the current transaction has inserted: all but those that were there before its first INSERT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from sqlaqueue.engines.written_rows import note_before_inserts

_EARLIER = "sqlaqueue_earlier_rowids"


def note_written_rows(engine: sa.Engine) -> None:
    """Note, before the first INSERT of a transaction into the table of a queue, its rows."""
    note_before_inserts(engine, _EARLIER, _rowids)


def _rowids(connection: sa.Connection, _: sa.Table, name: str) -> frozenset[int]:
    query = f"SELECT rowid FROM {name}"  # noqa: S608 - the name is quoted
    return frozenset(connection.exec_driver_sql(query).scalars())


def is_written_here(info: dict[str, Any]) -> Callable[[str, int], bool]:
    """Return the function that tells whether the current transaction has inserted a row.

    :param info: the ``info`` of the connection.
    """

    def function(table: str, rowid: int) -> bool:
        earlier = info.get(_EARLIER, {}).get(table)
        return earlier is not None and rowid not in earlier

    return function
