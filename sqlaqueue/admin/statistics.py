"""Statistics of a queue: jobs by state, due jobs, failures, Consumers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.job_filter import JobFilter, bind_arguments, filtered_jobs
from sqlaqueue.admin.keys_at_limit import KeyAtLimit, keys_at_limit
from sqlaqueue.admin.queue_depth import has_leases
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.queue.names import CONSUMERS, CONTROL
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.spec import QueueSpec, clock, within_calendar
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.statements.verbs import consumers, paused
from sqlaqueue.strategies.update_status import waits_for_twin

ACTIVE = ("pending", "processing")
"""The states of unfinished jobs."""

_WITHOUT_STATUS = ("pending", "failed", "cancelled")
"""The states of jobs whose model has no status: completed ones leave no row."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The result of :func:`stats`."""

    queue: str
    strategy: str
    states: dict[str, int]
    """The number of jobs in each state; ``other`` for status values that the queue does not use."""
    due: int
    """The number of pending jobs whose time has come, including those that an open transaction holds."""
    oldest_due: float | None
    """The seconds for which the oldest of them has been due; None if there is none, or the model does not tell."""
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


@requires_session
def stats(session: Session, model: type[Any], *, finished: bool = True) -> Stats:
    """Return statistics of a queue.

    :param finished: whether to count finished jobs, which reads the whole table. Unfinished jobs are found by the
        indexes for claims and leases, if the strategy has them.
    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec = select_jobs(model, "stats").spec
    # One state at a time: otherwise PostgreSQL does not use the partial index of a state.
    filters = [JobFilter()] if finished else [JobFilter(states=(state,)) for state in ACTIVE]
    counted = [row for each in filters for row in _count(session, model, each)]
    states = dict.fromkeys(_states(spec) if finished else [each for each in _states(spec) if each in ACTIVE], 0)
    live = (
        session.execute(consumers(model), bind_arguments=bind_arguments(model)).all()
        if CONSUMERS in spec.side_tables
        else []
    )
    running = sum(len(consumer.running) for consumer in live)
    by_row = not spec.strategy.holds_transaction
    connection = session.connection(bind_arguments=bind_arguments(model))
    return Stats(
        queue=spec.name,
        strategy=spec.strategy.name,
        states=states | {row.state: row.jobs for row in counted},
        due=sum(row.due for row in counted),
        oldest_due=max((float(row.oldest) for row in counted if row.oldest is not None), default=None),
        running=sum(row.jobs for row in counted if row.state == "processing") if by_row else running,
        failed_by_attempts=_by_attempts(session, model) if finished else {},
        paused=CONTROL in spec.side_tables
        and bool(session.scalar(paused(model), bind_arguments=bind_arguments(model))),
        consumers=len(live),
        at_limit=[*keys_at_limit(session, spec)],
        missing_indexes=[str(index.name) for index in checks_of(connection).missing_indexes(connection, spec)],
        expired_leases=_expired_leases(session, model, spec),
    )


def _expired_leases(session: Session, model: type[Any], spec: QueueSpec) -> int:
    if not has_leases(spec):
        return 0
    expired = sa.and_(spec.in_state("processing"), spec.columns["lease_expires_at"] <= clock(), ~waits_for_twin(spec))
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
        first = sa.func.min(sa.func.coalesce(*moments)).filter(due)
        oldest = sa.extract("epoch", clock() - within_calendar(sa.cast(first, sa.DateTime(timezone=True))))
    number = sa.func.count()
    counted = sa.select(
        jobs.c.state, number.label("jobs"), number.filter(due).label("due"), oldest.label("oldest")
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
