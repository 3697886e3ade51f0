"""When a transaction begins, and how.

SQLite has one write lock. A transaction that begins with a read and writes later fails at once if another one has
committed in between, however long the timeout. So a transaction begins at its first statement: with BEGIN IMMEDIATE,
which waits for the lock, if that statement writes, and otherwise with BEGIN.

A handler that has only read must not fail because its run is settled in the same transaction. The settlement depends on
nothing that was read, as it compares the token of the claim. So the reading transaction ends before it, and another one
begins with BEGIN IMMEDIATE. Whatever the program executes after a read keeps the isolation of SQLite, a statement of
the library as well: what it has read would no longer be true, and an update of another transaction would be lost.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.engines.notifications import database_of
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.engine import OF_TEST, OWN_WORK, SETTLES, WRITES_LATER

_READS = ("SELECT", "EXPLAIN", "VALUES", "WITH")
_WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE|REPLACE)\b")
_LEGACY_TRANSACTIONS = -1
"""``sqlite3.LEGACY_TRANSACTION_CONTROL``, which Python before 3.12 does not have."""
_COMMENTS = re.compile(r"(\s*(--[^\n]*(\n|$)|/\*.*?\*/))+\s*", re.DOTALL)
"""The comments before a statement."""
_NEITHER = ("PRAGMA", "BEGIN", "COMMIT", "ROLLBACK", "END", "RELEASE", "ATTACH", "DETACH", "VACUUM")

_ONLY_READS = "sqlaqueue_only_reads"
"""Whether the transaction of a connection has not written, in the connection's ``info``."""


def begin_when_needed(engine: sa.Engine) -> None:
    """Begin each transaction of an engine at its first statement."""

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def begin(
        connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> tuple[str, Any]:
        text = statement.lstrip()
        text = (_COMMENTS.sub("", text, count=1) if text.startswith(("--", "/*")) else text).upper()
        info = connection.connection.info
        driver: Any = connection.connection.driver_connection
        if text.startswith(_NEITHER):
            if text.startswith("BEGIN"):
                if info.get(OF_TEST) and driver.in_transaction:
                    # A handler that begins so works in the transaction of the test.
                    return "SELECT 1", ()
                # Of the program, or of this function below. The entry is that of the transaction before.
                info.pop(_ONLY_READS, None)
            return statement, parameters
        # A SAVEPOINT does not read either: one that begins a transaction is set for what it writes.
        reads = _is_read(text, context)
        locks = not reads or OWN_WORK.get() or (context is not None and WRITES_LATER in context.execution_options)
        if not driver.in_transaction:
            if not is_autocommit(connection):
                connection.exec_driver_sql("BEGIN IMMEDIATE" if locks else "BEGIN")
                info[_ONLY_READS] = not locks
        elif info.get(_ONLY_READS) and not text.startswith("SAVEPOINT"):
            if locks and SETTLES.get() and not connection.in_nested_transaction():
                info[_ONLY_READS] = False
                connection.exec_driver_sql("COMMIT")
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            elif not reads:
                info[_ONLY_READS] = False
        return statement, parameters


def begins_otherwise(connection: sa.Connection) -> bool:
    """Return whether a listener of the program has begun the transaction of a connection."""
    driver: Any = connection.connection.driver_connection
    return bool(driver.in_transaction) and _ONLY_READS not in connection.connection.info


def release_lock(connection: Any, *_: Any) -> None:
    """Roll back the transaction of a connection that is being closed.

    SQLite closes a connection only when its statements are. One that a cancelled task has left, before it has fetched
    the rows, is kept with the traceback, and the write lock with it.
    """
    with contextlib.suppress(Exception):
        connection.rollback()


def refuse_autocommit(connection: Any, *_: Any) -> None:
    """Refuse a connection whose driver begins transactions by itself, or passes over commits and rollbacks."""
    if getattr(connection, "autocommit", _LEGACY_TRANSACTIONS) != _LEGACY_TRANSACTIONS:
        msg = (
            f"a connection has autocommit={connection.autocommit}, with which a prepared engine cannot start and end "
            "transactions; leave it out of creator= and of listeners to `connect`"
        )
        raise ConfigurationError(msg)


def is_autocommit(connection: sa.Connection) -> bool:
    """Return whether each statement of a connection is committed by itself."""
    dialect: Any = connection.dialect
    options = (connection.get_execution_options(), connection.engine.get_execution_options())
    levels = [each["isolation_level"] for each in options if "isolation_level" in each]
    # The last one is the argument of create_engine().
    levels.append(dialect._on_connect_isolation_level)  # noqa: SLF001 - not public
    return bool(levels[0] == "AUTOCOMMIT")


def _is_read(text: str, context: Any) -> bool:
    if context is not None and (context.isinsert or context.isupdate or context.isdelete or context.isddl):
        return False
    if text.startswith("WITH") and (context is None or context.compiled is None or context.is_text):
        return _WRITES.search(text) is None
    return text.startswith(_READS)


# -- forks -------------------------------------------------------------------------------------------------------------
# SQLite keeps in the memory of a process which locks the process has on a file. A child inherits that memory, but not
# the locks: its connections, new ones as well, would take no lock that the parent had at the fork, or wait for one
# that is never released. So two processes could write at the same time, or one could wait for ever.

_open: Counter[str] = Counter()
"""The number of connections of prepared engines, by the path of the file."""

_refused: dict[str, int] = {}
"""The files that a parent had open at a fork, with its process id."""


def refuse_files_of_parent(engine: sa.Engine) -> None:
    """Let an engine refuse its file in a child that is forked while a prepared engine has it open.

    The error comes when the engine connects, executes a statement or commits.
    """
    path = database_of(engine)
    files = {path} if isinstance(path, str) else set[str]()

    def opened(connection: Any, *_: Any) -> None:
        if not isinstance(path, str):
            # The URL says nothing of what creator= opens.
            files.update(_files_of(connection))
        for file in files:
            _open[file] += 1
        check()

    def closed(*_: Any) -> None:
        for file in files:
            _open[file] -= 1

    def check(*_: Any) -> None:
        # Empty but in a child.
        for file in files & _refused.keys():
            msg = (
                f"process {os.getpid()} was forked while process {_refused[file]} had connections to {file}, whose "
                "locks SQLite keeps by process; start it by multiprocessing's spawn or by subprocess, or end "
                "the Consumers and call engine.dispose() before the fork"
            )
            raise ConfigurationError(msg)

    event.listen(engine, "connect", opened)
    event.listen(engine, "close", closed)
    event.listen(engine, "close_detached", closed)
    for name in ("do_connect", "before_cursor_execute", "commit"):
        event.listen(engine, name, check)


def _files_of(connection: Any) -> list[str]:
    """Return the file of a connection; none for a database in memory, of which a child has its own copy."""
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA database_list")
        return [os.path.realpath(row[2]) for row in cursor.fetchall() if row[1] == "main" and row[2]]
    finally:
        cursor.close()


def _after_fork_in_child() -> None:
    _refused.update((path, os.getppid()) for path, number in _open.items() if number > 0)
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
