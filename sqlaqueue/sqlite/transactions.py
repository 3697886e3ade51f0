"""When a transaction begins, and how.

SQLite has one write lock. A transaction that begins with a read and writes later fails at once if another one has
committed in between, however long the timeout. So a transaction begins at its first statement: with BEGIN IMMEDIATE,
which waits for the lock, if that statement writes, and otherwise with BEGIN.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.queue.engine import OWN_WORK

_READS = ("SELECT", "EXPLAIN", "VALUES", "SAVEPOINT")
_NEITHER = ("PRAGMA", "BEGIN", "COMMIT", "ROLLBACK", "END", "RELEASE", "ATTACH", "DETACH", "VACUUM")


def begin_when_needed(engine: sa.Engine) -> None:
    """Begin each transaction of an engine at its first statement."""

    @event.listens_for(engine, "before_cursor_execute")
    def begin(
        connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        driver: Any = connection.connection.driver_connection
        if driver.in_transaction or _is_autocommit(connection):
            return
        text = statement.lstrip().upper()
        if text.startswith(_NEITHER):
            return
        connection.exec_driver_sql("BEGIN" if _reads(text, context, connection) else "BEGIN IMMEDIATE")


def _is_autocommit(connection: sa.Connection) -> bool:
    return connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT" or (
        connection.engine.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
    )


def _reads(text: str, context: Any, connection: sa.Connection) -> bool:
    if OWN_WORK.get() or OWN_WORK.name in connection.get_execution_options():
        return False
    if context is not None and (context.isinsert or context.isupdate or context.isdelete or context.isddl):
        return False
    return text.startswith(_READS) or (text.startswith("WITH") and context is not None and context.compiled is not None)
