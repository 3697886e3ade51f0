"""Prepares an engine for SQLite: its compilers, its types, its transactions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.engines.events import carry_out_statements
from sqlaqueue.engines.notifications import channel_of_change, notify_within_process, send
from sqlaqueue.engines.prepare import is_prepared, replace_compilers, whole_engine
from sqlaqueue.engines.steps import keys_in
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sqlite.compiler import StatementCompiler, TableCompiler, TypeCompiler
from sqlaqueue.sqlite.engine import SQLite
from sqlaqueue.sqlite.forks import refuse_files_of_parent
from sqlaqueue.sqlite.functions import add_functions
from sqlaqueue.sqlite.transactions import begin_when_needed, refuse_autocommit, release_lock
from sqlaqueue.sqlite.types import Moment
from sqlaqueue.sqlite.written_rows import is_written_here, note_written_rows

_OLDEST = (3, 35)


def prepare(engine: Any, *, busy_timeout: float | None = None) -> None:
    """Prepare an engine, so that models with queues can be used with its sessions.

    Call it once, before the engine is used. It sets the file to write-ahead logging, in which readers and the writer
    do not wait for each other, and lets transactions begin with ``BEGIN IMMEDIATE`` where they begin with a write.

    :param engine: an Engine or an AsyncEngine.
    :param busy_timeout: how many seconds a transaction waits for that of another connection before it raises an error;
        30 by default.
    :raises ConfigurationError: if the engine is for another database or has connected before, SQLite is older than
        3.35, or the engine has been prepared with another ``busy_timeout``.
    """
    sync = whole_engine(engine)
    dialect: Any = sync.dialect
    if dialect.name != "sqlite":
        msg = f"sqlaqueue.sqlite.prepare({engine!r}): the engine is for {dialect.name}; use create_engine('sqlite:///...')"
        raise ConfigurationError(msg)
    version = dialect.dbapi.sqlite_version_info
    if version < _OLDEST:
        msg = (
            f"sqlaqueue.sqlite.prepare({engine!r}): SQLite {'.'.join(map(str, version))} has no UPDATE .. RETURNING; "
            "use a Python that is linked with SQLite 3.35 or newer"
        )
        raise ConfigurationError(msg)
    if is_prepared(sync):
        prepared: Any = engine_of(dialect)
        if busy_timeout not in {None, prepared.busy_timeout}:
            msg = (
                f"sqlaqueue.sqlite.prepare({engine!r}, busy_timeout={busy_timeout}): the engine has been prepared with "
                f"busy_timeout={prepared.busy_timeout}; give it in the first call, and call prepare() once"
            )
            raise ConfigurationError(msg)
        return
    other = SQLite() if busy_timeout is None else SQLite(busy_timeout)
    replace_compilers(
        sync,
        other,
        drivers=("sqlite3", "aiosqlite"),
        compilers=(StatementCompiler, TableCompiler, TypeCompiler),
        types={sa.DateTime: Moment},
    )
    # The compiler translates DELETE .. USING.
    dialect.delete_returning_multifrom = True

    def connecting(dialect: Any, record: Any, positional: Any, arguments: dict[str, Any]) -> None:
        # See refuse_autocommit(). Without it the driver does what isolation_level says.
        arguments.pop("autocommit", None)

    def connected(connection: Any, record: Any) -> None:
        refuse_autocommit(connection)
        # The driver begins no transaction by itself.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(other.busy_timeout * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.close()
        info = record.info
        add_functions(connection, lambda channel, text: send(info, channel, text), is_written_here(info))

    event.listen(sync, "do_connect", connecting)
    event.listen(sync, "connect", connected)
    event.listen(sync, "close", release_lock)
    event.listen(sync, "close_detached", release_lock)
    # A listener of the program may have changed it since.
    event.listen(sync, "checkout", refuse_autocommit)
    refuse_files_of_parent(sync)
    begin_when_needed(sync)
    note_written_rows(sync)
    notify_within_process(sync, channel_of_change)
    carry_out_statements(sync, other, _run_step)


def _run_step(connection: sa.Connection, cte: Any, parameters: Mapping[str, Any]) -> list[list[Any]]:
    result = connection.execute(cte.element, parameters)
    if not result.returns_rows:
        return []
    # As the driver has them: the following statements give them back to it.
    cursor: Any = result.cursor
    rows = [list(row) for row in cursor.fetchall()]
    result.close()
    keys = keys_in(cte) if cte.element.is_update else []
    if len(keys) < len(cte.c) and keys:
        # The other columns are read again. JSON would be larger, and has no infinite numbers.
        places = {number for number, column in enumerate(cte.c) if any(column is key for key in keys)}
        rows = [[value if number in places else None for number, value in enumerate(row)] for row in rows]
    return rows
