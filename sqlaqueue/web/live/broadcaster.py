"""Who is told that something has changed in a queue: the open windows of one dashboard and event loop.

While at least one window shows a queue, its channel is subscribed to, by the listener that Consumers of the same
process use as well. Notifications only say that it is worth looking; what windows show, they read themselves. Behind a
pooler, where no notification arrives, windows are told by the timer of their stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeAlias

import anyio
import sqlalchemy as sa

from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.notifications.async_listener import async_listener_of
from sqlaqueue.notify_payloads import Heartbeat, Payload, WaitRequest
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.web.database import Database
from sqlaqueue.web.settings import Queue
from sqlaqueue.write_routing import primary_bind

MOST_VIEWERS = 100
"""How many windows are served at once; each has a connection to the web server, and reads its page again and again."""

MOST_OF_A_READER = 20
"""How many of them one reader has, so that no reader takes them all from the others."""

Reader: TypeAlias = tuple[str, str]
"""Who has a window: ``("user", name)``, or ``("address", host)`` if the application does not name its users."""

_GATHER = 0.2
"""Seconds for which the notifications of a queue are gathered: a busy queue sends thousands in a second."""


class Viewer:
    """An open window: which of its queues have changed since it was last told."""

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._event = asyncio.Event()

    def add(self, queue: str) -> None:
        """Record that a queue has changed."""
        self._changed.add(queue)
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        """Wait until something has changed, or for some seconds; return whether something has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        return bool(self._changed)

    def take(self) -> list[str]:
        """Return the names of the queues that have changed, and forget them."""
        changed = sorted(self._changed)
        self._changed.clear()
        self._event.clear()
        return changed


class Channel:
    """The subscriber of a queue's channel, for all windows that show the queue."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._is_gathering = False
        self.viewers: set[Viewer] = set()

    # Called in the thread or the event loop of the listener.

    def receive(self, payload: Payload) -> None:
        """Handle a notification; those that every Consumer sends all the time mean no change."""
        if not isinstance(payload, Heartbeat | WaitRequest):
            self.listening_lost()

    def listening_lost(self) -> None:
        """Tell the windows soon: something has changed, or a notification of it may have been missed."""
        if not self._is_gathering:
            self._is_gathering = True
            # A loop that is closed has no windows.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.call_later, _GATHER, self._tell)

    def until_overdue(self) -> float:
        """Expect no notification."""
        return float("inf")

    def notification_overdue(self) -> None:
        """Do nothing, as none is expected."""

    def _tell(self) -> None:
        self._is_gathering = False
        for viewer in self.viewers:
            viewer.add(self._queue)


class Broadcaster:
    """The windows of one dashboard in one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._channels: dict[str, Channel] = {}
        self._windows: Counter[Reader] = Counter()

    @property
    def is_full(self) -> bool:
        """Whether no further window is served at the moment."""
        return self._windows.total() >= MOST_VIEWERS

    def has_enough(self, reader: Reader) -> bool:
        """Whether no further window of this reader is served at the moment."""
        return self._windows[reader] >= MOST_OF_A_READER

    @contextlib.asynccontextmanager
    async def watch(self, queues: Iterable[Queue], reader: Reader) -> AsyncIterator[Viewer]:
        """Give a viewer that is told of changes in these queues while the block runs."""
        viewer, watched = Viewer(), list(queues)
        self._windows[reader] += 1
        try:
            for queue in watched:
                self._subscribe(viewer, queue)
            yield viewer
        finally:
            self._windows[reader] -= 1
            if not self._windows[reader]:
                del self._windows[reader]
            # A request that is cancelled must not leave its subscriptions.
            with anyio.CancelScope(shield=True):
                for queue in watched:
                    await self._unsubscribe(viewer, queue)

    def _subscribe(self, viewer: Viewer, queue: Queue) -> None:
        channel = self._channels.get(queue.name)
        if channel is None:
            channel = self._channels[queue.name] = Channel(queue.name)
            engine, name = self._engine_of(queue), channel_of(queue.spec)
            if self._database.is_async:
                async_listener_of(engine).add(name, channel)
            else:
                listener.listen(engine, name, channel)
        channel.viewers.add(viewer)

    async def _unsubscribe(self, viewer: Viewer, queue: Queue) -> None:
        channel = self._channels.get(queue.name)
        if channel is None:
            return
        channel.viewers.discard(viewer)
        if channel.viewers:
            return
        del self._channels[queue.name]
        engine = self._engine_of(queue)
        if self._database.is_async:
            await async_listener_of(engine).remove(channel)
        else:
            # It may wait for the listener's thread.
            await asyncio.to_thread(listener.unlisten, engine, channel)

    def _engine_of(self, queue: Queue) -> sa.Engine:
        session: Any = self._database.sessions()
        sync_session = session.sync_session if self._database.is_async else session
        engine: sa.Engine = primary_bind(sync_session, queue.spec.mapper).engine
        return engine
