"""COPY by each driver, in the transaction of SQLAlchemy's connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue.copy.column_plan import copy_command, translated_name
from sqlaqueue.copy.errors import raise_as_sqlalchemy
from sqlaqueue.copy.rows import RowStream
from sqlaqueue.copy.text_format import TextStream
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.types import check_dialect


@dataclass(frozen=True)
class Copy:
    """One COPY on one connection."""

    connection: sa.Connection
    table: sa.Table
    rows: RowStream

    @property
    def command(self) -> str:
        """The COPY statement."""
        return copy_command(translated_name(self.table, self.connection), self.rows.plan.columns)

    @property
    def driver(self) -> Any:
        """The driver's connection."""
        return self.connection.connection.driver_connection

    def run_async(self, send: Callable[[Any], Any]) -> Any:
        """Call a coroutine function with the connection of an async driver, and return its result."""
        adapted: Any = self.connection.connection.dbapi_connection
        return adapted.run_async(send)


class _Busy:
    """Replaces the lock of psycopg's connection during a COPY: waiting for the lock would never end."""

    def __init__(self, rows: RowStream) -> None:
        self._rows = rows

    def __enter__(self) -> None:
        raise self._rows.busy()

    def __exit__(self, *_: object) -> None:
        pass


def _psycopg(copy: Copy) -> int:
    driver = copy.driver
    with driver.cursor() as cursor:
        with cursor.copy(copy.command) as stream:
            write, lock = stream.write_row, driver.lock
            driver.lock = _Busy(copy.rows)
            try:
                for values in copy.rows:
                    write(values)
            finally:
                driver.lock = lock
        return int(cursor.rowcount)


def _async_psycopg(copy: Copy) -> int:
    async def send(driver: Any) -> Any:
        async with driver.cursor() as cursor:
            async with cursor.copy(copy.command) as stream:
                write = stream.write_row
                for values in copy.rows:
                    await write(values)
            return cursor.rowcount

    return int(copy.run_async(send))


def _psycopg2(copy: Copy) -> int:
    stream = TextStream(copy.rows)
    with copy.driver.cursor() as cursor:
        try:
            cursor.copy_expert(copy.command, stream)
            return int(cursor.rowcount)
        except Exception as error:  # noqa: BLE001 - raised below, without a misleading context
            failure = stream.error or error
        # psycopg2 raises the error of the server that reading failed, and drops the cause.
        raise failure


def _asyncpg(copy: Copy) -> int:
    if not copy.driver.is_in_transaction():
        # SQLAlchemy begins the transaction with the first statement that it sends.
        copy.connection.exec_driver_sql("SELECT 1")
    schema, name = translated_name(copy.table, copy.connection)
    names = copy.rows.plan.names

    def send(driver: Any) -> Any:
        return driver.copy_records_to_table(name, schema_name=schema, columns=names, records=copy.rows)

    return int(copy.run_async(send).rpartition(" ")[2])


_SEND: dict[tuple[str, bool], Callable[[Copy], int]] = {
    ("psycopg", False): _psycopg,
    ("psycopg", True): _async_psycopg,
    ("psycopg2", False): _psycopg2,
    ("asyncpg", True): _asyncpg,
}


def check_driver(dialect: sa.Dialect, what: str) -> None:
    """Refuse a driver without an implementation of COPY.

    :raises ConfigurationError: with the name of the driver.
    """
    check_dialect(dialect, what)
    if (dialect.driver, dialect.is_async) not in _SEND:
        msg = (
            f"{what}: the driver {dialect.driver} is not supported; use psycopg, asyncpg or psycopg2, or "
            "session.execute(insert(...), rows)"
        )
        raise ConfigurationError(msg)


def send(copy: Copy) -> int:
    """Send all rows, and return the number of rows that the server wrote.

    :raises StatementError: if a row has other attributes than the first, or cannot be written.
    :raises sqlalchemy.exc.DBAPIError: if the server refuses a row.
    """
    dialect = copy.connection.dialect
    try:
        return _SEND[dialect.driver, dialect.is_async](copy)
    except Exception as error:
        copy.rows.explain()
        failure = copy.rows.error
        if failure is None:
            raise_as_sqlalchemy(copy.connection, copy.command, error)
            if isinstance(error, TypeError | ValueError | OverflowError):
                raise copy.rows.refused(error) from error
            raise
        if getattr(copy.driver, "closed", False):
            # psycopg2 does not prevent the generator of rows from using the connection, and then breaks it.
            copy.connection.invalidate(error)
    # The original error of the rows, rather than the errors of driver and server that follow from it.
    raise failure
