"""Which rows of queues the current transaction has inserted: the functions of :mod:`sqlaqueue.testing` ask for it.

SQLite keeps no transaction with a row. A row that is inserted gets a higher ``rowid`` than all others of its table, so
the highest one before the first INSERT of a transaction separates the new rows from those before. It is read only in a
program that has imported :mod:`sqlaqueue.testing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.postgresql.ddl.attach import queue_of
from sqlaqueue.queue.engine import notes_written_rows

_HIGHEST = "sqlaqueue_highest_rowids"


def note_written_rows(engine: sa.Engine) -> None:
    """Note, before the first INSERT of a transaction into the table of a queue, the highest ``rowid``."""

    @event.listens_for(engine, "before_cursor_execute")
    def note(
        connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        if not (notes_written_rows() and context is not None and context.isinsert):
            return
        table = getattr(getattr(context.compiled, "compile_state", None), "dml_table", None)
        if table is None or queue_of(table) is None:
            return
        highest = connection.connection.info.setdefault(_HIGHEST, {})
        if table.name not in highest:
            name = connection.dialect.identifier_preparer.format_table(table)
            query = f"SELECT coalesce(max(rowid), 0) FROM {name}"  # noqa: S608 - the name is quoted
            highest[table.name] = connection.exec_driver_sql(query).scalar_one()

    @event.listens_for(engine, "commit")
    @event.listens_for(engine, "rollback")
    def forget(connection: sa.Connection) -> None:
        # A connection that was lost has its info no more.
        if not connection.invalidated:
            connection.connection.info.pop(_HIGHEST, None)


def is_written_here(info: dict[str, Any]) -> Callable[[str, int], bool]:
    """Return the function that tells whether the current transaction has inserted a row.

    :param info: the ``info`` of the connection.
    """

    def function(table: str, rowid: int) -> bool:
        highest = info.get(_HIGHEST, {}).get(table)
        return highest is not None and rowid > highest

    return function
