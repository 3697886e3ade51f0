"""Prepares an engine for MariaDB: its compiler, its types, its transactions."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.pool import AssertionPool, SingletonThreadPool, StaticPool

from sqlaqueue.engines.notifications import note_before_inserts, notify_within_process, send
from sqlaqueue.engines.shared import SharedEngine, is_prepared, replace_compiler
from sqlaqueue.engines.verbs import carry_out_statements
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.mariadb import base
from sqlaqueue.mariadb.base import Moment, limit_lock_waits, release_keys_at_end
from sqlaqueue.mariadb.changes import EARLIER, execute, execute_each
from sqlaqueue.mariadb.compiler import NOTIFICATIONS, StatementCompiler
from sqlaqueue.mariadb.tables import check_comparable, stored_type, write_schedule_trigger
from sqlaqueue.sql.engine import schema_of

_DIALECT = mysql.dialect()
"""By which the types of columns are told apart."""

_HELD = ("batch_select", "delete_returning")
"""The strategies that hold a transaction."""

_STORAGE_ENGINE = sa.text(
    "SELECT engine FROM information_schema.tables "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table"
)
_CHARACTER_SET = sa.text(
    "SELECT character_set_name FROM information_schema.columns "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table AND column_name = :name"
)


class MariaDB(SharedEngine):
    """MariaDB, whose engines :func:`sqlaqueue.prepare` prepares.

    :param name: the name of SQLAlchemy's dialect, mariadb or mysql.
    """

    title = "MariaDB"
    needs_indexes = True

    def __init__(self, name: str) -> None:
        self.name = name

    begin_steps = staticmethod(base.refuse_autocommit)

    def schedule_trigger(self, table: sa.Table, dialect: sa.Dialect, name: str) -> str:
        return write_schedule_trigger(table, dialect, name)

    def locked(self, rows: Any, *, waits: bool = False) -> Any:
        """Return the rows with their locks."""
        return rows.with_for_update(skip_locked=not waits)

    has_one_writer = False
    lock_keys = staticmethod(base.lock_keys)

    sqlstate = staticmethod(base.sqlstate)
    violated_constraint = staticmethod(base.violated_constraint)
    violated_column = staticmethod(base.violated_column)
    violated_table = staticmethod(base.violated_table)
    now = "UTC_TIMESTAMP(6)"
    stored_type = staticmethod(stored_type)

    def why_no_strategy(self, strategy: Any) -> str | None:
        if strategy.name == "delete_returning" and strategy.keeps_rows:
            return "which changes a row in place, so that a table of messages would spare it nothing"
        return None if strategy.name in _HELD else super().why_no_strategy(strategy)

    def check_supported(self, spec: Any) -> None:
        super().check_supported(spec)
        for state, value in spec.config.states.items() if spec.has("status") else ():
            if isinstance(value, str) and "\\" in value:
                msg = (
                    f"{spec.model.__name__}: QueueConfig(states=States({state}={value!r})): a backslash has another "
                    "meaning in texts of MariaDB; use a value without one"
                )
                raise ConfigurationError(msg)
        if spec.config.unique is not None:
            check_comparable(spec, _DIALECT)
            if not spec.strategy.keeps_rows:
                msg = (
                    f"{spec.model.__name__}: Unique(...) with rows_are_messages=True is not available on MariaDB, "
                    "where no statement both inserts a row again and makes a dead letter of one that has a duplicate; "
                    'use QueueConfig(strategy="update_status")'
                )
                raise ConfigurationError(msg)
        if spec.strategy.holds_transaction and spec.config.flow_control:
            msg = (
                f'{spec.model.__name__}: limits, rates and orders under strategy "{spec.config.strategy}" are not '
                "available on MariaDB, where a transaction cannot see which rows other transactions have locked; use "
                'QueueConfig(strategy="update_status")'
            )
            raise ConfigurationError(msg)

    def check_storage(self, connection: sa.Connection, spec: Any) -> None:
        """Refuse tables without transactions, and a key of texts in another character set than that of the statements.

        The server converts such a column before it compares it, and uses no index: a settlement would read all rows,
        and wait for the locks of other workers.
        """
        for table in (spec.table, *spec.side_tables.values()):
            place = {"schema": schema_of(connection, table), "table": table.name}
            engine = connection.execute(_STORAGE_ENGINE, place).scalar()
            # None for a view, and for a table that this user may not see there.
            if engine not in {None, "InnoDB"}:
                msg = (
                    f"{spec.model.__name__}: the storage engine of the table {table.name} is {engine}, which has no "
                    f"transactions and no locks of rows; change it by `ALTER TABLE {table.name} ENGINE = InnoDB`"
                )
                raise DatabaseNotReadyError(msg)
        place = {"schema": schema_of(connection, spec.table), "table": spec.table.name}
        for key in spec.keys:
            found = connection.execute(_CHARACTER_SET, {**place, "name": key.name}).scalar()
            if found not in {None, "utf8mb4"}:
                msg = (
                    f"{spec.model.__name__}.{key.key}: the character set of the column {spec.table.name}.{key.name} is "
                    f"{found}, for which statements with several keys use no index; change it by `ALTER TABLE "
                    f"{spec.table.name} CONVERT TO CHARACTER SET utf8mb4`"
                )
                raise DatabaseNotReadyError(msg)

    def check_connection(self, connection: sa.Connection, who: str) -> str | None:
        """Accept each connection: what the library needs, it sets by statements of its own."""
        return None

    def check_pool(self, engine: sa.Engine, who: str) -> None:
        if isinstance(engine.pool, SingletonThreadPool | StaticPool | AssertionPool):
            msg = (
                f"{who}: the engine's {type(engine.pool).__name__} does not give each session a connection of its own, "
                "so handlers would commit and roll back each other's work; make the engine without poolclass="
            )
            raise ConfigurationError(msg)


def _keys(connection: sa.Connection, table: sa.Table, name: str) -> list[tuple[object, ...]]:
    quote = connection.dialect.identifier_preparer.quote
    keys = ", ".join(quote(key.name) for key in table.primary_key)
    query = f"SELECT {keys} FROM {name}"  # noqa: S608 - the names are quoted
    # As the driver has them: they are given back to it.
    return [tuple(row) for row in connection.exec_driver_sql(query)]


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


def prepare_mariadb(engine: sa.Engine) -> None:
    """Let transactions begin at READ COMMITTED, unless the engine was made with another ``isolation_level``.

    A DateTime is stored in UTC with microseconds, whatever the session's time zone is.
    """
    dialect: Any = engine.dialect
    if dialect.driver not in _DRIVERS:
        msg = (
            f"prepare({engine!r}): the engine is for {dialect.name} with {dialect.driver}; use "
            "create_engine('mariadb+pymysql://...') or create_async_engine('mariadb+asyncmy://...')"
        )
        raise ConfigurationError(msg)
    if is_prepared(engine):
        return
    other = MariaDB(dialect.name)
    replace_compiler(
        engine,
        other,
        drivers=_DRIVERS,
        compiler=StatementCompiler,
        types={sa.DateTime: Moment, postgresql.JSONB: mysql.JSON},
    )
    # An UPDATE with RETURNING is executed in several statements.
    dialect.update_returning = dialect.update_returning_multifrom = True

    def connected(connection: Any, record: Any) -> None:
        _check_version(dialect)
        # The engine has asked for the default of the server before.
        if dialect._on_connect_isolation_level is None:  # noqa: SLF001 - the argument of create_engine()
            dialect.set_isolation_level(connection, _LEVEL)
            dialect.default_isolation_level = _LEVEL
        cursor = connection.cursor()
        cursor.execute(f"SET SESSION {', '.join(f'{name} = {value}' for name, value in _SETTINGS.items())}")
        cursor.close()

    event.listen(engine, "connect", connected)
    event.listen(engine, "do_execute", execute)
    event.listen(engine, "do_executemany", execute_each)
    event.listen(engine, "after_cursor_execute", _notify)
    limit_lock_waits(engine)
    release_keys_at_end(engine)
    note_before_inserts(engine, EARLIER, _keys)
    notify_within_process(engine)
    carry_out_statements(engine, other)


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
        found = f"MySQL {shown}, which has no INSERT .. RETURNING"
    elif version[: len(_OLDEST)] < _OLDEST:
        found = f"MariaDB {shown}, which has no SKIP LOCKED"
    else:
        return
    msg = f"the server is {found}; use MariaDB 10.6 or newer"
    raise ConfigurationError(msg)
