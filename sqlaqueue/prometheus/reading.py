"""What is read of one queue for its gauges, in a read-only transaction with a statement timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.admin.job_filter import JobFilter, bind_arguments
from sqlaqueue.admin.keys_at_limit import keys_at_limit
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.waker import Deadlines
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.prometheus import gauges
from sqlaqueue.prometheus.gauges import Gauge, Sample
from sqlaqueue.queue.names import CONSUMERS, CONTROL
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.recurrence import ScheduleTables

_PLANS = {"enable_bitmapscan": "off", "enable_sort": "off"}
"""Without statistics the server expects few jobs, and would read and sort all of them to find the first ones."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How queues are read."""

    statement_timeout: float
    count_limit: int
    finished: bool


@dataclass
class Reading:
    """The samples of one queue, and the errors of what could not be read."""

    samples: list[Sample] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)


@dataclass(frozen=True)
class QueueReader:
    """Reads one queue.

    :param has_schedules: whether it also reads the schedules in the tables that several queues may share.
    """

    spec: QueueSpec
    options: ReadOptions
    has_schedules: bool

    def read(self, session: Session) -> Reading:
        """Return what can be read. What fails, such as a table that is locked, does not hide the rest."""
        # The server cancels what takes too long; without any reply the connection is silent, and is given up.
        longest = max(pace.LONGEST_WAIT, len(_PARTS) * self.options.statement_timeout)
        deadlines = Deadlines(longest, f"the metrics of {self.spec.name}")
        with deadlines.watched(), deadlines.limit(session):
            return self._read(session)

    def _read(self, session: Session) -> Reading:
        reading = Reading()
        deadline = time.monotonic() + self.options.statement_timeout
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
        milliseconds = str(max(int(self.options.statement_timeout * 1000), 1))
        settings = {"transaction_read_only": "on", "statement_timeout": milliseconds, **_PLANS}
        calls = [sa.func.set_config(name, value, sa.true()) for name, value in settings.items()]
        session.execute(sa.select(*calls), bind_arguments=bind_arguments(self.spec.model))

    def sample(self, gauge: Gauge, value: float, *labels: str) -> Sample:
        """Return a value of a gauge of this queue."""
        return Sample(gauge, (self.spec.name, *labels), float(value))


def _depth(reader: QueueReader, session: Session) -> Iterator[Sample]:
    depth = admin.depth(session, reader.spec.model, limit=reader.options.count_limit)
    yield reader.sample(gauges.JOBS, depth.pending, "pending")
    yield reader.sample(gauges.DUE_JOBS, depth.due)
    if depth.oldest_due is not None or not depth.due:
        yield reader.sample(gauges.OLDEST_DUE_JOB_AGE, depth.oldest_due or 0)
    if depth.processing is not None and depth.running is not None and depth.expired is not None:
        yield reader.sample(gauges.JOBS, depth.processing, "processing")
        yield reader.sample(gauges.RUNNING_JOBS, depth.running)
        yield reader.sample(gauges.EXPIRED_LEASES, depth.expired)


def _consumers(reader: QueueReader, session: Session) -> Iterator[Sample]:
    if CONSUMERS not in reader.spec.side_tables:
        return
    live = admin.consumers(session, reader.spec.model)
    yield reader.sample(gauges.CONSUMERS, len(live))
    yield reader.sample(gauges.CONSUMERS_LISTENING, sum(each.listening for each in live))
    if reader.spec.strategy.holds_transaction:
        yield reader.sample(gauges.RUNNING_JOBS, sum(len(each.running) for each in live))


def _paused(reader: QueueReader, session: Session) -> Iterator[Sample]:
    if CONTROL in reader.spec.side_tables:
        yield reader.sample(gauges.PAUSED, admin.paused(session, reader.spec.model))


def _keys_at_limit(reader: QueueReader, session: Session) -> Iterator[Sample]:
    yield reader.sample(gauges.KEYS_AT_LIMIT, sum(1 for _ in keys_at_limit(session, reader.spec)))


def _missing_indexes(reader: QueueReader, session: Session) -> Iterator[Sample]:
    connection = session.connection(bind_arguments=bind_arguments(reader.spec.model))
    yield reader.sample(gauges.MISSING_INDEXES, len(checks_of(connection).missing_indexes(connection, reader.spec)))


def _schedules(reader: QueueReader, session: Session) -> Iterator[Sample]:
    if not reader.has_schedules:
        return
    table = ScheduleTables.look_up(reader.spec).schedules
    connection = session.connection(bind_arguments=bind_arguments(reader.spec.model))
    # A program without schedules need not have the table.
    if not sa.inspect(connection).has_table(table.name, schema=table.schema):
        return
    for each in admin.schedules(session, reader.spec.model):
        late = 0.0 if each.late is None else each.late.total_seconds()
        yield Sample(gauges.SCHEDULE_LATE, (each.queue, each.name), late)
        yield Sample(gauges.SCHEDULE_PAUSED, (each.queue, each.name), float(each.paused_at is not None))


def _finished(reader: QueueReader, session: Session) -> Iterator[Sample]:
    if not reader.options.finished:
        return
    spec = reader.spec
    states = [state for state in FINISHED if not spec.has("status") or getattr(spec.config.states, state) is not None]
    if not spec.has("status"):
        states.remove("completed")  # it leaves no row
    counted = dict.fromkeys(states, 0) | admin.count(session, spec.model, JobFilter(states=tuple(states)))
    for state, number in counted.items():
        yield reader.sample(gauges.JOBS, number, state)


_PARTS: tuple[Callable[[QueueReader, Session], Iterator[Sample]], ...] = (
    _depth,
    _consumers,
    _paused,
    _keys_at_limit,
    _missing_indexes,
    _schedules,
    # The last one, as it reads the whole table.
    _finished,
)
