"""Which rows of queues the current transaction has inserted: the functions of :mod:`sqlaqueue.testing` ask for it.

MariaDB does not tell which transaction has inserted a row. So the keys of all rows are read before the first INSERT of
a transaction into the table of a queue, and the others are new. They are read only in a program that has imported
:mod:`sqlaqueue.testing`, whose tables are those of tests.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.mariadb.execution import EARLIER
from sqlaqueue.postgresql.ddl.attach import queue_of
from sqlaqueue.queue.engine import notes_written_rows


def note_written_rows(engine: sa.Engine) -> None:
    """Note, before the first INSERT of a transaction into the table of a queue, the keys of its rows."""

    @event.listens_for(engine, "before_cursor_execute")
    def note(
        connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        if not (notes_written_rows() and context is not None and context.isinsert):
            return
        table = getattr(getattr(context.compiled, "compile_state", None), "dml_table", None)
        if table is None or queue_of(table) is None:
            return
        earlier = connection.connection.info.setdefault(EARLIER, {})
        if table.name not in earlier:
            preparer = connection.dialect.identifier_preparer
            keys = ", ".join(preparer.quote(key.name) for key in table.primary_key)
            query = f"SELECT {keys} FROM {preparer.format_table(table)}"  # noqa: S608 - the names are quoted
            # As the driver has them: they are given back to it.
            earlier[table.name] = [tuple(row) for row in connection.exec_driver_sql(query)]

    @event.listens_for(engine, "commit")
    @event.listens_for(engine, "rollback")
    def forget(connection: sa.Connection) -> None:
        # A connection that was lost has its info no more.
        if not connection.invalidated:
            connection.connection.info.pop(EARLIER, None)
