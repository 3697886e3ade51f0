"""One connection a process and engine that listens, in a thread, for the Consumers of that engine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from sqlaqueue.consumer.core.waker import Bell
from sqlaqueue.consumer.notifications.subscriptions import CHECK, Hearer, Hearers, keep_alive, wait_before
from sqlaqueue.log import fields, logger


class Ear:
    """A thread that listens on the channels that somebody wants to hear, and ends when nobody does."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self.hearers = Hearers()
        self._bell = Bell()
        self._again = False
        self._thread = threading.Thread(target=self._listen, name="sqlaqueue-ear", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the connection is closed, or the database does not answer."""
        self._thread.join(timeout=2)

    def reconnect(self) -> None:
        """Make another connection: nothing arrives by this one."""
        self._again = True
        self.ring()

    def ring(self) -> None:
        """Have the thread see what has changed."""
        self._bell.ring()

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
            self.hearers.doubt(self.hearers.channels)
            if failures:
                self._bell.wait(wait_before(failures))

    def _may_end(self) -> bool:
        with _lock:
            if self.hearers.channels:
                return False
            del _ears[self._engine]
            self._bell.close()
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
        while (wanted := self.hearers.channels) and not self._again:
            for channel in listening - wanted:
                connection.exec_driver_sql(f"UNLISTEN {quote(channel)}")
            for channel in wanted - listening:
                connection.exec_driver_sql(f"LISTEN {quote(channel)}")
                self.hearers.doubt({channel})
            listening = wanted
            for channel, words in _received(driver):
                self.hearers.say(channel, words)
            if self._bell.wait(min(CHECK, self.hearers.until_missed()), driver.fileno()):
                silent_since = time.monotonic()
                continue
            self.hearers.miss()
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


_ears: dict[sa.Engine, Ear] = {}
_lock = threading.Lock()


def listen(engine: sa.Engine, channel: str, hearer: Hearer) -> None:
    """Have ``hearer`` hear what is said on ``channel``, by the one connection of this process and engine."""
    with _lock:
        ear = _ears.get(engine)
        if ear is None:
            ear = _ears[engine] = Ear(engine)
            ear.start()
        ear.hearers.add(channel, hearer)
        ear.ring()


def unlisten(engine: sa.Engine, hearer: Hearer) -> None:
    """Have ``hearer`` hear no more; with the last one the connection is closed."""
    with _lock:
        ear = _ears.get(engine)
        if ear is not None:
            ear.hearers.remove(hearer)
            ear.ring()
    if ear is not None and not ear.hearers.channels:
        # Whoever ends the last Consumer may drop the database next.
        ear.join()


def reconnect(engine: sa.Engine) -> None:
    """Listen by another connection."""
    with _lock:
        ear = _ears.get(engine)
        if ear is not None:
            ear.reconnect()


# A copy of this process has the connection, but not the thread.
os.register_at_fork(after_in_child=_ears.clear)
