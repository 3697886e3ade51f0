"""Which rows of queues the current transaction has inserted.

A row that is inserted gets a higher ``rowid`` than all others of its table, so the highest one before the first INSERT
separates the new rows from those before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from sqlaqueue.engines.written_rows import note_before_inserts

_HIGHEST = "sqlaqueue_highest_rowids"


def note_written_rows(engine: sa.Engine) -> None:
    """Note, before the first INSERT of a transaction into the table of a queue, the highest ``rowid``."""
    note_before_inserts(engine, _HIGHEST, _highest)


def _highest(connection: sa.Connection, table: sa.Table) -> int:
    name = connection.dialect.identifier_preparer.format_table(table)
    query = f"SELECT coalesce(max(rowid), 0) FROM {name}"  # noqa: S608 - the name is quoted
    return int(connection.exec_driver_sql(query).scalar_one())


def is_written_here(info: dict[str, Any]) -> Callable[[str, int], bool]:
    """Return the function that tells whether the current transaction has inserted a row.

    :param info: the ``info`` of the connection.
    """

    def function(table: str, rowid: int) -> bool:
        highest = info.get(_HIGHEST, {}).get(table)
        return highest is not None and rowid > highest

    return function
