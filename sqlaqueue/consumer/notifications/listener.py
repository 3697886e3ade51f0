"""The listener for sync code: one thread and connection per engine and process that receives its notifications."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import sqlalchemy as sa

from sqlaqueue.consumer.core.waker import Waker, limit_connects, shut_down
from sqlaqueue.consumer.notifications.polls import PollSchedule
from sqlaqueue.consumer.notifications.watch import Watch
from sqlaqueue.log import fields, logger
from sqlaqueue.notify_payloads import Payload, parse
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of

CHECK_INTERVAL = 60.0
"""Seconds of silence after which a listener checks its connection."""

REPLY_TIMEOUT = 10.0
"""Seconds for the reply to that check."""

_FIRST_DELAY, _MAX_DELAY = 0.2, 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


def enable_keepalive(descriptor: int) -> None:
    """Have the operating system probe a silent TCP connection, which may be half open."""
    # A UNIX socket supports no keepalive and needs none.
    # The duplicate descriptor is closed with the socket object; the connection keeps its own.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Subscriber(Protocol):
    """Receives the notifications of one channel: the poll schedule of a Consumer, or the state of a waiting caller.

    Its methods are called in the listener's thread or event loop, and must not block.
    """

    def receive(self, payload: Payload) -> None:
        """Handle a notification."""

    def listening_lost(self) -> None:
        """Handle a new or lost connection: notifications may have been missed."""

    def until_overdue(self) -> float:
        """Return the seconds until a notification that it expects is overdue; inf if it expects none."""
        return float("inf")

    def notification_overdue(self) -> None:
        """Handle that this time has passed."""
        return


class Subscriptions:
    """The subscribers of one listener, by channel. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[Subscriber, str] = {}
        self._watches: dict[tuple[str, str], Watch] = {}

    def add(self, channel: str, subscriber: Subscriber) -> None:
        with self._lock:
            self._channels[subscriber] = channel

    def watch(self, channel: str, part: str, schedule: PollSchedule, wake: Callable[[], object]) -> None:
        """Watch the queue for a Consumer; ``wake`` is called when it waits and the listener has something to do."""
        with self._lock:
            watch = self._watches.setdefault((channel, part), Watch(channel, part))
            watch.schedules.append(schedule)
        schedule.neighbours = lambda: watch.schedules
        schedule.on_wait = lambda: wake() if watch.is_due() else None

    def remove(self, subscriber: Subscriber) -> None:
        with self._lock:
            self._channels.pop(subscriber, None)
            for watch in self._watches.values():
                watch.schedules = [each for each in watch.schedules if each is not subscriber]

    def take_statement(self) -> tuple[sa.Executable, Watch] | None:
        """Return a statement that is to be executed now, and the watch that its result is for."""
        with self._lock:
            watches = list(self._watches.items())
        for key, watch in watches:
            if (statement := watch.statement()) is not None:
                return statement, watch
            with self._lock:
                if not watch.schedules and watch.mode == "away":
                    self._watches.pop(key, None)
        return None

    @property
    def channels(self) -> set[str]:
        with self._lock:
            return set(self._channels.values())

    def deliver(self, channel: str, text: str) -> None:
        """Deliver a notification to the subscribers of its channel; one that cannot be parsed is dropped."""
        payload = parse(text)
        if payload is not None:
            for subscriber in self._of({channel}):
                subscriber.receive(payload)
            for watch in self._watches_of({channel}):
                watch.received(payload)

    def connection_lost(self) -> None:
        for watch in self._watches_of(None):
            watch.lost()
        self.listening_lost(self.channels)

    def listening_lost(self, channels: set[str]) -> None:
        for subscriber in self._of(channels):
            subscriber.listening_lost()

    def until_overdue(self) -> float:
        """Return the seconds until a subscriber misses a notification, or a watch has something to do."""
        overdue = [each.until_overdue() for each in self._of(self.channels)]
        return max(0.0, min([*overdue, *(each.until_due() for each in self._watches_of(None))], default=float("inf")))

    def report_overdue(self) -> None:
        for subscriber in self._of(self.channels):
            if subscriber.until_overdue() <= 0:
                subscriber.notification_overdue()

    def _watches_of(self, channels: set[str] | None) -> list[Watch]:
        with self._lock:
            return [watch for (name, _), watch in self._watches.items() if channels is None or name in channels]

    def _of(self, channels: set[str]) -> list[Subscriber]:
        with self._lock:
            return [subscriber for subscriber, channel in self._channels.items() if channel in channels]


_ends: dict[Subscriber, Callable[[], Any]] = {}


def sends_in_process(engine: sa.Engine) -> bool:
    """Return whether the notifications of an engine's database stay in the process of the sender."""
    return engine_of(engine.dialect) is not None


def subscribe(
    engine: sa.Engine,
    channel: str,
    subscriber: Subscriber,
    loop: asyncio.AbstractEventLoop | None = None,
    watched: QueueSpec | None = None,
) -> None:
    """Deliver what transactions of this process send on ``channel``; in ``loop``, unless any thread may do it.

    :param watched: for the poll schedule of a Consumer, the queue in which jobs of other processes are looked for.
    """
    other = engine_of(engine.dialect)
    if other is None:
        return

    def deliver(name: str, text: str) -> None:
        payload = parse(text) if name == channel else None
        if payload is None:
            return
        if loop is None:
            subscriber.receive(payload)
            return
        # The loop may have ended a moment ago.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(subscriber.receive, payload)

    _ends[subscriber] = other.subscribe(engine, deliver, None if watched is None else (watched, subscriber))


def unsubscribe(subscriber: Subscriber) -> threading.Thread | None:
    """Deliver nothing more; return the thread that watched for the subscriber and is ending, if it was the last one."""
    end = _ends.pop(subscriber, None)
    watcher = None if end is None else end()
    thread: threading.Thread | None = getattr(watcher, "thread", None)
    return thread


@contextlib.contextmanager
def woken_by(engine: sa.Engine, polls: PollSchedule, watched: QueueSpec | None, channel: str) -> Iterator[None]:
    """Deliver them to a Consumer in a block, if the engine is one that sends them in its process.

    :param watched: its queue, if jobs of other processes are to be noticed.
    """
    subscribe(engine, channel, polls, watched=watched)
    try:
        yield
    finally:
        thread = unsubscribe(polls)
        if thread is not None:
            # Until its connection is closed, as the caller may fork, or remove the database, next.
            thread.join(LONGEST_END)


LONGEST_END = 2.0
"""Seconds for a connection to be closed."""

_LONGEST_SLEEP = 1.0
"""Seconds of a pause that cannot be interrupted."""


class BaseListener:
    """What the listeners of threads and of tasks share."""

    def __init__(self) -> None:
        self.subscriptions = Subscriptions()
        self._reconnects = False
        self._waiting: Any = None
        """The driver's connection while a reply is waited for."""
        self._failures = 0
        """How many connections in a row have failed before they proved to work."""

    def add(self, channel: str, subscriber: Subscriber, watching: str | None = None) -> None:
        self.subscriptions.add(channel, subscriber)
        if watching is not None:
            self.subscriptions.watch(channel, watching, cast("PollSchedule", subscriber), self.wake)

    def wake(self) -> None:
        """Make the thread or task read the subscriptions and the connection."""
        raise NotImplementedError

    def reconnect(self) -> None:
        """Replace the connection, as no notification arrives by it."""
        self._reconnects = True
        if (driver := self._waiting) is not None:
            # It may be half open, and the reply never arrive.
            shut_down(driver)
        self.wake()

    def _failed(self, error: Exception) -> None:
        """Count a failed connection, and log the first; subscribers poll meanwhile, and the next one may work."""
        self._failures += 1
        if self._failures == 1:
            kind = type(error).__name__
            extra = fields("listener_lost", error_kind=kind)
            logger.warning("cannot listen for notifications, polling: %s: %s", kind, error, extra=extra)

    def _delay(self) -> float:
        """Return the seconds to wait before connecting again."""
        return min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** min(self._failures, 10))


class Listener(BaseListener):
    """A thread that listens on the channels of its subscriptions, and ends with the last one."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__()
        self._engine, self._waker = engine, Waker()
        self.thread = threading.Thread(target=self._run, name="sqlaqueue-listener", daemon=True)

    def wake(self) -> None:
        self._waker.wake()

    def _run(self) -> None:
        while not self._may_end():
            failed = False
            try:
                with self._connection() as (connection, driver):
                    self._listen(connection, driver)
            except Exception as error:  # noqa: BLE001 - subscribers poll meanwhile, and the next try may succeed
                failed = not self._reconnects
                if failed:
                    self._failed(error)
            self._reconnects = False
            self.subscriptions.connection_lost()
            if failed:
                self._pause(self._delay())

    def _pause(self, seconds: float) -> None:
        try:
            self._waker.wait(seconds)
        except Exception:  # noqa: BLE001 - the thread must not end: no other one would listen again
            time.sleep(min(seconds, _LONGEST_SLEEP))

    def _may_end(self) -> bool:
        with _lock:
            if self.subscriptions.channels:
                return False
            del _listeners[self._engine]
            self._waker.close()
            return True

    @contextlib.contextmanager
    def _connection(self) -> Iterator[tuple[sa.Connection, Any]]:
        connection = self._engine.connect()
        try:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            driver = connection.connection.driver_connection
            # It is used for as long as there are subscriptions, and must not count against the pool.
            connection.detach()
            yield connection, driver
        finally:
            connection.close()

    def _listen(self, connection: sa.Connection, driver: Any) -> None:
        enable_keepalive(driver.fileno())
        quote = connection.dialect.identifier_preparer.quote_identifier
        listening: set[str] = set()
        self._reconnects, silent_since = False, time.monotonic()
        while not self._reconnects:
            while (taken := self.subscriptions.take_statement()) is not None:
                statement, watch = taken
                watch.answered(self._execute(connection, driver, statement))
            wanted = self.subscriptions.channels
            if not wanted:
                break
            for channel in listening - wanted:
                self._execute(connection, driver, f"UNLISTEN {quote(channel)}")
            for channel in wanted - listening:
                self._execute(connection, driver, f"LISTEN {quote(channel)}")
                self.subscriptions.listening_lost({channel})
            listening = wanted
            for channel, text in _received(driver):
                self._failures = 0
                self.subscriptions.deliver(channel, text)
            if self._waker.wait(min(CHECK_INTERVAL, self.subscriptions.until_overdue()), driver.fileno()):
                silent_since = time.monotonic()
                continue
            self.subscriptions.report_overdue()
            if time.monotonic() - silent_since >= CHECK_INTERVAL:
                self._execute(connection, driver, "SELECT 1")
                self._failures, silent_since = 0, time.monotonic()

    def _execute(self, connection: sa.Connection, driver: Any, statement: str | sa.Executable) -> Any:
        """Execute a statement and return its value; a connection without a reply may be half open, and is given up."""
        timer = threading.Timer(REPLY_TIMEOUT, shut_down, (driver,))
        timer.daemon = True
        timer.start()
        self._waiting = driver
        try:
            execute: Any = connection.exec_driver_sql if isinstance(statement, str) else connection.execute
            result = execute(statement)
            return result.scalar() if result.returns_rows else None
        finally:
            self._waiting = None
            timer.cancel()


def _received(driver: Any) -> list[tuple[str, str]]:
    """Return the channel and the text of each notification that has arrived."""
    if hasattr(driver, "poll"):  # psycopg2
        driver.poll()
        found, driver.notifies[:] = [*driver.notifies], []
    else:
        found = [*driver.notifies(timeout=0)]
    return [(each.channel, each.payload) for each in found]


_listeners: dict[sa.Engine, Listener] = {}
_lock = threading.Lock()


def listen(engine: sa.Engine, channel: str, subscriber: Subscriber, watching: str | None = None) -> None:
    """Deliver the notifications of ``channel`` to ``subscriber``, by the listener of this process and engine.

    :param watching: for the poll schedule of a Consumer, what part of the queue it serves, see :class:`Watch`.
    """
    if sends_in_process(engine):
        subscribe(engine, channel, subscriber)
        return
    with _lock:
        listener = _listeners.get(engine)
        if listener is None:
            limit_connects(engine)
            listener = Listener(engine)
            listener.thread.start()
            _listeners[engine] = listener
        listener.add(channel, subscriber, watching)
        listener.wake()


def unlisten(engine: sa.Engine, subscriber: Subscriber) -> None:
    """Deliver nothing more to ``subscriber``; with the last one the connection is closed."""
    if sends_in_process(engine):
        unsubscribe(subscriber)
        return
    with _lock:
        listener = _listeners.get(engine)
        if listener is not None:
            listener.subscriptions.remove(subscriber)
            listener.wake()
    if listener is not None and not listener.subscriptions.channels:
        # Until its connection is closed, as the caller may drop the database next; it may not answer.
        listener.thread.join(timeout=LONGEST_END)


def reconnect(engine: sa.Engine) -> None:
    with _lock:
        listener = _listeners.get(engine)
        if listener is not None:
            listener.reconnect()


def _after_fork_in_child() -> None:
    """Forget the listeners, whose connections belong to the parent, and the lock, which a missing thread may have."""
    global _lock  # noqa: PLW0603 - nothing else replaces it
    _lock = threading.Lock()
    _listeners.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
