"""One connection a process and engine that listens, in a thread, for the Consumers of that engine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.notifications.subscriptions import CHECK, Subscriber, Subscriptions, keep_alive, wait_before
from sqlaqueue.log import fields, logger


class Listener:
    """A thread that listens on the channels that somebody wants to hear, and ends when nobody does."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.subscriptions = Subscriptions()
        self._waker = Waker()
        self._again = False
        self._thread = threading.Thread(target=self._listen, name="sqlaqueue-listener", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the connection is closed, or the database does not answer."""
        self._thread.join(timeout=2)

    def reconnect(self) -> None:
        """Make another connection: nothing arrives by this one."""
        self._again = True
        self.wake()

    def wake(self) -> None:
        """Have the thread see what has changed."""
        self._waker.wake()

    def _listen(self) -> None:
        failures = 0
        while not self._may_end():
            try:
                with self._connection() as (connection, driver):
                    self._serve(connection, driver)
                    failures = 0
            except Exception as error:  # noqa: BLE001 - Consumers poll meanwhile, and the next try may do better
                failures += 1
                if failures == 1:
                    kind = type(error).__name__
                    extra = fields("listener_lost", error_kind=kind)
                    logger.warning("cannot listen for new jobs, polling: %s: %s", kind, error, extra=extra)
            self.subscriptions.listening_lost(self.subscriptions.channels)
            if failures:
                self._waker.wait(wait_before(failures))

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
            # It is kept for as long as somebody listens, and must not be missing in the pool.
            connection.detach()
            yield connection, driver
        finally:
            connection.close()

    def _serve(self, connection: sa.Connection, driver: Any) -> None:
        keep_alive(driver.fileno())
        quote = connection.dialect.identifier_preparer.quote_identifier
        listening: set[str] = set()
        self._again, silent_since = False, time.monotonic()
        while (wanted := self.subscriptions.channels) and not self._again:
            for channel in listening - wanted:
                connection.exec_driver_sql(f"UNLISTEN {quote(channel)}")
            for channel in wanted - listening:
                connection.exec_driver_sql(f"LISTEN {quote(channel)}")
                self.subscriptions.listening_lost({channel})
            listening = wanted
            for channel, words in _received(driver):
                self.subscriptions.deliver(channel, words)
            if self._waker.wait(min(CHECK, self.subscriptions.until_overdue()), driver.fileno()):
                silent_since = time.monotonic()
                continue
            self.subscriptions.report_overdue()
            if time.monotonic() - silent_since >= CHECK:
                connection.exec_driver_sql("SELECT 1")
                silent_since = time.monotonic()


def _received(driver: Any) -> list[tuple[str, str]]:
    if hasattr(driver, "poll"):  # psycopg2
        driver.poll()
        found, driver.notifies[:] = [*driver.notifies], []
    else:
        found = [*driver.notifies(timeout=0)]
    return [(each.channel, each.payload) for each in found]


_listeners: dict[sa.Engine, Listener] = {}
_lock = threading.Lock()


def listen(engine: sa.Engine, channel: str, subscriber: Subscriber) -> None:
    """Have ``subscriber`` hear what is said on ``channel``, by the one connection of this process and engine."""
    with _lock:
        listener = _listeners.get(engine)
        if listener is None:
            listener = _listeners[engine] = Listener(engine)
            listener.start()
        listener.subscriptions.add(channel, subscriber)
        listener.wake()


def unlisten(engine: sa.Engine, subscriber: Subscriber) -> None:
    """Have ``subscriber`` hear no more; with the last one the connection is closed."""
    with _lock:
        listener = _listeners.get(engine)
        if listener is not None:
            listener.subscriptions.remove(subscriber)
            listener.wake()
    if listener is not None and not listener.subscriptions.channels:
        # Whoever ends the last Consumer may drop the database next.
        listener.join()


def reconnect(engine: sa.Engine) -> None:
    """Listen by another connection."""
    with _lock:
        listener = _listeners.get(engine)
        if listener is not None:
            listener.reconnect()


# A copy of this process has the connection, but not the thread.
os.register_at_fork(after_in_child=_listeners.clear)
