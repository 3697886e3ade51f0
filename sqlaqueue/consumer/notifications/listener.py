"""The listener for sync code: one thread and connection per engine and process that receives its notifications."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from sqlaqueue.consumer.core.statement_deadline import limit_connects, shut_down
from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.notifications.in_process import sends_in_process, subscribe, unsubscribe
from sqlaqueue.consumer.notifications.reconnect import (
    CHECK_INTERVAL,
    REPLY_TIMEOUT,
    enable_keepalive,
    log_failure,
    reconnect_delay,
)
from sqlaqueue.consumer.notifications.subscriptions import Subscriber, Subscriptions

_LONGEST_SLEEP = 1.0
"""Seconds of a pause that cannot be interrupted."""


class Listener:
    """A thread that listens on the channels of its subscriptions, and ends with the last one."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.subscriptions = Subscriptions()
        self._waker = Waker()
        self._reconnects = False
        self._failures = 0
        """How many connections in a row have failed before they proved to work."""
        self._thread = threading.Thread(target=self._run, name="sqlaqueue-listener", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has closed its connection; two seconds at most, as the database may not answer."""
        self._thread.join(timeout=2)

    def reconnect(self) -> None:
        """Replace the connection, as no notification arrives by it."""
        self._reconnects = True
        self.wake()

    def wake(self) -> None:
        """Make the thread read the subscriptions again."""
        self._waker.wake()

    def _run(self) -> None:
        while not self._may_end():
            failed = False
            try:
                with self._connection() as (connection, driver):
                    self._listen(connection, driver)
            except Exception as error:  # noqa: BLE001 - subscribers poll meanwhile, and the next try may succeed
                failed = True
                self._failures += 1
                if self._failures == 1:
                    log_failure(error)
            self.subscriptions.listening_lost(self.subscriptions.channels)
            if failed:
                self._pause(reconnect_delay(self._failures))

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
        while (wanted := self.subscriptions.channels) and not self._reconnects:
            for channel in listening - wanted:
                _execute(connection, driver, f"UNLISTEN {quote(channel)}")
            for channel in wanted - listening:
                _execute(connection, driver, f"LISTEN {quote(channel)}")
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
                _execute(connection, driver, "SELECT 1")
                self._failures, silent_since = 0, time.monotonic()


def _execute(connection: sa.Connection, driver: Any, statement: str) -> None:
    """Execute a statement; without a reply the connection, which may be half open, is given up."""
    timer = threading.Timer(REPLY_TIMEOUT, shut_down, (driver,))
    timer.daemon = True
    timer.start()
    try:
        connection.exec_driver_sql(statement)
    finally:
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


def listen(engine: sa.Engine, channel: str, subscriber: Subscriber) -> None:
    """Deliver the notifications of ``channel`` to ``subscriber``, by the listener of this process and engine."""
    if sends_in_process(engine):
        subscribe(engine, channel, subscriber)
        return
    with _lock:
        listener = _listeners.get(engine)
        if listener is None:
            limit_connects(engine)
            listener = Listener(engine)
            listener.start()
            _listeners[engine] = listener
        listener.subscriptions.add(channel, subscriber)
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
        # The caller may drop the database next.
        listener.join()


def reconnect(engine: sa.Engine) -> None:
    """Replace the connection of this process's listener for an engine."""
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
