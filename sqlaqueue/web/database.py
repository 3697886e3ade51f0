"""Runs functions of a Session for requests, within limits, so that a dashboard never hurts the queue."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
import sqlalchemy as sa
from anyio.lowlevel import RunVar
from sqlalchemy import event
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, SessionTransaction

from sqlaqueue.consumer.core.errors import is_connect_error, is_connection_lost
from sqlaqueue.consumer.core.waker import Deadlines
from sqlaqueue.sessions import execute, makes_async, open_session, resolve_factory
from sqlaqueue.sql.engine import WRITES_LATER, engine_of
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.sqlite.transactions import is_autocommit
from sqlaqueue.web.data.reader import WITHOUT_SAVEPOINTS, PartFailedError
from sqlaqueue.web.errors import Busy, ServiceUnavailable

T = TypeVar("T")

READ_TIMEOUT = 2.0
"""Seconds after which the server cancels a statement that only shows something."""

WRITE_TIMEOUT = 30.0
"""Seconds after which the server cancels a statement of an action."""

MOST_AT_ONCE = 4
"""The number of sessions that are used at the same time, however many users there are."""

MOST_OF_A_READER = 3
"""How many of them one reader uses, so that the pages of others do not wait behind statements that take long."""

Reader: TypeAlias = tuple[str, str]
"""Who reads: ``("user", name)``, or ``("address", host)`` if the application does not name its users."""

READER: ContextVar[Reader] = ContextVar("sqlaqueue_dashboard_reader", default=("user", ""))
"""That of the request that is being served."""

_LONGEST_WAIT = 5.0


class Places:
    """What only some requests may do at the same time, and some of them of one reader, so that others find a place.

    :param number: how many requests there are at most, in each event loop: a test, or a server with threads, may use
        several.
    :param of_a_reader: how many of them one reader has.
    :param busy: what is said to a request that has found no place within some seconds.
    """

    def __init__(self, name: str, number: int, of_a_reader: int, busy: str) -> None:
        self._number, self._of_a_reader, self._busy = number, of_a_reader, busy
        self._everybody: RunVar[anyio.CapacityLimiter] = RunVar(f"sqlaqueue_dashboard_{name}")
        # They live as long as somebody uses or waits for a place.
        self._of_readers: RunVar[WeakValueDictionary[Reader, anyio.CapacityLimiter]]
        self._of_readers = RunVar(f"sqlaqueue_dashboard_{name}_of_readers")

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait until the reader may have a further place; its own limit comes first, so that it waits for itself.

        :raises Busy: if that takes too long.
        """
        everybody = of_this_loop(self._everybody, lambda: anyio.CapacityLimiter(self._number))
        of_readers = of_this_loop(self._of_readers, WeakValueDictionary[Reader, anyio.CapacityLimiter])
        own = of_readers.setdefault(READER.get(), anyio.CapacityLimiter(self._of_a_reader))
        borrower, held = object(), list[anyio.CapacityLimiter]()
        try:
            try:
                with anyio.fail_after(_LONGEST_WAIT):
                    for limiter in (own, everybody):
                        await limiter.acquire_on_behalf_of(borrower)
                        held.append(limiter)
            except TimeoutError:
                raise Busy(self._busy, "Try again in a few seconds.") from None
            yield
        finally:
            for limiter in held:
                limiter.release_on_behalf_of(borrower)


_FAILURES_EXPECTED = 30.0
"""Seconds for which parts are read in savepoints after one has failed."""


TransactionAccess = Literal["read", "read and lock", "write"]
"""What a transaction does. One that locks rows for a moment, where the database has such locks, is not read-only."""


class _Limits(NamedTuple):
    statement_timeout: float
    access: TransactionAccess


class Database:
    """The database of a dashboard: sessions are used in threads, those of an async_sessionmaker in the event loop."""

    def __init__(self, session_factory: Callable[[], Any], what: str) -> None:
        self.is_async = makes_async(session_factory)
        """Whether its sessions are AsyncSessions."""
        self.sessions = resolve_factory(session_factory, what, is_async=self.is_async)
        self._savepoints_until = 0.0
        """Until when each part of a page is read in a savepoint, since one has failed lately."""
        busy = "Too many pages are being read at the moment."
        self._places = Places("sessions", MOST_AT_ONCE, MOST_OF_A_READER, busy)

    async def read(
        self, operation: Callable[..., T], *args: Any, statement_timeout: float = READ_TIMEOUT, read_only: bool = True
    ) -> T:
        """Return ``operation(session, *args)``, and roll back.

        :param statement_timeout: the seconds after which the server cancels a statement.
        :param read_only: whether the transaction is read-only. One that locks rows for a moment is not.
        :raises ServiceUnavailable: if the database cannot be reached, or all sessions are in use.
        """
        limits = _Limits(statement_timeout, "read" if read_only else "read and lock")
        try:
            return await self._run(self._reading, limits, operation, args)
        except Busy:
            raise
        except ServiceUnavailable:
            # A connection of the pool may be from before a restart of the server. SQLAlchemy has dropped them all.
            return await self._run(self._reading, limits, operation, args)

    async def write(self, operation: Callable[..., T], *args: Any, statement_timeout: float = WRITE_TIMEOUT) -> T:
        """Return ``operation(session, *args)``, which commits what it has changed.

        :raises ServiceUnavailable: if the database cannot be reached, or all sessions are in use. What was committed
            before stays.
        """
        return await self._run(_writing, _Limits(statement_timeout, "write"), operation, args)

    def _reading(self, session: Session, limits: _Limits, operation: Callable[..., T], args: tuple[Any, ...]) -> T:
        with _limited(session, limits):
            try:
                if time.monotonic() >= self._savepoints_until:
                    session.info[WITHOUT_SAVEPOINTS] = True
                try:
                    result: T = execute(session, operation, args)
                except PartFailedError:
                    self._savepoints_until = time.monotonic() + _FAILURES_EXPECTED
                    session.rollback()
                    del session.info[WITHOUT_SAVEPOINTS]
                    result = execute(session, operation, args)
                return result
            finally:
                session.rollback()

    async def _run(self, run: Callable[..., T], *args: Any) -> T:
        async with self._places.one():
            try:
                session = open_session(self.sessions)
                if self.is_async:
                    async with session:
                        result: T = await session.run_sync(run, *args)
                        return result
                return await anyio.to_thread.run_sync(_in_thread, session, run, args)
            except Exception as error:
                if is_connection_lost(error) or is_connect_error(error) or isinstance(error, PoolTimeout):
                    text = "The database cannot be reached."
                    advice = "Check that it runs; this page works again as soon as it does."
                    raise ServiceUnavailable(text, advice) from error
                raise


def of_this_loop(variable: RunVar[T], make: Callable[[], T]) -> T:
    """Return the value of a variable in this event loop, made when it is first asked for."""
    try:
        return variable.get()
    except LookupError:
        made = make()
        variable.set(made)
        return made


def _in_thread(session: Session, run: Callable[..., T], args: tuple[Any, ...]) -> T:
    with session:
        return run(session, *args)


def _writing(session: Session, limits: _Limits, operation: Callable[..., T], args: tuple[Any, ...]) -> T:
    with _limited(session, limits):
        result: T = execute(session, operation, args)
        return result


@contextmanager
def _limited(session: Session, limits: _Limits) -> Iterator[None]:
    def begun(_: Session, transaction: SessionTransaction, connection: sa.Connection) -> None:
        # A savepoint has the settings of its transaction, in which an operation may have lowered them.
        if not transaction.nested:
            _check_transactions(connection)
            limit_transaction(connection, limits.statement_timeout, limits.access)

    event.listen(session, "after_begin", begun)
    try:
        # The server cancels what takes too long; without any reply the connection is silent, and is given up.
        with Deadlines(2 * WRITE_TIMEOUT, "the dashboard").watched() as deadlines, deadlines.limit(session):
            yield
    finally:
        event.remove(session, "after_begin", begun)


def _check_transactions(connection: sa.Connection) -> None:
    """Refuse connections under AUTOCOMMIT: limits and locks would end with the statement that has set them."""
    if commits_each_statement(connection):
        raise ServiceUnavailable(
            "The sessions of the dashboard commit each statement by itself (AUTOCOMMIT).",
            "Give it a sessionmaker of an engine with another isolation_level.",
        )


# -- the limits of a transaction --------------------------------------------------------------------------------------

_STEPS = 2000
"""After how many steps of its machine SQLite asks whether to go on: some ten microseconds."""


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
