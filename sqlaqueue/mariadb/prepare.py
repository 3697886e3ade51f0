"""Prepares an engine for MariaDB: its compilers, its types, its transactions."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql, postgresql

from sqlaqueue.engines.events import carry_out_statements
from sqlaqueue.engines.notifications import channel_of_change, notify_within_process, send
from sqlaqueue.engines.prepare import is_prepared, replace_compilers, whole_engine
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mariadb.compiler import NOTIFICATIONS, StatementCompiler
from sqlaqueue.mariadb.ddl import TableCompiler, TypeCompiler
from sqlaqueue.mariadb.engine import MariaDB
from sqlaqueue.mariadb.execution import execute, execute_each
from sqlaqueue.mariadb.lock_timeout import limit_lock_waits
from sqlaqueue.mariadb.steps import forget_rows, run_step
from sqlaqueue.mariadb.types import Moment
from sqlaqueue.mariadb.unique import insert_unless_twin
from sqlaqueue.mariadb.written_rows import note_written_rows

_DRIVERS = ("pymysql", "asyncmy")
_OLDEST = (10, 6)
_LEVEL = "READ COMMITTED"
_SETTINGS = {
    # A long list of keys would become a table, and the rows would not be found by the index.
    "in_predicate_conversion_threshold": 0,
    # An INSERT IGNORE may have one for each row.
    "max_error_count": 65535,
    # Each statement of the library has a condition, but not each one of a key: schedules would not be fired.
    "sql_safe_updates": 0,
    # A SELECT without its last rows would pass for one that has found no more.
    "sql_select_limit": 2**64 - 1,
}
"""What a session needs, whatever the settings of the server are."""


def prepare(engine: Any) -> None:
    """Prepare an engine, so that models with queues can be used with its sessions.

    Call it once, before the engine is used. Transactions of the engine begin at READ COMMITTED, unless it was made with
    another ``isolation_level``. A DateTime is stored in UTC with microseconds, whatever the session's time zone is.

    :param engine: an Engine with PyMySQL, or an AsyncEngine with asyncmy.
    :raises ConfigurationError: if the engine is for another database or driver, or has connected before. If the server
        is MariaDB before 10.6 or MySQL, the first connection raises it.
    """
    sync = whole_engine(engine)
    dialect: Any = sync.dialect
    if dialect.name not in {"mariadb", "mysql"} or dialect.driver not in _DRIVERS:
        msg = (
            f"sqlaqueue.mariadb.prepare({engine!r}): the engine is for {dialect.name} with {dialect.driver}; use "
            "create_engine('mariadb+pymysql://...') or create_async_engine('mariadb+asyncmy://...')"
        )
        raise ConfigurationError(msg)
    if is_prepared(sync):
        return
    other = MariaDB(dialect.name)
    replace_compilers(
        sync,
        other,
        drivers=_DRIVERS,
        compilers=(StatementCompiler, TableCompiler, TypeCompiler),
        types={sa.DateTime: Moment, postgresql.JSONB: mysql.JSON},
    )
    # An UPDATE with RETURNING is executed in several statements.
    dialect.update_returning = dialect.update_returning_multifrom = True
    dialect.delete_returning = dialect.delete_returning_multifrom = True

    def connected(connection: Any, record: Any) -> None:
        _check_version(dialect)
        # The engine has asked for the default of the server before.
        if dialect._on_connect_isolation_level is None:  # noqa: SLF001 - the argument of create_engine()
            dialect.set_isolation_level(connection, _LEVEL)
            dialect.default_isolation_level = _LEVEL
        cursor = connection.cursor()
        cursor.execute(f"SET SESSION {', '.join(f'{name} = {value}' for name, value in _SETTINGS.items())}")
        cursor.close()

    event.listen(sync, "connect", connected)
    event.listen(sync, "do_execute", insert_unless_twin)
    event.listen(sync, "do_execute", execute)
    event.listen(sync, "do_executemany", execute_each)
    event.listen(sync, "after_cursor_execute", _notify)
    limit_lock_waits(sync)
    note_written_rows(sync)
    notify_within_process(sync, channel_of_change)
    carry_out_statements(sync, other, run_step, locks_apart=True, forget=forget_rows)


def _notify(
    connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
) -> None:
    for names in getattr(getattr(context, "compiled", None), NOTIFICATIONS, ()):
        channel, text = (context.compiled_parameters[0][name] for name in names)
        send(connection.connection.info, channel, text)


def _check_version(dialect: Any) -> None:
    version = dialect.server_version_info or ()
    shown = ".".join(map(str, version))
    if not dialect.is_mariadb:
        lacks = "which has no INSERT .. RETURNING"
        msg = f"sqlaqueue.mariadb: the server is MySQL {shown}, {lacks}; use MariaDB 10.6 or newer"
        raise ConfigurationError(msg)
    if version[: len(_OLDEST)] < _OLDEST:
        msg = f"sqlaqueue.mariadb: the server is MariaDB {shown}, which has no SKIP LOCKED; use MariaDB 10.6 or newer"
        raise ConfigurationError(msg)
