"""What has happened in a queue: finished jobs, throughput and durations, at a bounded cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import clock, converted, earlier, greatest, seconds_between
from sqlaqueue.web.data.engines import begin_of_period
from sqlaqueue.web.data.reader import Fix, QueueReader, Unavailable, attempt_history_fix, finished_index_fix

_MOMENT = sa.DateTime(timezone=True)
_ANY_TIME = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class FinishedJobs:
    """The newest finished jobs of a queue, from whatever has them in the order of time.

    That is the attempt history, if the queue has one: it knows retries and run times, and its index begins with queue
    and time. Otherwise it is an index of the live database that leads with ``finished_at``, or with ``status`` and then
    ``finished_at``, as that of ``QueueConfig(retention=...)`` does; the plan of the statement tells whether there is
    one. A small table is read whole. In any other case nothing is read: counting what has finished within an hour would
    read all jobs that were ever kept.
    """

    spec: QueueSpec
    source: Literal["attempts", "jobs"]
    """The attempt history, or the rows of the jobs."""
    states: Sequence[str]
    by_state: bool = False
    """Whether the index begins with the state, so that each state is searched by itself."""
    missing: Unavailable | None = None
    """The states that it lacks; None if it has all."""

    def newest(self, span: timedelta, limit: int) -> AnySelect:
        """Return the newest jobs that have finished within a span of time, at most ``limit`` of them.

        Its columns are ``outcome``, ``started_at`` and ``ended_at``; ``error``; of the attempt history ``key`` and
        ``attempt``; of jobs ``due_at``. Those that are not known are NULL.
        """
        if self.source == "attempts":
            return self._attempts(span, limit)
        if not self.by_state:
            return self._jobs(span).limit(limit)
        parts = [self._jobs(span, state).limit(limit).subquery() for state in self.states]
        if len(parts) == 1:
            return sa.select(*parts[0].c)
        both = sa.union_all(*(sa.select(*part.c) for part in parts)).subquery("sqlaqueue_finished")
        return sa.select(*both.c).order_by(both.c.ended_at.desc()).limit(limit)

    def _attempts(self, span: timedelta, limit: int) -> AnySelect:
        table = self.spec.side_tables[ATTEMPT]
        names = ("outcome", "started_at", "ended_at", "error", "key", "attempt")
        recent = sa.and_(table.c.queue == self.spec.name, table.c.ended_at >= earlier(clock(), span))
        found = sa.select(*(table.c[name] for name in names)).where(recent)
        return found.order_by(table.c.ended_at.desc()).limit(limit)

    def _jobs(self, span: timedelta, state: str | None = None) -> AnySelect:
        spec = self.spec
        finished, status = spec.columns["finished_at"], spec.columns["status"]
        outcome: sa.ColumnElement[Any] = sa.literal(state, sa.Text())
        conditions = [finished >= earlier(clock(), span)]
        if state is None:
            pairs = [(status == spec.literal(each), sa.literal(each, sa.Text())) for each in self.states]
            outcome = sa.case(*pairs, else_=sa.null())
        else:
            # First, as the column comes first in the index.
            conditions.insert(0, spec.in_state(state))
        columns = [
            outcome.label("outcome"),
            _moment(spec, "started_at").label("started_at"),
            converted(finished, _MOMENT).label("ended_at"),
            (spec.columns["last_error"] if spec.has("last_error") else sa.null()).label("error"),
            due_at(spec).label("due_at"),
        ]
        return sa.select(*columns).where(*conditions).order_by(finished.desc())


def find_finished_jobs(reader: QueueReader) -> FinishedJobs | Unavailable:
    spec, history = reader.spec, attempt_history_fix(reader.spec)
    if ATTEMPT in spec.side_tables:
        states = ("completed", "retried", "failed", "cancelled")
        return FinishedJobs(spec=spec, source="attempts", states=states)
    if not spec.has("status"):
        reason = "The claims of this queue delete the rows of jobs, so nothing is left of those that have completed."
        return Unavailable(reason=reason, fixes=(history,))
    if not spec.has("finished_at"):
        reason = f"{spec.model.__name__} leaves out the queue attribute 'finished_at'."
        return Unavailable(reason=reason, fixes=(history,))
    kept = [state for state in FINISHED if getattr(spec.config.states, state) is not None]
    lacking = None
    if spec.config.on_complete == "delete":
        kept = [state for state in kept if state != "completed"]
        reason = 'Completed jobs are deleted (on_complete="delete"), so they are not counted.'
        lacking = Unavailable(reason=reason, fixes=(history,))
    together = FinishedJobs(spec=spec, source="jobs", states=kept, missing=lacking)
    if reader.is_small or reader.is_bounded("finished", together.newest(_ANY_TIME, 1)):
        return together
    one_by_one = (replace(together, states=[state], by_state=True) for state in kept)
    indexed = [each.states[0] for each in one_by_one if reader.is_bounded(each.states[0], each.newest(_ANY_TIME, 1))]
    if not indexed:
        reason = "No index has the finished jobs by time, so this would read the whole table."
        return Unavailable(reason=reason, fixes=(history, finished_index_fix(reader)))
    missing = [state for state in kept if state not in indexed]
    if missing:
        reason = f"No index has the {' and '.join(missing)} jobs by time."
        lacking = Unavailable(reason=reason, fixes=(history, finished_index_fix(reader)))
    return replace(together, states=indexed, by_state=True, missing=lacking)


def due_at(spec: QueueSpec) -> sa.ColumnElement[Any]:
    """Return when a job that has not been retried since could run first: when it was enqueued, or was due."""
    moments = [_moment(spec, role) for role in ("created_at", "run_at") if spec.has(role)]
    # GREATEST leaves NULL out: a job without run_at is due at once.
    return greatest(*moments, type_=_MOMENT) if moments else converted(sa.null(), _MOMENT)


def _moment(spec: QueueSpec, role: str) -> sa.ColumnElement[Any]:
    return converted(spec.columns[role] if spec.has(role) else sa.null(), _MOMENT)


SAMPLE = 2_000
"""The number of runs from which percentiles are computed, the newest ones."""

JOINED = 1_000
"""The number of runs where the row of each job has to be looked up."""

SPAN = timedelta(days=1)
"""How long ago a run may have ended, unless the chart of the page goes further back."""

_SLACK = timedelta(seconds=1)
_RUNS = ("completed", "retried", "failed", "cancelled")
"""The outcomes whose end is that of the handler. A rescued attempt ends with its rescue."""
_LAST_RUNS = ("completed", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    p50: float
    p95: float
    p99: float
    longest: float
    number: int
    """Of how many runs."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    waits: Percentiles | Unavailable | None
    """From when a job was due, or was enqueued if that was later, until its last run began."""
    runs: Percentiles | Unavailable | None
    """From when its handler was called until it returned or raised; of the rows of a queue with leases, from the
    claim."""


def read_durations(
    reader: QueueReader, source: FinishedJobs | Unavailable | None = None, within: timedelta = SPAN
) -> Durations:
    """Return the times of the newest runs that have ended within a span of time."""
    found = source or find_finished_jobs(reader)
    if isinstance(found, Unavailable):
        return Durations(waits=found, runs=found)
    if found.source == "jobs" and not reader.spec.has("started_at"):
        reason = f"{reader.spec.model.__name__} does not store when a run started."
        fixes = (attempt_history_fix(reader.spec), _add_role(reader.spec, "started_at"))
        lacking = Unavailable(reason=reason, fixes=fixes)
        return Durations(waits=lacking, runs=lacking)
    jobs = found.newest(within, SAMPLE).subquery("sqlaqueue_newest")
    ran = jobs.c.outcome.in_(_RUNS)
    runs = _read(reader, sa.select(_seconds(jobs.c.started_at, jobs.c.ended_at).label("seconds")).where(ran))
    return Durations(waits=_waits(reader, found, within), runs=runs)


def _waits(reader: QueueReader, found: FinishedJobs, within: timedelta) -> Percentiles | Unavailable | None:
    spec = reader.spec
    if not (spec.has("run_at") or spec.has("created_at")):
        reason = f"{spec.model.__name__} leaves out the queue attributes 'run_at' and 'created_at'."
        return Unavailable(reason=reason, fixes=(_add_role(spec, "created_at"),))
    if found.source == "jobs":
        jobs = found.newest(within, SAMPLE).subquery("sqlaqueue_newest")
        return _read(reader, sa.select(_seconds(jobs.c.due_at, jobs.c.started_at).label("seconds")))
    if not spec.strategy.keeps_rows or spec.config.on_complete == "delete":
        reason = "The rows of completed jobs are deleted, and with them the time when they were enqueued."
        return Unavailable(reason=reason)
    if not spec.has("attempts"):
        reason = f"{spec.model.__name__} leaves out the queue attribute 'attempts', which identifies the last attempt."
        return Unavailable(reason=reason, fixes=(_add_role(spec, "attempts"),))
    if not reader.pages.has_lateral and not all(isinstance(key.type, sa.Integer | sa.String) for key in spec.keys):
        reason = f"On {reader.pages.title} the rows of attempts are looked up by keys that are numbers or texts."
        return Unavailable(reason=reason)
    return _read(reader, _waits_of_attempts(spec, found, within, is_lateral=reader.pages.has_lateral))


def _waits_of_attempts(spec: QueueSpec, found: FinishedJobs, within: timedelta, *, is_lateral: bool) -> AnySelect:
    """Return the wait of the last attempts of jobs, whose rows still say when they were due."""
    newest = found.newest(within, JOINED).subquery("sqlaqueue_newest")
    key: Any = newest.c.key
    same = [column == sa.cast(key[number].as_string(), column.type) for number, column in enumerate(spec.keys)]
    is_last = sa.func.coalesce(spec.columns["attempts"], 1) == newest.c.attempt
    if not is_lateral:
        due = due_at(spec)
        seconds = _seconds(due, newest.c.started_at).label("seconds")
        is_of_this_time = newest.c.started_at >= earlier(due, _SLACK)
        joined = newest.join(spec.table, sa.and_(*same, is_last))
        return sa.select(seconds).select_from(joined).where(newest.c.outcome.in_(_LAST_RUNS), is_of_this_time)
    # A LIMIT keeps the planner from a join that reads the whole table.
    row = sa.select(due_at(spec).label("due_at")).where(*same, is_last).limit(1).lateral("sqlaqueue_job")
    seconds = _seconds(row.c.due_at, newest.c.started_at).label("seconds")
    # A job that was requeued has had attempts of the same numbers before, when it was due at other times.
    is_of_this_time = newest.c.started_at >= earlier(row.c.due_at, _SLACK)
    return (
        sa.select(seconds)
        .select_from(newest.join(row, sa.true()))
        .where(newest.c.outcome.in_(_LAST_RUNS), is_of_this_time)
    )


def _read(reader: QueueReader, durations: AnySelect) -> Percentiles | None:
    number, longest, values = reader.pages.percentiles(reader.execute, durations)
    if not number:
        return None
    p50, p95, p99 = values
    return Percentiles(p50=p50, p95=p95, p99=p99, longest=longest, number=number)


def _seconds(since: sa.ColumnElement[Any], until: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return converted(seconds_between(since, until), sa.Double())


def _add_role(spec: QueueSpec, role: str) -> Fix:
    # A sentence that ends with the option, such as "add it with QueueConfig(columns=...)".
    code = spec.config.fix_for(role).partition(" with ")[2] or spec.config.fix_for(role)
    return Fix(what=f"Store {role!r} in the rows of {spec.model.__name__}, and migrate the database.", code=code)


LIMIT = 20_000
"""The number of entries that are read at most, which takes about ten milliseconds."""

OUTCOMES = ("completed", "retried", "failed", "cancelled")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COUNTED_AS = {"rescued": "retried"}
"""A rescued attempt is followed by another one, or by the failure of its job."""


@dataclass(frozen=True, kw_only=True)
class ChartSpan:
    name: str
    """Its name in addresses."""
    label: str
    length: timedelta
    buckets: Sequence[timedelta]
    """The periods by which it may be divided, each a multiple of the first one."""
    bars: int


def _lengths(*numbers: int) -> tuple[timedelta, ...]:
    return tuple(timedelta(seconds=number) for number in numbers)


MINUTES = ChartSpan(
    name="minutes", label="15 minutes", length=timedelta(minutes=15), buckets=_lengths(5, 10, 15, 30), bars=30
)
HOUR = ChartSpan(name="hour", label="hour", length=timedelta(hours=1), buckets=_lengths(5, 10, 15, 30, 60), bars=60)
HOURS = ChartSpan(name="6hours", label="6 hours", length=timedelta(hours=6), buckets=_lengths(60, 120, 300), bars=96)
DAY = ChartSpan(name="day", label="day", length=timedelta(days=1), buckets=_lengths(300, 900), bars=96)
WEEK = ChartSpan(name="week", label="7 days", length=timedelta(days=7), buckets=_lengths(3600, 7200), bars=96)
MONTH = ChartSpan(
    name="month", label="30 days", length=timedelta(days=30), buckets=_lengths(10800, 21600, 43200), bars=96
)

SPANS = (HOUR, HOURS, DAY, WEEK, MONTH)
"""The spans of the page of a queue."""


def span_with_data(reader: QueueReader, source: FinishedJobs | Unavailable) -> ChartSpan:
    """Return the shortest span in which something has ended; the shortest of all if nothing has in any of them."""
    if isinstance(source, Unavailable):
        return SPANS[0]
    newest = source.newest(SPANS[-1].length, 1).subquery("sqlaqueue_newest")
    return span_of(reader.now, reader.execute(sa.select(newest.c.ended_at)).scalar())


def span_of(now: datetime, ended: datetime | None) -> ChartSpan:
    """Return the shortest span in which a moment is; the shortest of all for None."""
    ago = timedelta(0) if ended is None else now - ended
    return next((span for span in SPANS if ago <= span.length), SPANS[-1])


@dataclass(frozen=True, kw_only=True)
class Bucket:
    begins: datetime
    counts: Mapping[str, int]
    """By outcome, without those that have none."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, kw_only=True)
class Throughput:
    span: ChartSpan
    counts_attempts: bool
    """Whether attempts were counted, from the attempt history; otherwise jobs."""
    begins: datetime
    """From when on everything was counted."""
    ends: datetime
    limit: int
    is_capped: bool
    """Whether there were more than ``limit``, so that the beginning of the span is missing."""
    bucket: timedelta
    """The period of each bucket: shorter ones if only a part of the span was read."""
    buckets: Sequence[Bucket]
    """Without gaps, the oldest first. Of the first and the last one only a part may have been counted."""
    outcomes: Sequence[str]
    """Those that the source has."""
    missing: Unavailable | None
    """The outcomes that it lacks; None for none."""

    @property
    def totals(self) -> dict[str, int]:
        return {each: sum(bucket.counts.get(each, 0) for bucket in self.buckets) for each in self.outcomes}

    @property
    def total(self) -> int:
        return sum(bucket.total for bucket in self.buckets)

    @property
    def per_minute(self) -> float:
        minutes = (self.ends - self.begins).total_seconds() / 60
        finished = self.total - self.totals.get("retried", 0)
        return finished / minutes if minutes > 0 else 0.0


def read_throughput(
    reader: QueueReader, span: ChartSpan = HOUR, *, limit: int = LIMIT, source: FinishedJobs | Unavailable | None = None
) -> Throughput | Unavailable:
    """Return what has finished in a span of time up to now, of the newest ``limit`` entries."""
    found = source or find_finished_jobs(reader)
    if isinstance(found, Unavailable):
        return found
    jobs = found.newest(span.length, limit).subquery("sqlaqueue_newest")
    # The shortest ones, from which longer ones are made once it is known which part of the span was read.
    begins = begin_of_period(span.buckets[0], jobs.c.ended_at).label("begins")
    first = sa.func.min(jobs.c.ended_at)
    counted = sa.select(begins, jobs.c.outcome, sa.func.count(), first).group_by(begins, jobs.c.outcome)
    rows = reader.execute(counted).all()
    is_capped = sum(row[2] for row in rows) >= limit
    since = min(row[3] for row in rows).astimezone(UTC) if is_capped else reader.now - span.length
    bucket = next((each for each in span.buckets if (reader.now - since) / each <= span.bars), span.buckets[-1])
    counts: dict[datetime, dict[str, int]] = {}
    for moment, outcome, number, _ in rows:
        name = _COUNTED_AS.get(outcome, outcome)
        if name in OUTCOMES:
            of_bucket = counts.setdefault(_begin(moment.astimezone(UTC), bucket), {})
            of_bucket[name] = of_bucket.get(name, 0) + number
    first_begin, last_begin = _begin(since, bucket), _begin(reader.now, bucket)
    moments = [first_begin + number * bucket for number in range((last_begin - first_begin) // bucket + 1)]
    return Throughput(
        span=span,
        counts_attempts=found.source == "attempts",
        begins=since,
        ends=reader.now,
        limit=limit,
        is_capped=is_capped,
        bucket=bucket,
        buckets=[Bucket(begins=each, counts=counts.get(each, {})) for each in moments],
        outcomes=[each for each in OUTCOMES if each in found.states],
        missing=found.missing,
    )


def _begin(moment: datetime, bucket: timedelta) -> datetime:
    return _EPOCH + (moment - _EPOCH) // bucket * bucket
