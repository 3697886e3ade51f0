"""The state of a queue: whether it is paused, its Consumers, its depth, and the keys that are at their limit.

The only reader of these: for statistics, explanations, the doctor, the dashboard and the exporter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.changes import reads_by_priority
from sqlaqueue.admin.jobs import JobFilter, bind_arguments, filtered_jobs, first_known
from sqlaqueue.flow_control.held_back import held_slots, slot_of
from sqlaqueue.flow_control.keys import KeyLimit, flow_control
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.postgresql.due_times import count_waiting
from sqlaqueue.postgresql.side_tables import PAUSE, REQUESTS, is_requested, pause_note
from sqlaqueue.queue.names import CONSUMERS, CONTROL
from sqlaqueue.queue.options import COUNTED, STATES, UNFINISHED
from sqlaqueue.queue.spec import QueueSpec, within_calendar
from sqlaqueue.sql.portable import clock, converted, filtered, seconds_between
from sqlaqueue.sql.types import refused_elsewhere
from sqlaqueue.statements import verbs
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies.update_status import waits_for_duplicate


def paused(session: Session, model: type[Any]) -> bool:
    """Return whether a queue is paused."""
    return bool(session.scalar(verbs.is_paused(model), bind_arguments=bind_arguments(model)))


def consumers(session: Session, model: type[Any]) -> Sequence[Any]:
    """Return the live Consumers of a queue."""
    return session.execute(verbs.consumers(model), bind_arguments=bind_arguments(model)).all()


def is_paused(session: Session, spec: QueueSpec) -> bool:
    return CONTROL in spec.side_tables and paused(session, spec.model)


def pause_moment(spec: QueueSpec) -> AnySelect | None:
    """Return a SELECT of the moment since which a queue has been paused; None if it has no control table."""
    control = spec.side_tables.get(CONTROL)
    if control is None:
        return None
    return sa.select(control.c.created_at).where(control.c.queue == spec.name, control.c.key == PAUSE)


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Since when a queue has been paused, why, and by whom.

    ::

        pause = QueueAdmin(session, Email).pause_info()
        if pause is not None:
            print("paused since", pause.since, "by", pause.author, "because", pause.reason)
    """

    since: datetime
    reason: str = ""
    """Empty if none was given."""
    author: str = ""


def pauses(session: Session, specs: Sequence[QueueSpec]) -> dict[str, Pause]:
    """Return the pauses of queues by their names; of those that share a table by one statement."""
    found: dict[str, Pause] = {}
    by_table: dict[sa.Table, list[QueueSpec]] = {}
    for spec in specs:
        if CONTROL in spec.side_tables:
            by_table.setdefault(spec.side_tables[CONTROL], []).append(spec)
    for control, some in by_table.items():
        notes = {pause_note(spec): spec.name for spec in some}
        is_pause = sa.and_(control.c.queue.in_([spec.name for spec in some]), control.c.key == PAUSE)
        rows = sa.select(control.c.queue, control.c.key, control.c.created_at).where(
            sa.or_(is_pause, control.c.queue.in_([*notes]))
        )
        told: dict[tuple[str, datetime], list[Any]] = {}
        listed = session.execute(rows, bind_arguments=bind_arguments(some[0].model)).all()
        for queue, key, moment in listed:
            if queue in notes:
                told[notes[queue], moment] = key
        for queue, _, moment in listed:
            if queue not in notes:
                reason, author = told.get((queue, moment), ("", ""))
                found[queue] = Pause(since=in_utc(moment), reason=str(reason), author=str(author))
    return found


def in_utc(moment: datetime) -> datetime:
    """Return a moment of the database in UTC, of which some engines store no zone."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def live_consumers(session: Session, spec: QueueSpec) -> Sequence[Any] | None:
    """Return the live Consumers of a queue as :func:`consumers` does; None if it has no table of them."""
    return consumers(session, spec.model) if CONSUMERS in spec.side_tables else None


def unclaimable_jobs(consumer: Any) -> list[tuple[list[str], str]]:
    """Return the keys, as texts, of the jobs that a live Consumer cannot claim, each with the error.

    :param consumer: a row of :func:`consumers`; whatever another program has written there.
    """
    listed = consumer.unclaimable if isinstance(consumer.unclaimable, list) else []
    return [
        ([str(part) for part in one["key"]], str(one.get("error")))
        for one in listed
        if isinstance(one, dict) and isinstance(one.get("key"), list)
    ]


class FailingConsumer(NamedTuple):
    """A live Consumer whose claims have failed several times in a row."""

    name: str
    failures: int
    since: datetime
    error: str


def failing_consumers(alive: Sequence[Any]) -> list[FailingConsumer]:
    """Return those of the live Consumers whose claims fail.

    :param alive: rows of :func:`consumers`; whatever another program has written there.
    """
    return [
        FailingConsumer(
            str(each.name), one["failures"], each.heartbeat_at - timedelta(seconds=one["seconds"]), str(one["error"])
        )
        for each in alive
        for one in (each.unclaimable if isinstance(each.unclaimable, list) else [])
        if isinstance(one, dict) and {"failures", "seconds", "error"} <= one.keys()
        if isinstance(one["failures"], int) and isinstance(one["seconds"], int | float)
    ]


class AboutConsumer(NamedTuple):
    """What a Consumer says of itself beside the columns of its row."""

    handlers: list[str]
    """Its handlers, each as ``module:name``; empty if it is of an older version."""
    quiet: bool
    """Whether it claims no more jobs, as somebody has asked it."""


def about_consumer(consumer: Any) -> AboutConsumer:
    """Return what a Consumer says of itself.

    :param consumer: a row of :func:`consumers` or :func:`workers`; whatever another program has written there.
    """
    listed = consumer.unclaimable if isinstance(consumer.unclaimable, list) else []
    about = next((one for one in listed if isinstance(one, dict) and isinstance(one.get("handlers"), list)), {})
    return AboutConsumer([str(each) for each in about.get("handlers", ())], about.get("quiet") is True)


def names_if_all_quiet(consumers: Sequence[Any]) -> list[str]:
    """Return the names of the live Consumers if each of them was asked to claim no more jobs; otherwise nothing."""
    if not all(about_consumer(each).quiet for each in consumers):
        return []
    return [*dict.fromkeys(str(each.name or f"{each.host}:{each.pid}") for each in consumers)]


def workers(session: Session, spec: QueueSpec) -> Sequence[Any]:
    """Return the Consumers of a queue whose rows are there, alive or dead, the oldest first.

    The rows have all columns of the table, and ``is_alive``, and whether a Consumer was asked to be quiet or to stop:
    ``quiet_asked`` and ``stop_asked``. The row of one that has ended is gone; that of one that has died stays for a
    day.
    """
    table = spec.side_tables.get(CONSUMERS)
    if table is None:
        return []
    alive: sa.ColumnElement[bool] = table.c.expires_at > clock()
    asked = [is_requested(spec, request, table.c.id).label(f"{request}_asked") for request in REQUESTS]
    found = sa.select(*table.c, alive.label("is_alive"), *asked).where(table.c.queue == spec.name)
    ordered = refused_elsewhere(found.order_by(table.c.created_at, table.c.id))
    return session.execute(ordered, bind_arguments=bind_arguments(spec.model)).all()


def last_heartbeat(session: Session, spec: QueueSpec) -> datetime | None:
    """Return when a Consumer of a queue has sent a heartbeat last, alive or not; None if none is recorded."""
    table = spec.side_tables.get(CONSUMERS)
    if table is None:
        return None
    latest = sa.select(sa.func.max(table.c.heartbeat_at, type_=table.c.heartbeat_at.type)).where(
        table.c.queue == spec.name
    )
    found: datetime | None = session.scalar(refused_elsewhere(latest), bind_arguments=bind_arguments(spec.model))
    return found


def missing_indexes(session: Session, spec: QueueSpec) -> list[sa.Index]:
    """Return the indexes of claims and rescues, and of unique jobs, that the database lacks."""
    connection = session.connection(bind_arguments={"mapper": spec.mapper})
    return checks_of(connection).missing_indexes(connection, spec)


_FIRST_JOBS = 10_000
"""Number of pending jobs among which the running ones of a held strategy are looked for."""

_MOST_KEYS = 10
"""Number of keys that are returned for each limit, those with the most running jobs."""


@dataclass(frozen=True, kw_only=True)
class KeyAtLimit:
    """A key that has as many running jobs as its limit is, or more.

    ::

        for key in admin.stats().at_limit:
            print(key.key, "runs", key.running, "of", key.most)
    """

    key: dict[str, Any]
    """The values by attribute; empty for a limit of the whole queue."""
    running: int
    most: int

    def __str__(self) -> str:
        of_key = ", ".join(f"{name} {value!r}" for name, value in self.key.items()) or "the queue"
        return f"{of_key} ({self.running} of {self.most})"


def keys_at_limit(session: Session, spec: QueueSpec) -> Iterator[KeyAtLimit]:
    """Yield the keys at their limit. Only the indexes of running jobs are read, or the first pending jobs."""
    flow = flow_control(spec)
    for limit in [] if flow is None else flow.limits:
        full = _held(limit) if spec.strategy.holds_transaction else _running(limit)
        rows: Any = session.execute(full, bind_arguments=bind_arguments(spec.model))
        for *values, running, least in rows:
            yield KeyAtLimit(key=dict(zip(limit.names, values, strict=True)), running=running, most=least)


def _running(limit: KeyLimit) -> AnySelect:
    spec = limit.spec
    number: Any = sa.func.count()
    # Jobs of a key may differ in it; a claim compares with that of the job it is about to admit.
    most: Any = sa.func.min(limit.most)
    runs = limit.running(spec.table).is_not(None) if limit.names else spec.in_state("processing")
    counted = sa.select(*limit.columns, number, most).where(runs, *(column.is_not(None) for column in limit.columns))
    return counted.group_by(*limit.columns).having(number >= most).order_by(number.desc()).limit(_MOST_KEYS)


def _held(limit: KeyLimit) -> AnySelect:
    """Return the keys at a limit of a held strategy: its running jobs read as pending, and are among the first ones."""
    spec, slots = limit.spec, held_slots()
    waiting = [spec.in_state("pending")] if spec.has("status") else []
    first = sa.select(*limit.columns, limit.of(spec.table).label("sqlaqueue_key"), limit.most.label("sqlaqueue_most"))
    jobs = first.where(*waiting).order_by(*spec.claim_order).limit(_FIRST_JOBS).subquery("sqlaqueue_first")
    columns = [jobs.c[column.key] for column in limit.columns]
    keys = sa.select(*columns, jobs.c.sqlaqueue_key, sa.func.min(jobs.c.sqlaqueue_most).label("sqlaqueue_least"))
    grouped = keys.group_by(*columns, jobs.c.sqlaqueue_key).subquery("sqlaqueue_keys")
    same = slots.c.slot == slot_of(limit, grouped.c.sqlaqueue_key)
    found = sa.select(*(grouped.c[column.key] for column in limit.columns), slots.c.number, grouped.c.sqlaqueue_least)
    full = found.select_from(grouped.join(slots, same)).where(slots.c.number >= grouped.c.sqlaqueue_least)
    return full.order_by(slots.c.number.desc()).limit(_MOST_KEYS)


DEFAULT_LIMIT = 100_000
"""The number of jobs up to which each number is counted by default."""


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The result of :meth:`QueueAdmin.depth`. No number is higher than the limit that it was given.

    ::

        depth = admin.depth(limit=10_000)
        print(depth.due, "jobs are due, the oldest for", depth.oldest_due, "seconds")
    """

    pending: int
    """The number of pending jobs, including those that an open transaction runs."""
    due: int
    """The number of pending jobs whose time has come, of the first hundred priorities."""
    oldest_due: float | None
    """The seconds for which the oldest of them has been due; None without such a job, or without due times."""
    processing: int | None
    """The number of jobs that read as processing; None under a strategy that holds a transaction, or without leases."""
    running: int | None
    """The number of those that have a lease: the other jobs wait for a duplicate. None like ``processing``."""
    expired: int | None
    """The number of those whose lease has expired, and that were not rescued yet. None like ``processing``."""


def depth(session: Session, model: type[Any], *, limit: int = DEFAULT_LIMIT) -> Depth:
    """Return how many jobs of a whole queue wait and run, of subclasses as well.

    It reads the indexes for claims and leases only, and at most ``limit`` entries of each, or of each priority.
    """
    spec = spec_of(model)
    pending, due = count_waiting(spec, limit, by_priority=reads_by_priority(session, spec))
    found = sa.select(pending, due.c.due, due.c.age)
    if has_leases(spec):
        leases = _leases(spec, limit).subquery("sqlaqueue_counted_leases")
        found = found.add_columns(*leases.c).select_from(due.join(leases, sa.true()))
    row = session.execute(found, bind_arguments=bind_arguments(model)).mappings().one()
    processing, waiting = row.get("processing"), row.get("waiting")
    return Depth(
        pending=row["pending"],
        due=min(row["due"], limit),
        # A job may have become due between the start of the statement and the reading of its row.
        oldest_due=None if row["age"] is None else max(float(row["age"]), 0.0),
        processing=processing,
        running=None if processing is None else processing - waiting,
        expired=row.get("expired"),
    )


def has_leases(spec: QueueSpec) -> bool:
    return spec.has("status") and spec.has("lease_expires_at") and not spec.strategy.holds_transaction


def _leases(spec: QueueSpec, limit: int) -> AnySelect:
    expires = spec.columns["lease_expires_at"]
    waits = waits_for_duplicate(spec).label("waits")
    # In the order of the index, so that the server does not scan the table instead.
    running = sa.select(expires.label("expires"), waits).where(spec.in_state("processing")).order_by(expires)
    first = running.limit(limit).subquery("sqlaqueue_first_running")
    number = sa.func.count()
    expired = sa.and_(first.c.expires <= clock(), ~first.c.waits)
    counts: list[sa.ColumnElement[Any]] = [
        number.label("processing"),
        filtered(number, first.c.waits).label("waiting"),
        filtered(number, expired).label("expired"),
    ]
    return sa.select(*counts).select_from(first)


_WITHOUT_STATUS = ("pending", "failed", "cancelled")
"""The states of jobs whose model has no status: completed ones leave no row."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The result of :meth:`QueueAdmin.stats`.

    ::

        stats = admin.stats()
        print(stats.states, stats.due, stats.oldest_due, stats.consumers)
    """

    queue: str
    strategy: str
    states: dict[str, int]
    """The number of jobs in each state; ``other`` for status values that the queue does not use."""
    due: int
    """The number of pending jobs whose time has come, including those that an open transaction holds."""
    oldest_due: float | None
    """The seconds for which the oldest of them has been due; None without such a job, or without due times."""
    running: int
    """The number of running jobs; under a strategy that holds a transaction, those of the last heartbeats."""
    failed_by_attempts: dict[int, int]
    """The number of failed jobs by number of attempts."""
    paused: bool
    consumers: int
    """The number of live Consumers."""
    at_limit: list[KeyAtLimit]
    """The keys that have as many running jobs as their limit is, up to ten of each limit."""
    missing_indexes: list[str]
    """The indexes that the database lacks: without those of claims and rescues these read the whole table, and without
    that of ``QueueConfig(unique=...)`` jobs are not unique."""
    expired_leases: int
    """The number of running jobs whose lease has expired, and that were not rescued yet; 0 without leases."""


def stats(session: Session, model: type[Any], *, finished: bool = True) -> Stats:
    """Return statistics of a queue; without ``finished`` jobs the table itself is not read."""
    spec = select_jobs(model, "stats").spec
    # One state at a time: otherwise PostgreSQL does not use the partial index of a state.
    active = UNFINISHED if spec.config.waits else COUNTED
    filters = [JobFilter()] if finished else [JobFilter(states=(state,)) for state in active]
    counted = [row for each in filters for row in _count(session, model, each)]
    states = dict.fromkeys((each for each in _states(spec) if finished or each in active), 0)
    live = live_consumers(session, spec) or []
    running = sum(len(consumer.running) for consumer in live)
    by_row = not spec.strategy.holds_transaction
    return Stats(
        queue=spec.name,
        strategy=spec.strategy.name,
        states=states | {row.state: row.jobs for row in counted},
        due=sum(row.due for row in counted),
        oldest_due=max((float(row.oldest) for row in counted if row.oldest is not None), default=None),
        running=sum(row.jobs for row in counted if row.state == "processing") if by_row else running,
        failed_by_attempts=_by_attempts(session, model) if finished else {},
        paused=is_paused(session, spec),
        consumers=len(live),
        at_limit=[*keys_at_limit(session, spec)],
        missing_indexes=[str(index.name) for index in missing_indexes(session, spec)],
        expired_leases=_expired_leases(session, model, spec),
    )


def _expired_leases(session: Session, model: type[Any], spec: QueueSpec) -> int:
    if not has_leases(spec):
        return 0
    expired = sa.and_(
        spec.in_state("processing"), spec.columns["lease_expires_at"] <= clock(), ~waits_for_duplicate(spec)
    )
    counted = sa.select(sa.func.count()).select_from(spec.table).where(expired)
    return session.execute(counted, bind_arguments=bind_arguments(model)).scalar_one()


def _states(spec: QueueSpec) -> list[str]:
    if not spec.has("status"):
        return list(_WITHOUT_STATUS)
    return [state for state in STATES if getattr(spec.config.states, state) is not None]


def _count(session: Session, model: type[Any], job_filter: JobFilter) -> list[Any]:
    jobs = filtered_jobs(model, job_filter).subquery("sqlaqueue_jobs")
    due: sa.ColumnElement[bool] = jobs.c.state == "pending"
    moments = [jobs.c[role] for role in ("run_at", "created_at") if role in jobs.c]
    if "run_at" in jobs.c:
        due = sa.and_(due, sa.or_(jobs.c.run_at <= clock(), jobs.c.run_at.is_(None)))
    oldest: sa.ColumnElement[Any] = sa.null()
    if moments:
        first = filtered(sa.func.min(first_known(moments)), due)
        oldest = seconds_between(within_calendar(converted(first, sa.DateTime(timezone=True))), clock())
    number = sa.func.count()
    counted = sa.select(
        jobs.c.state, number.label("jobs"), filtered(number, due).label("due"), oldest.label("oldest")
    ).group_by(jobs.c.state)
    return list(session.execute(counted, bind_arguments=bind_arguments(model)))


def _by_attempts(session: Session, model: type[Any]) -> dict[int, int]:
    jobs = filtered_jobs(model, JobFilter(states=("failed",))).subquery("sqlaqueue_jobs")
    if "attempts" not in jobs.c:
        return {}
    grouped = sa.select(jobs.c.attempts, sa.func.count()).group_by(jobs.c.attempts).order_by(jobs.c.attempts)
    return {
        attempts or 0: number for attempts, number in session.execute(grouped, bind_arguments=bind_arguments(model))
    }
