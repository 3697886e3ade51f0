"""The gauges of queues for Prometheus: what they mean, how they are read, and a scrape of several queues."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin.jobs import JobFilter, bind_arguments, count
from sqlaqueue.admin.schedules import schedules
from sqlaqueue.admin.state import DEFAULT_LIMIT, is_paused, keys_at_limit, live_consumers, missing_indexes
from sqlaqueue.admin.state import depth as read_depth
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.effects import adrive, drive
from sqlaqueue.consumer.core.waker import Deadlines
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.mixin import specs_by_name
from sqlaqueue.queue.config import is_count
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.recurrence import ScheduleTables
from sqlaqueue.sessions import execute, makes_async, open_session, resolve_factory
from sqlaqueue.sql.portable import set_setting
from sqlaqueue.telemetry.asgi import Receive, Scope, Send, answer_lifespan


@dataclass(frozen=True)
class Gauge:
    name: str
    meaning: str
    labels: tuple[str, ...] = ("queue",)


JOBS = Gauge(
    "sqlaqueue_jobs",
    "Jobs by state. Pending and processing jobs are counted up to a limit; finished ones only if the exporter is asked "
    "to count them.",
    ("queue", "state"),
)
DUE_JOBS = Gauge("sqlaqueue_due_jobs", "Pending jobs whose time has come, counted up to a limit.")
OLDEST_DUE_JOB_AGE = Gauge(
    "sqlaqueue_oldest_due_job_age_seconds", "Time since which the oldest due job has been due, 0 if no job is due."
)
RUNNING_JOBS = Gauge(
    "sqlaqueue_running_jobs",
    "Jobs that workers have claimed; under a strategy that holds a transaction, those whose handlers were running at "
    "the last heartbeats.",
)
EXPIRED_LEASES = Gauge(
    "sqlaqueue_expired_leases", "Running jobs whose lease has expired, and that were not rescued yet."
)
CONSUMERS = Gauge("sqlaqueue_consumers", "Consumers that are alive.")
CONSUMERS_LISTENING = Gauge("sqlaqueue_consumers_listening", "Live Consumers that receive notifications.")
PAUSED = Gauge("sqlaqueue_paused", "Whether the queue is paused: 1 if it is, otherwise 0.")
KEYS_AT_LIMIT = Gauge(
    "sqlaqueue_keys_at_limit", "Keys with as many running jobs as their limit is, up to ten of each limit."
)
MISSING_INDEXES = Gauge("sqlaqueue_missing_indexes", "Indexes of the queue that the database lacks.")
SCHEDULE_LATE = Gauge(
    "sqlaqueue_schedule_late_seconds",
    "Time for which a schedule has been overdue; 0 within its misfire grace, and while it is paused.",
    ("queue", "schedule"),
)
SCHEDULE_PAUSED = Gauge(
    "sqlaqueue_schedule_paused", "Whether the schedule is paused: 1 if it is, otherwise 0.", ("queue", "schedule")
)
SCRAPE_SUCCESS = Gauge("sqlaqueue_scrape_success", "Whether all gauges of the queue could be read: 1 or 0.")
SCRAPE_DURATION = Gauge("sqlaqueue_scrape_duration_seconds", "Time that it took to read the gauges of the queue.")

GAUGES = (
    JOBS,
    DUE_JOBS,
    OLDEST_DUE_JOB_AGE,
    RUNNING_JOBS,
    EXPIRED_LEASES,
    CONSUMERS,
    CONSUMERS_LISTENING,
    PAUSED,
    KEYS_AT_LIMIT,
    MISSING_INDEXES,
    SCHEDULE_LATE,
    SCHEDULE_PAUSED,
    SCRAPE_SUCCESS,
    SCRAPE_DURATION,
)
"""All gauges, in the order in which they are exported."""


@dataclass(frozen=True)
class Sample:
    gauge: Gauge
    labels: tuple[str, ...]
    value: float


def families(samples: Iterable[Sample]) -> Iterator[GaugeMetricFamily]:
    made = {each: GaugeMetricFamily(each.name, each.meaning, labels=each.labels) for each in GAUGES}
    for sample in samples:
        made[sample.gauge].add_metric(sample.labels, sample.value)
    yield from made.values()


# -- reading -----------------------------------------------------------------------------------------------------------

_PLANS = {"enable_bitmapscan": "off", "enable_sort": "off"}
"""Without statistics the server expects few jobs, and would read and sort all of them to find the first ones."""


@dataclass
class Reading:
    samples: list[Sample] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)


@dataclass(frozen=True)
class GaugeReader:
    """Reads one queue, and with ``has_schedules`` the schedules in the tables that several queues may share."""

    spec: QueueSpec
    statement_timeout: float
    count_limit: int
    finished: bool
    has_schedules: bool

    def read(self, session: Session) -> Reading:
        """Return what can be read. What fails, such as a table that is locked, does not hide the rest."""
        # The server cancels what takes too long; without any reply the connection is silent, and is given up.
        longest = max(pace.LONGEST_WAIT, len(_PARTS) * self.statement_timeout)
        deadlines = Deadlines(longest, f"the metrics of {self.spec.name}")
        with deadlines.watched(), deadlines.limit(session):
            return self._read(session)

    def _read(self, session: Session) -> Reading:
        reading = Reading()
        deadline = time.monotonic() + self.statement_timeout
        is_ready = False
        for part in _PARTS:
            try:
                if not is_ready:
                    self._begin(session)
                    is_ready = True
                reading.samples.extend(part(self, session))
            except Exception as error:  # noqa: BLE001 - the other gauges are read nevertheless
                reading.errors.append(error)
                session.rollback()
                is_ready = False
            if reading.errors and time.monotonic() > deadline:
                # The rest would most likely wait as long, for the same lock or the same server.
                break
        session.rollback()
        return reading

    def _begin(self, session: Session) -> None:
        try:
            self._set_up(session)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
            # After a restart of the server the connections of the pool are closed. SQLAlchemy replaces all of them at
            # the first error, so the second attempt has a new one; without it a scrape after each restart would fail.
            session.rollback()
            self._set_up(session)

    def _set_up(self, session: Session) -> None:
        milliseconds = str(max(int(self.statement_timeout * 1000), 1))
        settings = {"transaction_read_only": "on", "statement_timeout": milliseconds, **_PLANS}
        calls = [set_setting(name, value) for name, value in settings.items()]
        session.execute(sa.select(*calls), bind_arguments=bind_arguments(self.spec.model))

    def sample(self, gauge: Gauge, value: float, *labels: str) -> Sample:
        return Sample(gauge, (self.spec.name, *labels), float(value))


def _depth(reader: GaugeReader, session: Session) -> Iterator[Sample]:
    depth = read_depth(session, reader.spec.model, limit=reader.count_limit)
    yield reader.sample(JOBS, depth.pending, "pending")
    yield reader.sample(DUE_JOBS, depth.due)
    if depth.oldest_due is not None or not depth.due:
        yield reader.sample(OLDEST_DUE_JOB_AGE, depth.oldest_due or 0)
    if depth.processing is not None and depth.running is not None and depth.expired is not None:
        yield reader.sample(JOBS, depth.processing, "processing")
        yield reader.sample(RUNNING_JOBS, depth.running)
        yield reader.sample(EXPIRED_LEASES, depth.expired)


def _consumers(reader: GaugeReader, session: Session) -> Iterator[Sample]:
    live = live_consumers(session, reader.spec)
    if live is None:
        return
    yield reader.sample(CONSUMERS, len(live))
    yield reader.sample(CONSUMERS_LISTENING, sum(each.listening for each in live))
    if reader.spec.strategy.holds_transaction:
        yield reader.sample(RUNNING_JOBS, sum(len(each.running) for each in live))


def _paused(reader: GaugeReader, session: Session) -> Iterator[Sample]:
    if CONTROL in reader.spec.side_tables:
        yield reader.sample(PAUSED, is_paused(session, reader.spec))


def _keys_at_limit(reader: GaugeReader, session: Session) -> Iterator[Sample]:
    yield reader.sample(KEYS_AT_LIMIT, sum(1 for _ in keys_at_limit(session, reader.spec)))


def _missing_indexes(reader: GaugeReader, session: Session) -> Iterator[Sample]:
    yield reader.sample(MISSING_INDEXES, len(missing_indexes(session, reader.spec)))


def _schedules(reader: GaugeReader, session: Session) -> Iterator[Sample]:
    if not reader.has_schedules:
        return
    table = ScheduleTables.look_up(reader.spec).schedules
    connection = session.connection(bind_arguments=bind_arguments(reader.spec.model))
    # A program without schedules need not have the table.
    if not sa.inspect(connection).has_table(table.name, schema=table.schema):
        return
    for each in schedules(session, reader.spec.model):
        late = 0.0 if each.late is None else each.late.total_seconds()
        yield Sample(SCHEDULE_LATE, (each.queue, each.name), late)
        yield Sample(SCHEDULE_PAUSED, (each.queue, each.name), float(each.paused_at is not None))


def _finished(reader: GaugeReader, session: Session) -> Iterator[Sample]:
    if not reader.finished:
        return
    spec = reader.spec
    states = [state for state in FINISHED if not spec.has("status") or getattr(spec.config.states, state) is not None]
    if not spec.has("status"):
        states.remove("completed")  # it leaves no row
    counted = dict.fromkeys(states, 0) | count(session, spec.model, JobFilter(states=tuple(states)))
    for state, number in counted.items():
        yield reader.sample(JOBS, number, state)


_PARTS: tuple[Callable[[GaugeReader, Session], Iterator[Sample]], ...] = (
    _depth,
    _consumers,
    _paused,
    _keys_at_limit,
    _missing_indexes,
    _schedules,
    # The last one, as it reads the whole table.
    _finished,
)


# -- scrape ------------------------------------------------------------------------------------------------------------

DEFAULT_TIMEOUT = 2.0
"""Seconds after which the server cancels a statement of a scrape by default."""

DEFAULT_MAX_AGE = 10.0
"""Seconds for which the result of a scrape is served again by default."""

_LONGEST_TIMEOUT = 86400.0

_OF_ONE_NAME = (
    ", so their gauges could not be distinguished; export each in a registry of its own, or set QueueConfig(name=...)"
)


class Scrape:
    """Reads the gauges of several queues, one after the other.

    :param models: the queue classes.
    :param what: the class or function that was given them, for error messages.
    :raises NotAQueueError: if one of ``models`` is not a queue.
    :raises ConfigurationError: for an invalid option, and for two queues of one name.
    """

    def __init__(
        self,
        models: Iterable[type[Any]],
        what: str,
        *,
        statement_timeout: float | timedelta,
        max_age: float | timedelta,
        count_limit: int,
        finished: bool,
    ) -> None:
        self.specs = list(specs_by_name(models, what, of_one_name=_OF_ONE_NAME).values())
        timeout = seconds(statement_timeout, f"{what}(statement_timeout=...)")
        if not 0 < timeout <= _LONGEST_TIMEOUT:
            raise ConfigurationError(
                f"{what}(statement_timeout={statement_timeout!r}): give more than zero, and at most a day"
            )
        if not is_count(count_limit):
            raise ConfigurationError(f"{what}(count_limit={count_limit!r}): give an integer of 1 or more")
        self._max_age = seconds(max_age, f"{what}(max_age=...)")
        tables = [(id(spec.table.metadata), spec.table.schema) for spec in self.specs]
        self._readers = [
            GaugeReader(
                spec, timeout, count_limit, bool(finished), has_schedules=tables.index(tables[number]) == number
            )
            for number, spec in enumerate(self.specs)
        ]
        self._failing: set[str] = set()
        self._last: list[Metric] = []
        self._expires = float("-inf")

    @property
    def cached(self) -> list[Metric] | None:
        return self._last if time.monotonic() < self._expires else None

    def routine(self) -> Generator[GaugeReader, Reading, list[Metric]]:
        """Yield each reader, and return the metrics.

        The driver sends what :meth:`GaugeReader.read` returns in a new session of the queue's database, or throws what
        that raised.
        """
        samples: list[Sample] = []
        for reader in self._readers:
            began = time.monotonic()
            try:
                reading = yield reader
            except ConfigurationError:
                raise  # a mistake of the program, such as a factory of another kind of sessions
            except Exception as error:  # noqa: BLE001 - the other queues are read nevertheless
                reading = Reading(errors=[error])
            samples += reading.samples
            samples.append(reader.sample(SCRAPE_SUCCESS, not reading.errors))
            samples.append(reader.sample(SCRAPE_DURATION, time.monotonic() - began))
            self._log(reader.spec, reading.errors)
        self._last = list(families(samples))
        self._expires = time.monotonic() + self._max_age
        return self._last

    def _log(self, spec: QueueSpec, errors: Sequence[Exception]) -> None:
        """Log the first failure, and the first success after it: a scrape is repeated every few seconds."""
        if not errors:
            if spec.name in self._failing:
                self._failing.discard(spec.name)
                extra = fields("scrape_recovered", queue=spec.name)
                logger.info("queue %s: its gauges can be read again", spec.name, extra=extra)
            return
        if spec.name not in self._failing:
            self._failing.add(spec.name)
            error = errors[0]
            kind, what = type(error).__name__, str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            extra = fields("scrape_failed", queue=spec.name, error_kind=kind)
            logger.warning("queue %s: its gauges cannot be read: %s: %s", spec.name, kind, what, extra=extra)


class ScrapeCollector(Collector):
    """Collects the gauges of a scrape, one call at a time; a call that waited gets the result of the other one."""

    def __init__(self, scrape: Scrape, perform: Callable[[GaugeReader], Reading]) -> None:
        self._scrape, self._perform = scrape, perform
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Return the gauges without values, so that registering the collector reads no database."""
        return families([])

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            cached = self._scrape.cached
            return drive(self._scrape.routine(), self._perform) if cached is None else cached


class QueueCollector(ScrapeCollector):
    """Collects the gauges of queues from their database.

    ::

        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(QueueCollector([Email, Invoice], sessionmaker(engine)))

    Each queue is read in a read-only transaction of its own. What cannot be read, such as a table that is locked or
    missing, is left out, and ``sqlaqueue_scrape_success`` of the queue is then 0; other queues are not affected.

    :param models: the queue classes.
    :param session_factory: creates sessions, such as a ``sessionmaker(engine)``. With an ``async_sessionmaker`` use
        :func:`~sqlaqueue.prometheus.metrics_app`.
    :param statement_timeout: the time after which the server cancels a statement, in seconds or as a timedelta. After
        a failure nothing more is read of a queue that has taken this long.
    :param max_age: the time for which a result is repeated, in seconds or as a timedelta, so that several
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
        name = type(self).__name__
        scrape = Scrape(
            models,
            name,
            statement_timeout=statement_timeout,
            max_age=max_age,
            count_limit=count_limit,
            finished=finished,
        )
        super().__init__(scrape, read_in_thread(session_factory, name))


def read_in_thread(session_factory: Any, what: str) -> Callable[[GaugeReader], Reading]:
    if makes_async(session_factory):
        raise ConfigurationError(
            f"{what}: {session_factory!r} makes AsyncSessions, and a registry collects in sync code; {_FIX}"
        )
    factory = resolve_factory(session_factory, what, is_async=False)

    def read(reader: GaugeReader) -> Reading:
        session = open_session(factory)
        if not isinstance(session, Session):
            raise ConfigurationError(f"{what}: {factory!r} makes {type(session).__name__}; {_FIX}")
        with session:
            result: Reading = execute(session, reader.read)
        return result

    return read


_FIX = "give a sessionmaker, or use metrics_app(models, async_sessionmaker(engine))"


# -- asgi --------------------------------------------------------------------------------------------------------------
# An ASGI application that serves metrics, beside the routes of a web application.


_PLAIN = "text/plain; charset=utf-8"


def metrics_app(
    models: Iterable[type[Any]],
    session_factory: Callable[[], Any],
    *,
    registry: CollectorRegistry | None = None,
    statement_timeout: float | timedelta = DEFAULT_TIMEOUT,
    max_age: float | timedelta = DEFAULT_MAX_AGE,
    count_limit: int = DEFAULT_LIMIT,
    finished: bool = False,
) -> MetricsApp:
    """Return an ASGI application that publishes the gauges of queues.

    It answers where it is mounted, and at any path that ends with ``/metrics``. It runs on asyncio, and its event loop
    does not wait for the database: an ``async_sessionmaker`` is used in the loop, a ``sessionmaker`` in a thread.

    ::

        from starlette.applications import Starlette

        app = Starlette()
        app.mount("/metrics", metrics_app([Email, Invoice], sessions))

    :param models: the queue classes.
    :param session_factory: creates sessions, such as a ``sessionmaker(engine)`` or an ``async_sessionmaker(engine)``.
    :param registry: further metrics to publish, such as ``prometheus_client.REGISTRY``.

    The other arguments are those of :class:`~sqlaqueue.prometheus.QueueCollector`, as are the errors raised.
    """
    what = metrics_app.__name__
    scrape = Scrape(
        models, what, statement_timeout=statement_timeout, max_age=max_age, count_limit=count_limit, finished=finished
    )
    if makes_async(session_factory):
        factory = resolve_factory(session_factory, what, is_async=True)
        return MetricsApp(_collect_in_loop(scrape, factory), registry)
    collector = ScrapeCollector(scrape, read_in_thread(session_factory, what))
    return MetricsApp(lambda: asyncio.to_thread(collector.collect), registry)


class MetricsApp:
    """The ASGI application that :func:`metrics_app` returns.

    It is made for itself where the metrics come from elsewhere::

        async def collect():
            return list(QueueCollector([Email], sessions).collect())

        app = MetricsApp(collect, registry=None)

    :param collect: returns the metrics of the queues; in an event loop it is not called while a call is running.
    :param registry: further metrics.
    """

    def __init__(self, collect: Callable[[], Awaitable[Iterable[Metric]]], registry: CollectorRegistry | None) -> None:
        self._collect, self._registry = collect, registry
        # One thread or connection at most, however many requests wait for a slow database. A lock belongs to the event
        # loop in which it was used first, and a program may have several, one after the other or in threads.
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif not _is_served(scope):
            await _respond(scope, send, 404, b"Not found: the metrics are at /metrics\n")
        elif scope["method"] not in {"GET", "HEAD"}:
            await _respond(scope, send, 405, b"Method not allowed\n", allow=b"GET, HEAD")
        else:
            body, content_type = await self._encoded(_accept(scope))
            await _respond(scope, send, 200, body, content_type)

    async def _encoded(self, accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            metrics = await self._collect()
        if self._registry is None:
            return encode(_registry_of(metrics)), content_type
        # Its collectors may read files or a database.
        both = _registry_of(metrics, self._registry)
        return await asyncio.to_thread(encode, both), content_type


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric], *registries: CollectorRegistry) -> None:
        self._metrics, self._registries = metrics, registries

    def collect(self) -> Iterable[Metric]:
        return chain(self._metrics, *(each.collect() for each in self._registries))


def _registry_of(metrics: Iterable[Metric], *registries: CollectorRegistry) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(_Collected(metrics, *registries))
    return made


def _collect_in_loop(scrape: Scrape, factory: Any) -> Callable[[], Awaitable[Iterable[Metric]]]:
    async def read(reader: GaugeReader) -> Reading:
        session = open_session(factory)
        async with session:
            result: Reading = await session.run_sync(execute, reader.read)
        return result

    async def collect() -> Iterable[Metric]:
        cached = scrape.cached
        return await adrive(scrape.routine(), read) if cached is None else cached

    return collect


def _is_served(scope: Scope) -> bool:
    path: str = scope["path"]
    # Some frameworks leave the path as it is where they mount an application, others cut it.
    below = path.removeprefix(scope.get("root_path", "")).rstrip("/")
    return not below or below.endswith("/metrics")


def _accept(scope: Scope) -> str:
    return ",".join(value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"accept")


async def _respond(
    scope: Scope, send: Send, status: int, body: bytes, content_type: str = _PLAIN, *, allow: bytes | None = None
) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    if allow is not None:
        headers.append((b"allow", allow))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
