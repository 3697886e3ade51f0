"""How each driver is fed with the rows of a COPY, in the transaction that SQLAlchemy's connection is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue.copy.column_plan import copy_command, place_of
from sqlaqueue.copy.errors import raise_as_sqlalchemy
from sqlaqueue.copy.rows import Feed
from sqlaqueue.copy.text_format import TextStream
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.backend import backend


@dataclass(frozen=True)
class Copy:
    """One COPY on one connection."""

    connection: sa.Connection
    table: sa.Table
    feed: Feed

    @property
    def command(self) -> str:
        """The statement."""
        return copy_command(place_of(self.table, self.connection), self.feed.plan.columns)

    @property
    def driver(self) -> Any:
        """The connection of the driver."""
        return self.connection.connection.driver_connection

    def run_async(self, send: Callable[[Any], Any]) -> Any:
        """Return what a coroutine function returns for the connection of an asynchronous driver."""
        adapted: Any = self.connection.connection.dbapi_connection
        return adapted.run_async(send)


class _Busy:
    """Stands in for the lock of psycopg's connection, which is held meanwhile and would be waited for for ever."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __enter__(self) -> None:
        raise self._feed.busy()

    def __exit__(self, *_: object) -> None:
        pass


def _psycopg(copy: Copy) -> int:
    driver = copy.driver
    with driver.cursor() as cursor:
        with cursor.copy(copy.command) as stream:
            write, lock = stream.write_row, driver.lock
            driver.lock = _Busy(copy.feed)
            try:
                for values in copy.feed:
                    write(values)
            finally:
                driver.lock = lock
        return int(cursor.rowcount)


def _async_psycopg(copy: Copy) -> int:
    async def send(driver: Any) -> Any:
        async with driver.cursor() as cursor:
            async with cursor.copy(copy.command) as stream:
                write = stream.write_row
                for values in copy.feed:
                    await write(values)
            return cursor.rowcount

    return int(copy.run_async(send))


def _psycopg2(copy: Copy) -> int:
    stream = TextStream(copy.feed)
    with copy.driver.cursor() as cursor:
        try:
            cursor.copy_expert(copy.command, stream)
            return int(cursor.rowcount)
        except Exception as error:  # noqa: BLE001 - raised where it is given no other context
            failure = stream.error or error
        # It lets the server say that reading has failed, and keeps to itself by what.
        raise failure


def _asyncpg(copy: Copy) -> int:
    if not copy.driver.is_in_transaction():
        # SQLAlchemy begins with the first statement that it sends itself.
        copy.connection.exec_driver_sql("SELECT 1")
    schema, name = place_of(copy.table, copy.connection)
    names = copy.feed.plan.names

    def send(driver: Any) -> Any:
        return driver.copy_records_to_table(name, schema_name=schema, columns=names, records=copy.feed)

    return int(copy.run_async(send).rpartition(" ")[2])


_SEND: dict[tuple[str, bool], Callable[[Copy], int]] = {
    ("psycopg", False): _psycopg,
    ("psycopg", True): _async_psycopg,
    ("psycopg2", False): _psycopg2,
    ("asyncpg", True): _asyncpg,
}


def check_driver(dialect: sa.Dialect, what: str) -> None:
    """Refuse a driver that nobody knows how to feed.

    :raises ConfigurationError: naming the driver.
    """
    backend().check_dialect(dialect, what)
    if (dialect.driver, dialect.is_async) not in _SEND:
        msg = (
            f"{what}: the driver {dialect.driver} is not served by COPY, those that are: psycopg, asyncpg, psycopg2; "
            "use session.execute(insert(...), rows)"
        )
        raise ConfigurationError(msg)


def send(copy: Copy) -> int:
    """Send all rows, and return how many the server has written.

    :raises StatementError: when a row is not like the first, or cannot be written.
    :raises sqlalchemy.exc.DBAPIError: when the server refuses them.
    """
    dialect = copy.connection.dialect
    try:
        return _SEND[dialect.driver, dialect.is_async](copy)
    except Exception as error:
        copy.feed.explain()
        failure = copy.feed.error
        if failure is None:
            raise_as_sqlalchemy(copy.connection, copy.command, error)
            if isinstance(error, TypeError | ValueError | OverflowError):
                raise copy.feed.refused(error) from error
            raise
        if getattr(copy.driver, "closed", False):
            # psycopg2 lets rows use the connection, and has lost it afterwards.
            copy.connection.invalidate(error)
    # That of whoever makes the rows, as it was raised: what driver and server make of it is no more than an echo.
    raise failure
