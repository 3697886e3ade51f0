"""One connection an engine and event loop that listens, in a task, for the AsyncConsumers of that engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from sqlaqueue.consumer.notifications.subscriptions import (
    ANSWER,
    CHECK,
    Subscriber,
    Subscriptions,
    keep_alive,
    wait_before,
)
from sqlaqueue.log import fields, logger


class AsyncListener:
    """A task that listens on the channels that somebody wants to hear."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = AsyncEngine(engine)
        self.subscriptions = Subscriptions()
        self._rung = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def add(self, channel: str, subscriber: Subscriber) -> None:
        """Have ``subscriber`` hear what is said on ``channel``."""
        self.subscriptions.add(channel, subscriber)
        if self._task is None:
            self._task = asyncio.create_task(self._listen(), name="sqlaqueue-ear")
        self._rung.set()

    async def remove(self, subscriber: Subscriber) -> None:
        """Have ``subscriber`` hear no more; with the last one the connection is closed."""
        self.subscriptions.remove(subscriber)
        self._rung.set()
        task = self._task
        if task is not None and not self.subscriptions.channels:
            # The engine may be disposed of next, and the loop closed.
            await asyncio.wait([task], timeout=5)

    def reconnect(self) -> None:
        """Make another connection: nothing arrives by this one."""
        self._again = True
        self._rung.set()

    async def _listen(self) -> None:
        failures = 0
        while self.subscriptions.channels:
            try:
                async with self._connection() as (connection, driver):
                    await self._serve(connection, driver)
                    failures = 0
            except Exception as error:  # noqa: BLE001 - Consumers poll meanwhile, and the next try may do better
                failures += 1
                if failures == 1:
                    kind = type(error).__name__
                    extra = fields("listener_lost", error_kind=kind)
                    logger.warning("cannot listen for new jobs, polling: %s: %s", kind, error, extra=extra)
            self.subscriptions.listening_lost(self.subscriptions.channels)
            if failures:
                await self._wait(wait_before(failures))
        self._task = None

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[AsyncConnection, Any]]:
        connection = await self._engine.connect()
        driver: Any = None
        try:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            driver = (await connection.get_raw_connection()).driver_connection
            # It is kept for as long as somebody listens, and must not be missing in the pool.
            await connection.run_sync(lambda sync: sync.detach())
            yield connection, driver
        finally:
            if self._again and hasattr(driver, "terminate"):
                # asyncpg's close() waits for the server's answer, and half of this connection may be gone.
                driver.terminate()
            await connection.close()
            if hasattr(driver, "fileno") and not driver.closed:
                # SQLAlchemy closes a detached connection of psycopg without waiting for it.
                await driver.close()

    async def _serve(self, connection: AsyncConnection, driver: Any) -> None:
        quote = connection.dialect.identifier_preparer.quote_identifier
        by_callback = hasattr(driver, "add_listener")
        listener = _ByCallback(driver, self) if by_callback else _ByDescriptor(driver, self, quote)
        listening: set[str] = set()
        self._again, silent_since = False, time.monotonic()
        while (wanted := self.subscriptions.channels) and not self._again:
            for channel in listening - wanted:
                await listener.end(channel)
            for channel in wanted - listening:
                await listener.begin(channel)
                self.subscriptions.listening_lost({channel})
            listening = wanted
            await listener.receive()
            with listener.watched():
                rung = await self._wait(min(CHECK, self.subscriptions.until_overdue()))
            if rung:
                silent_since = time.monotonic()
                continue
            self.subscriptions.report_overdue()
            if time.monotonic() - silent_since >= CHECK:
                await self._ask(connection)
                silent_since = time.monotonic()

    async def _ask(self, connection: AsyncConnection) -> None:
        """Ask whether the connection is still there; no answer is an answer."""
        try:
            async with asyncio.timeout(ANSWER):
                await connection.exec_driver_sql("SELECT 1")
        except TimeoutError:
            self._again = True
            raise

    async def _wait(self, seconds: float) -> bool:
        """Wait until something can be read, or somebody rings; return whether that was so."""
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            return False
        self._rung.clear()
        return True

    def ring(self) -> None:
        """Have the task look at its connection."""
        self._rung.set()


class _ByCallback:
    """asyncpg calls back."""

    def __init__(self, driver: Any, ear: AsyncListener) -> None:
        self._driver, self._ear = driver, ear

    async def begin(self, channel: str) -> None:
        """Listen on a channel."""
        await self._driver.add_listener(channel, self._said)

    async def end(self, channel: str) -> None:
        """Listen on it no more."""
        await self._driver.remove_listener(channel, self._said)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ring the ear meanwhile, should the connection end."""
        self._driver.add_termination_listener(self._lost)
        try:
            yield
        finally:
            self._driver.remove_termination_listener(self._lost)

    async def receive(self) -> None:
        """Nothing is to be fetched."""

    def _lost(self, _: Any) -> None:
        self._ear.reconnect()

    def _said(self, _: Any, __: int, channel: str, words: str) -> None:
        self._ear.subscriptions.deliver(channel, words)


class _ByDescriptor:
    """psycopg has what arrives fetched from the connection."""

    def __init__(self, driver: Any, ear: AsyncListener, quote: Callable[[str], str]) -> None:
        self._driver, self._ear, self._quote = driver, ear, quote
        keep_alive(driver.fileno())

    async def begin(self, channel: str) -> None:
        """Listen on a channel."""
        await self._driver.execute(f"LISTEN {self._quote(channel)}")

    async def end(self, channel: str) -> None:
        """Listen on it no more."""
        await self._driver.execute(f"UNLISTEN {self._quote(channel)}")

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ring the ear meanwhile, when something arrives."""
        loop, descriptor = asyncio.get_running_loop(), self._driver.fileno()
        # Only while nothing is executed: psycopg itself waits by the same means, and takes this one's place.
        loop.add_reader(descriptor, self._ear.ring)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)

    async def receive(self) -> None:
        """Fetch what has arrived, and pass it on."""
        async for each in self._driver.notifies(timeout=0):
            self._ear.subscriptions.deliver(each.channel, each.payload)


_listeners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[sa.Engine, AsyncListener]] = (
    weakref.WeakKeyDictionary()
)


def async_listener_of(engine: sa.Engine) -> AsyncListener:
    """Return the ear that all AsyncConsumers of an engine share in the running event loop."""
    ears = _listeners.setdefault(asyncio.get_running_loop(), {})
    if engine not in ears:
        ears[engine] = AsyncListener(engine)
    return ears[engine]
