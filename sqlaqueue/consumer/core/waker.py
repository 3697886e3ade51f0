"""How a waiting thread is woken, and how long anything waits for the database: a pair of sockets, and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.log import fields, logger

_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.DefaultSelector)
"""Preferred since it opens no descriptor: a process that has too many files open must still be able to wait."""


@contextlib.contextmanager
def _signals_written_to(descriptor: int) -> Iterator[None]:
    """Let a signal that arrives in this block write to a descriptor, in the main thread.

    Python runs a signal's handler when the main thread executes the next bytecode. A signal that arrives after the
    last bytecode before the system call, or in another thread, does not interrupt the call, and would be handled only
    when it returns.
    """
    before = -1
    try:
        if threading.current_thread() is threading.main_thread():
            # A handler may have closed the descriptor, which the caller finds out.
            with contextlib.suppress(OSError, ValueError):
                before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
            if before != -1:
                # It belongs to an event loop whose handlers depend on it.
                signal.set_wakeup_fd(before)
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(before)


class Waker:
    """Wakes the one thread that waits for it; it can wait for connections at the same time.

    A :class:`threading.Event` would not do: a waiting thread holds the event's lock now and then, and a signal handler
    that interrupts it there would deadlock in ``set()``.
    """

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        for end in (self._sender, self._receiver):
            end.settimeout(0)
        self._descriptors: tuple[int, ...] = (self._sender.fileno(), self._receiver.fileno())
        self._files = self._identities()

    def _identities(self) -> list[tuple[int, int]]:
        return [(found.st_dev, found.st_ino) for found in [os.fstat(each) for each in self._descriptors]]

    @property
    def is_intact(self) -> bool:
        """Whether its sockets are open; a handler may have closed them by ``os.closerange()``.

        Their numbers may belong to a connection by then, from which nothing must be read here.
        """
        try:
            return self._identities() == self._files
        except OSError:
            return False

    def wake(self) -> None:
        """Wake the thread that waits, or that waits next."""
        if self.is_intact:
            with contextlib.suppress(OSError):
                self._sender.send(b"!")

    def wait(self, seconds: float, *descriptors: int) -> bool:
        """Wait until :meth:`wake` is called or a descriptor can be read; return False if the time passed instead."""
        receiver = self._receiver.fileno()
        with _Selector() as selector, _signals_written_to(self._sender.fileno()):
            for descriptor in (receiver, *descriptors):
                selector.register(descriptor, selectors.EVENT_READ)
            ready = [key.fd for key, _ in selector.select(seconds)]
        # Before anything is read: the descriptor may be that of a connection by now.
        self.check()
        if receiver in ready:
            with contextlib.suppress(OSError):
                self._receiver.recv(4096)
        return bool(ready)

    def check(self) -> None:
        """Refuse to go on if the sockets were closed, and with them probably the connections to the database."""
        if not self.is_intact:
            msg = (
                "a handler has closed file descriptors that it had not opened, as os.closerange() does; this process "
                "cannot use its connections any more, and its jobs run again in another one"
            )
            raise HandlerMisuseError(msg)

    def close(self) -> None:
        """Close the sockets; :meth:`wake` does nothing from now on."""
        if not self.is_intact:
            # The numbers may belong to others.
            self._sender.detach()
            self._receiver.detach()
        self._descriptors = ()
        self._sender.close()
        self._receiver.close()


# -- statement deadline ------------------------------------------------------------------------------------------------
# A statement may wait for a lock, or for a reply that never arrives: after a failover behind a proxy, connections go
# silent without being closed. A ``statement_timeout`` would take a round trip for each transaction to set, and would
# not help on a silent connection. So a thread, or a task, looks from time to time at what the others wait for. First
# it asks the server to cancel the statement; if there is still no reply, it shuts the connection down, and the driver
# raises the error of a lost connection, for which everything is prepared. A COMMIT is not cancelled: one that waits
# for a synchronous standby would succeed by that, without the standby.
#
# The clock of a wait starts again with each transaction of its session, so an operation of many transactions may take
# its time. A handler's own statements have no deadline.


_CANCEL, _GIVE_UP = 0.6, 0.8
"""The parts of the longest wait after which a statement is cancelled, and its connection is given up."""

_CHECKS = 15
"""How many checks there are in the longest wait."""

_STUCK = 1.5
"""How many times the longest wait something may last before it is asked whether a new connection is answered."""

_SHORT_CHECK = 0.5
"""Seconds between checks while there are statements with a short deadline."""

_IDLE_AFTER = 2.0
"""Seconds without such a statement after which the checks are rare again."""

_CANCEL_TIMEOUT = 10.0
_LONGEST_PATIENCE = 16.0
"""How many times its first deadline a slow statement of maintenance is given at most."""

HANDLERS_FLUSH = "sqlaqueue_handlers_flush"
"""The key in the ``info`` of a session that is flushing what a handler has changed: these statements are its own."""

_pinging: dict[Any, Any] = {}
"""The connections that are tested before their use, by the thread or task that waits: no session has them yet."""

_committing: dict[Any, Any] = {}
"""The connections whose transactions are committed, by the thread or task that waits."""


class DatabaseWait:
    """What one thread or task waits for."""

    __slots__ = ("canceller", "deadline", "given_up", "loop", "owner", "session", "since", "slow", "transaction")

    def __init__(self, session: Session, owner: object, deadline: float | None, slow: object) -> None:
        self.session, self.owner, self.deadline, self.slow = session, owner, deadline, slow
        # A session that is being closed has forgotten the transaction whose rollback it waits for.
        self.transaction: SessionTransaction | None = session.get_transaction()
        self.since = time.monotonic()
        self.canceller: Any = None
        self.given_up = False
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of a session that is used in it, if a thread checks its deadline."""

    def restart(self) -> None:
        """Start the clock again, as there is progress within a transaction."""
        self.since = time.monotonic()

    def look(self, now: float) -> None:
        """Start the clock again if the session has gone on to another transaction, or the handler's statements run."""
        transaction = self.session.get_transaction()
        if transaction is not None and transaction is not self.transaction:
            # After a test of a silent connection the first transaction has as long as any other.
            if self.transaction is not None or self.given_up:
                self.since, self.given_up = now, False
            self.transaction = transaction
        if self.session.info.get(HANDLERS_FLUSH):
            self.since = now

    def connections(self) -> list[sa.Connection]:
        """Return the connections of the session that are open."""
        # SQLAlchemy has no public access to the connections of another thread's transaction.
        found = {} if self.transaction is None else self.transaction._connections  # noqa: SLF001 - see above
        used = {id(each[0]): each[0] for each in [*found.values()]}
        return [each for each in used.values() if not (each.closed or each.invalidated)]

    def drivers(self) -> list[Any]:
        """Return the connections of the driver that may be waiting for a reply."""
        tested = _pinging.get(self.owner)
        if tested is not None:
            return [getattr(tested, "driver_connection", tested)]
        return [each.connection.driver_connection for each in self.connections()]


class Deadlines:
    """The deadlines of a Consumer, of a Scheduler, or of a call.

    :param longest: the most seconds to wait for the database.
    :param in_loop: whether tasks of an event loop wait, and no threads.
    """

    engine: sa.Engine | None = None
    """Where a new connection shows whether the database answers, once a wait has lasted for too long."""

    def __init__(
        self, longest: float, who: str, log_fields: Callable[..., dict[str, Any]] = fields, *, in_loop: bool = False
    ) -> None:
        self.longest, self._who, self._log_fields, self._in_loop = longest, who, log_fields, in_loop
        self._open: dict[int, DatabaseWait] = {}
        self._wake, self._ended = threading.Event(), False
        self._used, self._next_check = float("-inf"), 0.0
        self._patience: dict[object, float] = {}
        self._said_at = self._probed_at = float("-inf")
        self._probe: Any = None
        self.is_stuck = False
        """Whether something has waited for far longer than it may, although a new connection is answered."""

    def begin(self, session: Session, deadline: float | None = None, slow: object = None) -> DatabaseWait:
        """Return a new wait of this thread or task; the caller ends it.

        It executes nothing and takes no lock, as each run of a job comes here.

        :param deadline: seconds after which the statements are cancelled, if that is to be earlier than usual.
        :param slow: names what may take long: after the server has cancelled it, it has twice as long the next time.
        """
        wait = DatabaseWait(session, asyncio.current_task() if self._in_loop else threading.get_ident(), deadline, slow)
        self._open[id(wait)] = wait
        if deadline is not None:
            self._used = wait.since
            if self._next_check > wait.since + deadline / 2:
                self._wake.set()
        return wait

    def end(self, wait: DatabaseWait) -> None:
        """End a wait of this thread."""
        if self._close(wait):
            # The request may arrive late, and would cancel a statement of this connection's next user.
            with contextlib.suppress(RuntimeError):  # it has not been started yet
                wait.canceller.join(1)
            _invalidate(wait)

    async def end_in_task(self, wait: DatabaseWait, session: Any) -> None:
        """End a wait of this task for a statement of an AsyncSession."""
        if self._close(wait):
            await asyncio.wait([wait.canceller], timeout=1)
            wait.canceller.cancel()
            await session.run_sync(lambda _: _invalidate(wait))

    def _close(self, wait: DatabaseWait) -> bool:
        """Forget a wait; return whether its statements have been cancelled."""
        del self._open[id(wait)]
        if wait.canceller is None:
            return False
        if wait.slow is not None and not wait.given_up:
            self._patience[wait.slow] = min(_LONGEST_PATIENCE, 2 * self._patience.get(wait.slow, 1.0))
        return True

    @contextlib.contextmanager
    def limit(self, session: Session, deadline: float | None = None, slow: object = None) -> Iterator[DatabaseWait]:
        """Limit how long the block waits; a thread checks it, also for a session of asyncio in ``run_sync()``."""
        wait = self.begin(session, deadline, slow)
        with contextlib.suppress(RuntimeError):
            wait.loop = asyncio.get_running_loop()
        try:
            yield wait
        finally:
            self.end(wait)

    @contextlib.asynccontextmanager
    async def limit_in_task(self, session: Any) -> AsyncIterator[None]:
        """Limit how long the block waits for the database by an AsyncSession."""
        wait = self.begin(session.sync_session)
        try:
            yield
        finally:
            await self.end_in_task(wait, session)

    def hurry(self, longest: float) -> None:
        """Wait no longer than this from now on, as at a shutdown."""
        self.longest = min(self.longest, longest)
        self._patience.clear()
        self._wake.set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[Deadlines]:
        """Check them in a thread of its own while the block runs."""
        thread = threading.Thread(target=self._run, name="sqlaqueue-deadlines", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended = True
            self._wake.set()
            thread.join()

    def _run(self) -> None:
        while not self._ended:
            pause = self._pause()
            self._next_check = time.monotonic() + pause
            self._wake.wait(pause)
            self._wake.clear()
            self.check()

    @contextlib.asynccontextmanager
    async def watched_in_task(self) -> AsyncIterator[Deadlines]:
        """Check them in a task of its own while the block runs."""
        task = asyncio.create_task(self._run_in_task(), name="sqlaqueue-deadlines")
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _run_in_task(self) -> None:
        while True:
            await asyncio.sleep(self._pause())
            self.check()

    def _pause(self) -> float:
        usual = self.longest / _CHECKS
        return min(usual, _SHORT_CHECK) if time.monotonic() - self._used < _IDLE_AFTER else usual

    def check(self) -> None:
        """Cancel the statements whose deadline has passed, and give up the connections that do not answer."""
        now, given_up, stuck = time.monotonic(), 0, False
        for wait in [*self._open.values()]:
            try:
                given_up += self._check(wait, now)
                stuck |= now - wait.since > _STUCK * self.longest * self._patience.get(wait.slow, 1.0)
            except Exception as error:  # noqa: BLE001 - it may have just ended, and the others are due all the same
                _log_not_cancelled(error)
        self.is_stuck &= stuck
        if stuck and self._probe is None and now - self._probed_at > self.longest:
            self._probed_at = now
            self._start_probe()
        if given_up:
            if now - self._said_at > self.longest:
                text = "%s: no reply of the database for %.0f s; giving up %s, and working on with new connections"
                number = "a connection" if given_up == 1 else f"{given_up} connections"
                extra = self._log_fields("connection_given_up", count=given_up)
                logger.warning(text, self._who, self.longest * _GIVE_UP, number, extra=extra)
            self._said_at = now

    def _check(self, wait: DatabaseWait, now: float) -> int:
        """Do what is due about one wait; return how many connections have been given up."""
        wait.look(now)
        longest = min(self.longest * _CANCEL, wait.deadline or self.longest) * self._patience.get(wait.slow, 1.0)
        silent = now - wait.since
        if silent < longest or wait.given_up:
            return 0
        drivers = wait.drivers()
        if not drivers:
            return 0
        may_cancel = wait.loop is None and wait.owner not in _pinging and wait.owner not in _committing
        if wait.canceller is None and may_cancel:
            self._cancel(drivers[0], wait)
            return 0
        if silent < longest * _GIVE_UP / _CANCEL:
            return 0
        wait.given_up = True
        for driver in drivers:
            if wait.loop is None:
                shut_down(driver)
            else:
                wait.loop.call_soon_threadsafe(shut_down, driver)
        return len(drivers)

    def _cancel(self, driver: Any, wait: DatabaseWait) -> None:
        engine = wait.connections()[0].engine
        if self._in_loop:
            wait.canceller = asyncio.ensure_future(_cancel_in_task(driver, engine))
            return
        thread = threading.Thread(target=_cancel, args=(driver, engine), name="sqlaqueue-cancel", daemon=True)
        # Before it starts: the wait may end, and is to know why, before this thread goes on.
        wait.canceller = thread
        thread.start()

    def _start_probe(self) -> None:
        if self.engine is None:
            return
        if self._in_loop:
            self._probe = asyncio.ensure_future(_in_greenlet(self._connect))
        else:
            self._probe = threading.Thread(target=self._connect, name="sqlaqueue-probe", daemon=True)
            self._probe.start()

    def _connect(self) -> None:
        try:
            _execute(cast("sa.Engine", self.engine), "SELECT 1")
            self.is_stuck = True
        except Exception as error:  # noqa: BLE001 - then the database is down, and a restart would not bring it back
            logger.debug("no new connection is answered: %s", error, extra=self._log_fields("cancel_failed"))
        finally:
            self._probe = None


def _invalidate(wait: DatabaseWait) -> None:
    for connection in wait.connections():
        connection.invalidate()


def _cancel(driver: Any, engine: sa.Engine) -> None:
    """Ask the server to cancel what a connection executes; this takes another connection."""
    try:
        statement = _cancelling(driver)
        if hasattr(driver, "cancel_safe"):
            driver.cancel_safe(timeout=_CANCEL_TIMEOUT)
        elif statement is not None:
            _execute(engine, statement)
        else:
            # sqlite3 calls it by another name.
            (getattr(driver, "cancel", None) or driver.interrupt)()
    except Exception as error:  # noqa: BLE001 - a server that cannot be reached executes nothing either
        _log_not_cancelled(error)


def _cancelling(driver: Any) -> str | None:
    """Return by which statement another connection cancels what this one executes; None if its driver can do that."""
    # While psycopg2 itself cancels, no other thread of the process runs, and asyncpg cancels a statement only with its
    # task, so that nobody would know what has become of it.
    pid = getattr(driver, "get_backend_pid", None) or getattr(driver, "get_server_pid", None)
    if pid is not None:
        return f"SELECT pg_cancel_backend({int(pid())})"
    of_mariadb = getattr(driver, "thread_id", None)
    return None if of_mariadb is None else f"KILL QUERY {int(of_mariadb())}"


async def _cancel_in_task(driver: Any, engine: sa.Engine) -> None:
    try:
        async with asyncio.timeout(_CANCEL_TIMEOUT):
            if hasattr(driver, "cancel_safe"):
                await driver.cancel_safe(timeout=_CANCEL_TIMEOUT)
            elif _cancelling(driver) is not None:
                await _in_greenlet(partial(_cancel, driver, engine))
            elif hasattr(driver, "interrupt"):
                await driver.interrupt()
    except Exception as error:  # noqa: BLE001 - a server that cannot be reached executes nothing either
        _log_not_cancelled(error)


async def _in_greenlet(function: Callable[[], object]) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession  # noqa: PLC0415 - needs greenlet, which sync code does not

    async with AsyncSession() as session:
        await session.run_sync(lambda _: function())


def _execute(engine: sa.Engine, statement: str) -> None:
    """Execute a statement on a new connection; those of the pool may be silent, or all in use."""
    pool = engine.pool.recreate()
    try:
        with contextlib.closing(pool.connect()) as connection, contextlib.closing(connection.cursor()) as cursor:
            cursor.execute(statement)
    finally:
        pool.dispose()


def _log_not_cancelled(error: Exception) -> None:
    kind = type(error).__name__
    extra = fields("cancel_failed", error_kind=kind)
    logger.warning("cannot cancel a statement after its deadline: %s: %s", kind, error, extra=extra)


def shut_down(driver: Any) -> None:
    """End a connection without waiting for the server; who waits for it gets the error of a lost connection.

    It is called from another thread than the one that waits, or for asyncpg and asyncmy in the event loop.
    """
    if hasattr(driver, "terminate"):
        driver.terminate()
        return
    # asyncmy has no other access; older versions have a StreamWriter.
    transport = getattr(driver, "_transport", None) or getattr(getattr(driver, "_writer", None), "transport", None)
    if transport is not None:
        transport.abort()
        return
    # Each driver has an error of its own for a connection that has been closed meanwhile.
    with contextlib.suppress(Exception):
        # A duplicate, as the driver must not find its descriptor closed, or used by another file.
        descriptor = driver.fileno() if hasattr(driver, "fileno") else driver._sock.fileno()  # noqa: SLF001 - PyMySQL has no other access
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


# -- connections that are made, or tested ------------------------------------------------------------------------

CONNECT_TIMEOUT = 10
"""Seconds for a new connection, where the engine has no timeout of its own. Drivers would wait for a minute or more."""

_LIMITED = "_sqlaqueue_limits_connects"


def limit_connects(engine: sa.Engine) -> None:
    """Limit how long an engine waits for a new connection, unless it says so itself, and find tests and commits.

    No session has a connection under test yet, so its deadline would pass unnoticed.
    """
    dialect: Any = engine.dialect
    if _LIMITED in dialect.__dict__:
        return
    dialect.__dict__[_LIMITED] = True
    option = {"psycopg": "connect_timeout", "psycopg2": "connect_timeout", "asyncpg": "timeout"}.get(dialect.driver)
    if option is not None and not (option == "connect_timeout" and "PGCONNECT_TIMEOUT" in os.environ):

        def connecting(_: sa.Dialect, __: Any, ___: Any, options: dict[str, Any]) -> None:
            options.setdefault(option, CONNECT_TIMEOUT)

        event.listen(engine, "do_connect", connecting)

    def recording(function: Callable[[Any], Any], connections: dict[Any, Any]) -> Callable[[Any], Any]:
        def call(connection: Any) -> Any:
            owner = asyncio.current_task() if dialect.is_async else threading.get_ident()
            connections[owner] = connection
            try:
                return function(connection)
            finally:
                del connections[owner]

        return call

    dialect.do_ping = recording(dialect.do_ping, _pinging)
    dialect.do_commit = recording(dialect.do_commit, _committing)
