"""Collectors of the gauges of queues, for registries of prometheus_client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session

from sqlaqueue.admin.queue_depth import DEFAULT_LIMIT
from sqlaqueue.consumer.core.driver import drive
from sqlaqueue.consumer.sessions import resolve_factory
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.prometheus.gauges import families
from sqlaqueue.prometheus.reading import QueueReader, Reading
from sqlaqueue.prometheus.scrape import DEFAULT_MAX_AGE, DEFAULT_TIMEOUT, Scrape, ScrapeOptions
from sqlaqueue.session_types import makes_async
from sqlaqueue.write_routing import execute, open_session


class ScrapeCollector(Collector):
    """Collects the gauges of a scrape, one call at a time; a call that waited gets the result of the other one.

    :param perform: reads a queue, in a new session of its database.
    """

    def __init__(self, scrape: Scrape, perform: Callable[[QueueReader], Reading]) -> None:
        self._scrape, self._perform = scrape, perform
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Return the gauges without values, so that registering the collector reads no database."""
        return families([])

    def collect(self) -> Iterable[Metric]:
        """Return the gauges with their values."""
        with self._lock:
            cached = self._scrape.cached
            return drive(self._scrape.routine(), self._perform) if cached is None else cached


class QueueCollector(ScrapeCollector):
    """Collects the gauges of queues from their database.

    ::

        registry.register(QueueCollector([Email, Invoice], sessionmaker(engine)))

    Each queue is read in a read-only transaction of its own. What cannot be read, such as a table that is locked or
    missing, is left out, and ``sqlaqueue_scrape_success`` of the queue is then 0; other queues are not affected.

    :param models: the queue classes.
    :param session_factory: creates sessions, such as a ``sessionmaker(engine)``. With an ``async_sessionmaker`` use
        :func:`~sqlaqueue.prometheus.metrics_app`.
    :param statement_timeout: the time after which the server cancels a statement, in seconds or as a timedelta. After
        a failure nothing more is read of a queue that has taken this long.
    :param max_age: the time for which a result is served again, in seconds or as a timedelta, so that several
        Prometheus servers cost one scrape.
    :param count_limit: the number up to which unfinished jobs are counted.
    :param finished: whether to count finished jobs too, which reads the whole table at every scrape.
    :raises NotAQueueError: if one of ``models`` is not a queue.
    :raises ConfigurationError: for another invalid argument.
    """

    def __init__(
        self,
        models: Iterable[type[Any]],
        session_factory: Callable[[], Session],
        *,
        statement_timeout: float | timedelta = DEFAULT_TIMEOUT,
        max_age: float | timedelta = DEFAULT_MAX_AGE,
        count_limit: int = DEFAULT_LIMIT,
        finished: bool = False,
    ) -> None:
        options = ScrapeOptions(
            statement_timeout=statement_timeout, max_age=max_age, count_limit=count_limit, finished=finished
        )
        name = type(self).__name__
        super().__init__(Scrape(models, name, options), read_in_thread(session_factory, name))


def read_in_thread(session_factory: Any, what: str) -> Callable[[QueueReader], Reading]:
    """Return the function that reads a queue in a new session of a sync factory.

    :param what: the class or function that was given the factory, for error messages.
    :raises ConfigurationError: if it is not one.
    """
    if makes_async(session_factory):
        msg = f"{what}: {session_factory!r} makes AsyncSessions, and a registry collects in sync code; {_FIX}"
        raise ConfigurationError(msg)
    factory = resolve_factory(session_factory, what, is_async=False)

    def read(reader: QueueReader) -> Reading:
        session = open_session(factory)
        if not isinstance(session, Session):
            msg = f"{what}: {factory!r} makes {type(session).__name__}; {_FIX}"
            raise ConfigurationError(msg)
        with session:
            result: Reading = execute(session, reader.read)
        return result

    return read


_FIX = "give a sessionmaker, or use metrics_app(models, async_sessionmaker(engine))"
