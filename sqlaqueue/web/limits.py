"""The limits of the transactions of a dashboard: a timeout for each statement, and whether it may write."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import event

from sqlaqueue.sql.engine import WRITES_LATER, engine_of
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.sqlite.transactions import is_autocommit

_STEPS = 2000
"""After how many steps of its machine SQLite asks whether to go on: some ten microseconds."""


TransactionAccess = Literal["read", "read and lock", "write"]
"""What a transaction does. One that locks rows for a moment, where the database has such locks, is not read-only."""


def commits_each_statement(connection: sa.Connection) -> bool:
    """Return whether a connection is under AUTOCOMMIT."""
    if connection.dialect.name == "sqlite":
        return is_autocommit(connection)
    # Of drivers for MariaDB, autocommit is a method.
    if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
        return True
    asked: Any = getattr(connection.connection.driver_connection, "get_autocommit", None)
    return asked is not None and bool(asked())


def limit_transaction(connection: sa.Connection, seconds: float, access: TransactionAccess) -> None:
    """Limit the statements of a transaction that has just begun, until it ends.

    PostgreSQL cancels a statement by its own clock, and so does MariaDB. SQLite runs in this process, and asks a
    function now and then.

    :param seconds: after which a statement is cancelled.
    :raises ConfigurationError: for an engine that is not prepared, naming the line that is missing.
    """
    check_dialect(connection.dialect, "Dashboard")
    other = engine_of(connection.dialect)
    limit = _of_postgresql if other is None else _OTHERS[connection.dialect.name]
    limit(connection, seconds, access)


def _of_postgresql(connection: sa.Connection, seconds: float, access: TransactionAccess) -> None:
    milliseconds = str(max(int(seconds * 1000), 1))
    settings = {"statement_timeout": milliseconds, "lock_timeout": milliseconds}
    # An idle transaction holds back vacuum, and a request whose server dies leaves one.
    settings["idle_in_transaction_session_timeout"] = "30000"
    if access == "read":
        settings["transaction_read_only"] = "on"
    connection.execute(sa.select(*(sa.func.set_config(name, value, sa.true()) for name, value in settings.items())))


def _of_sqlite(connection: sa.Connection, seconds: float, access: TransactionAccess) -> None:
    until = time.monotonic() + seconds

    def restart(*_: Any) -> None:
        nonlocal until
        until = time.monotonic() + seconds

    event.listen(connection, "before_cursor_execute", restart)
    _watch(connection, lambda: time.monotonic() > until)
    driver: Any = connection.connection.driver_connection
    if access == "write":
        # An action reads first, and would be refused if another transaction commits before it writes.
        connection.execution_options(**{WRITES_LATER: True})
    elif not driver.in_transaction:
        # A savepoint that comes first would take the write lock, for which the page would wait.
        connection.exec_driver_sql("BEGIN")
    if access == "read":
        _execute(connection, "PRAGMA query_only = ON")

    def end() -> None:
        event.remove(connection, "before_cursor_execute", restart)
        _watch(connection, None)
        if access == "read":
            _execute(connection, "PRAGMA query_only = OFF")

    _at_end(connection, end)


def _watch(connection: sa.Connection, is_over: Callable[[], bool] | None) -> None:
    driver: Any = connection.connection.dbapi_connection
    if hasattr(driver, "run_async"):
        driver.run_async(lambda given: given.set_progress_handler(is_over, _STEPS))
    else:
        driver.set_progress_handler(is_over, _STEPS)


def _of_mariadb(connection: sa.Connection, seconds: float, access: TransactionAccess) -> None:
    if access == "read":
        _execute(connection, "SET TRANSACTION READ ONLY")
    (before,) = _execute(connection, "SELECT @@SESSION.max_statement_time")
    _execute(connection, f"SET SESSION max_statement_time = {float(seconds)}")
    _at_end(connection, lambda: _execute(connection, f"SET SESSION max_statement_time = {float(before)}"))


def _execute(connection: sa.Connection, statement: str) -> Any:
    """Execute a statement by the driver: those that SQLAlchemy knows would begin a transaction."""
    cursor: Any = connection.connection.cursor()
    try:
        cursor.execute(statement)
        return cursor.fetchone() if statement.startswith("SELECT") else None
    finally:
        cursor.close()


def _at_end(connection: sa.Connection, end: Callable[[], Any]) -> None:
    """Call a function before the transaction ends: after that, the connection of the pool may be another one's."""
    has_ended = False

    def ended(_: sa.Connection) -> None:
        nonlocal has_ended
        if has_ended or connection.invalidated or connection.closed:
            return
        has_ended = True
        try:
            end()
        except Exception as error:  # noqa: BLE001 - whatever a driver raises
            # It is lost, or would limit the next one who uses it.
            connection.invalidate(error)

    for name in ("commit", "rollback"):
        event.listen(connection, name, ended)


_OTHERS: dict[str, Callable[[sa.Connection, float, TransactionAccess], None]] = {
    "sqlite": _of_sqlite,
    "mariadb": _of_mariadb,
    "mysql": _of_mariadb,
}
