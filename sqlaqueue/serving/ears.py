"""One connection a process and engine that listens, in a thread, for the Consumers of that engine."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from sqlaqueue.serving.calls import Calls
from sqlaqueue.serving.hearing import CHECK, Hearers, keep_alive, wait_before

logger = logging.getLogger("sqlaqueue")


class Ear:
    """A thread that listens on the channels that somebody wants to hear."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._hearers = Hearers()
        self._bell, self._rung = socket.socketpair()
        for end in (self._bell, self._rung):
            end.settimeout(0)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._again = False

    def add(self, channel: str, calls: Calls) -> None:
        """Have ``calls`` hear what is said on ``channel``."""
        with self._lock:
            self._hearers.add(channel, calls)
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="sqlaqueue-ear", daemon=True)
                self._thread.start()
        self._ring()

    def remove(self, calls: Calls) -> None:
        """Have ``calls`` hear no more; with the last one the connection is closed."""
        self._hearers.remove(calls)
        self._ring()

    def reconnect(self) -> None:
        """Make another connection: nothing arrives by this one."""
        self._again = True
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def _listen(self) -> None:
        failures = 0
        while not self._may_end():
            try:
                with self._connection() as connection:
                    self._serve(connection)
                    failures = 0
            except Exception as error:  # noqa: BLE001 - Consumers poll meanwhile, and the next try may do better
                failures += 1
                if failures == 1:
                    logger.warning("cannot listen for new jobs, polling: %s: %s", type(error).__name__, error)
            self._hearers.doubt(self._hearers.channels)
            if failures:
                self._wait(wait_before(failures))

    def _may_end(self) -> bool:
        with self._lock:
            if self._hearers.channels:
                return False
            self._thread = None
            with _lock:
                _ears.pop(self._engine, None)
            return True

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sa.Connection]:
        connection = self._engine.connect()
        try:
            # It is kept for as long as somebody listens, and must not be missing in the pool.
            connection.detach()
            yield connection.execution_options(isolation_level="AUTOCOMMIT")
        finally:
            connection.close()

    def _serve(self, connection: sa.Connection) -> None:
        driver: Any = connection.connection.driver_connection
        keep_alive(driver.fileno())
        quote = connection.dialect.identifier_preparer.quote_identifier
        listening: set[str] = set()
        self._again = False
        while (wanted := self._hearers.channels) and not self._again:
            for channel in listening - wanted:
                connection.exec_driver_sql(f"UNLISTEN {quote(channel)}")
            for channel in wanted - listening:
                connection.exec_driver_sql(f"LISTEN {quote(channel)}")
                self._hearers.doubt({channel})
            listening = wanted
            for channel, words in _received(driver):
                self._hearers.say(channel, words)
            if not self._wait(CHECK, driver.fileno()):
                connection.exec_driver_sql("SELECT 1")

    def _wait(self, seconds: float, *descriptors: int) -> bool:
        """Wait until something can be read, or somebody rings; return whether that was so."""
        ready, *_ = select.select([self._rung.fileno(), *descriptors], [], [], seconds)
        with contextlib.suppress(OSError):
            self._rung.recv(4096)
        return bool(ready)


def _received(driver: Any) -> list[tuple[str, str]]:
    if hasattr(driver, "poll"):  # psycopg2
        driver.poll()
        found, driver.notifies[:] = [*driver.notifies], []
    else:
        found = [*driver.notifies(timeout=0)]
    return [(each.channel, each.payload) for each in found]


_ears: weakref.WeakKeyDictionary[sa.Engine, Ear] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def ear_of(engine: sa.Engine) -> Ear:
    """Return the ear that all Consumers of an engine share in this process."""
    with _lock:
        if engine not in _ears:
            _ears[engine] = Ear(engine)
        return _ears[engine]


# A copy of this process has the connection, but not the thread.
os.register_at_fork(after_in_child=_ears.clear)
