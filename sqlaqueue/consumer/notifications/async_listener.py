"""The listener for async code: one task and connection per engine and event loop that receives its notifications."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from sqlaqueue.consumer.core.waker import limit_connects
from sqlaqueue.consumer.notifications.listener import (
    CHECK_INTERVAL,
    LONGEST_END,
    REPLY_TIMEOUT,
    BaseListener,
    Subscriber,
    enable_keepalive,
    sends_in_process,
    subscribe,
    unsubscribe,
)
from sqlaqueue.consumer.notifications.polls import PollSchedule
from sqlaqueue.queue.spec import QueueSpec


class AsyncListener(BaseListener):
    """A task that listens on the channels of its subscriptions, and ends with the last one."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__()
        self._engine = AsyncEngine(engine)
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, channel: str, subscriber: Subscriber, watching: str | None = None) -> None:
        if sends_in_process(self._engine.sync_engine):
            subscribe(self._engine.sync_engine, channel, subscriber, asyncio.get_running_loop())
            return
        limit_connects(self._engine.sync_engine)
        super().add(channel, subscriber, watching)
        # It may have been cancelled, as by remove().
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="sqlaqueue-listener")
        self.wake()

    async def remove(self, subscriber: Subscriber) -> None:
        """Deliver nothing more to ``subscriber``; with the last one the connection is closed."""
        if sends_in_process(self._engine.sync_engine):
            unsubscribe(subscriber)
            return
        self.subscriptions.remove(subscriber)
        self.wake()
        task = self._task
        if task is None or self.subscriptions.channels:
            return
        # The caller may dispose of the engine next, and close the loop.
        await asyncio.wait([task], timeout=LONGEST_END)
        if not task.done():
            # The database does not answer.
            task.cancel()
            await asyncio.wait([task], timeout=LONGEST_END)

    def deliver(self, channel: str, text: str) -> None:
        self._failures = 0
        self.subscriptions.deliver(channel, text)

    def wake(self) -> None:
        self._woken.set()

    async def _run(self) -> None:
        while self.subscriptions.channels:
            failed = False
            try:
                async with self._connection() as (connection, driver):
                    await self._listen(connection, driver)
            except Exception as error:  # noqa: BLE001 - subscribers poll meanwhile, and the next try may succeed
                failed = not self._reconnects
                if failed:
                    self._failed(error)
            self._reconnects = False
            self.subscriptions.connection_lost()
            if failed:
                await self._wait(self._delay())

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[AsyncConnection, Any]]:
        connection = await self._engine.connect()
        driver: Any = None
        answers = False
        try:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            driver = (await connection.get_raw_connection()).driver_connection
            # It is used for as long as there are subscriptions, and must not count against the pool.
            await connection.run_sync(lambda sync: sync.detach())
            yield connection, driver
            answers = not self._reconnects
        finally:
            if not answers and hasattr(driver, "terminate"):
                # asyncpg's close() waits for a reply, and the connection may be half open.
                driver.terminate()
            await connection.close()
            if hasattr(driver, "fileno") and not driver.closed:
                # SQLAlchemy does not wait until a detached connection of psycopg is closed.
                await driver.close()

    async def _listen(self, connection: AsyncConnection, driver: Any) -> None:
        quote = connection.dialect.identifier_preparer.quote_identifier
        channels = _Asyncpg(driver, self) if hasattr(driver, "add_listener") else _Psycopg(driver, self, quote)
        listening: set[str] = set()
        self._reconnects, silent_since = False, time.monotonic()
        while not self._reconnects:
            while (taken := self.subscriptions.take_statement()) is not None:
                statement, watch = taken
                watch.answered(await self._reply(driver, connection.scalar(statement)))
            wanted = self.subscriptions.channels
            if not wanted:
                break
            for channel in listening - wanted:
                await self._reply(driver, channels.unlisten(channel))
            for channel in wanted - listening:
                await self._reply(driver, channels.listen(channel))
                self.subscriptions.listening_lost({channel})
            listening = wanted
            await channels.receive()
            with channels.waking():
                woken = await self._wait(min(CHECK_INTERVAL, self.subscriptions.until_overdue()))
            if woken:
                silent_since = time.monotonic()
                continue
            self.subscriptions.report_overdue()
            if time.monotonic() - silent_since >= CHECK_INTERVAL:
                await self._reply(driver, connection.exec_driver_sql("SELECT 1"))
                self._failures, silent_since = 0, time.monotonic()

    async def _reply(self, driver: Any, statement: Awaitable[Any]) -> Any:
        """Wait for the reply to a statement: there is none on a connection that is half open."""
        self._waiting = driver
        try:
            async with asyncio.timeout(REPLY_TIMEOUT):
                return await statement
        finally:
            self._waiting = None

    async def _wait(self, seconds: float) -> bool:
        """Wait until :meth:`wake` is called, or for some seconds; return whether it was called."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True


@contextlib.asynccontextmanager
async def woken_in_loop(
    engine: sa.Engine, polls: PollSchedule, watched: QueueSpec | None, channel: str
) -> AsyncIterator[None]:
    """Do as :func:`~sqlaqueue.consumer.notifications.listener.woken_by`, for a Consumer of this event loop."""
    subscribe(engine, channel, polls, asyncio.get_running_loop(), watched)
    try:
        yield
    finally:
        thread = unsubscribe(polls)
        until = time.monotonic() + LONGEST_END
        while thread is not None and thread.is_alive() and time.monotonic() < until:  # noqa: ASYNC110 - a thread knows no event of the loop
            await asyncio.sleep(_MOMENT)


_MOMENT = 0.005


class _Asyncpg:
    """asyncpg calls a function for each notification."""

    def __init__(self, driver: Any, listener: AsyncListener) -> None:
        self._driver, self._listener = driver, listener

    async def listen(self, channel: str) -> None:
        await self._driver.add_listener(channel, self._received)

    async def unlisten(self, channel: str) -> None:
        await self._driver.remove_listener(channel, self._received)

    @contextlib.contextmanager
    def waking(self) -> Iterator[None]:
        """Wake the listener if the connection ends meanwhile."""
        self._driver.add_termination_listener(self._terminated)
        try:
            yield
        finally:
            self._driver.remove_termination_listener(self._terminated)

    async def receive(self) -> None:
        """Find out whether the connection was lost; asyncpg reads it itself.

        :raises ConnectionError: if it was.
        """
        if self._driver.is_closed():
            msg = "the server has ended the connection"
            raise ConnectionError(msg)

    def _terminated(self, _: Any) -> None:
        self._listener.wake()

    def _received(self, _: Any, __: int, channel: str, text: str) -> None:
        self._listener.deliver(channel, text)
        # Its subscriber may expect the next one earlier than the listener waits.
        self._listener.wake()


class _Psycopg:
    """psycopg returns notifications when it is called to read its connection."""

    def __init__(self, driver: Any, listener: AsyncListener, quote: Callable[[str], str]) -> None:
        self._driver, self._listener, self._quote = driver, listener, quote
        enable_keepalive(driver.fileno())

    async def listen(self, channel: str) -> None:
        await self._driver.execute(f"LISTEN {self._quote(channel)}")

    async def unlisten(self, channel: str) -> None:
        await self._driver.execute(f"UNLISTEN {self._quote(channel)}")

    @contextlib.contextmanager
    def waking(self) -> Iterator[None]:
        """Wake the listener if something arrives meanwhile."""
        loop, descriptor = asyncio.get_running_loop(), self._driver.fileno()
        # Not while a statement is executed: psycopg then registers its own reader for this descriptor.
        loop.add_reader(descriptor, self._listener.wake)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)

    async def receive(self) -> None:
        async for each in self._driver.notifies(timeout=0):
            self._listener.deliver(each.channel, each.payload)


_listeners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[sa.Engine, AsyncListener]] = (
    weakref.WeakKeyDictionary()
)


def async_listener_of(engine: sa.Engine) -> AsyncListener:
    listeners = _listeners.setdefault(asyncio.get_running_loop(), {})
    if engine not in listeners:
        listeners[engine] = AsyncListener(engine)
    return listeners[engine]
