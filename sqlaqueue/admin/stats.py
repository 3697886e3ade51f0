"""How a queue is doing: its jobs by state, what is due, what has failed, who serves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.sessions import takes_session
from sqlaqueue.admin.which import JobFilter, bind, surveyed
from sqlaqueue.queue.backend import CONSUMERS, CONTROL, backend
from sqlaqueue.queue.config import STATES
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.control import consumers, paused
from sqlaqueue.statements.selection import select_jobs

ACTIVE = ("pending", "processing")
"""The states of jobs that are not over."""

_KEPT_APART = ("pending", "failed", "cancelled")
"""The states that jobs without a status can be seen in: completed ones leave nothing behind."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What :func:`stats` finds."""

    queue: str
    strategy: str
    states: dict[str, int]
    """How many jobs are in which state; ``other`` for rows whose status is none of the queue's words."""
    due: int
    """How many waiting jobs could be claimed now, those that an open transaction holds included."""
    oldest_due: float | None
    """For how many seconds the oldest of them has been due; None when there is none, or when nobody can tell."""
    running: int
    """How many jobs run. Where no row tells: what Consumers had in their hands when they checked in."""
    failed_by_attempts: dict[int, int]
    """How many failed jobs have had so many attempts."""
    paused: bool
    consumers: int
    """How many Consumers are alive."""
    missing_indexes: list[str]
    """The indexes of claims and rescues that the database does not have: without them these read the whole table."""


@takes_session
def stats(session: Session, model: type[Any], *, finished: bool = True) -> Stats:
    """Return how a queue is doing.

    :param finished: whether to count finished jobs as well. Those that are not over are found by the indexes for claims
        and leases, where the table has them; to count all means to read all of it.
    :raises NotAQueueError: when ``model`` is no queue.
    """
    spec = select_jobs(model, "stats").spec
    # One state at a time: only so does the server see that the index of the rows in that state is enough.
    parts = [JobFilter()] if finished else [JobFilter(states=(state,)) for state in ACTIVE]
    counted = [row for which in parts for row in _count(session, model, which)]
    states = dict.fromkeys(_states(spec) if finished else [each for each in _states(spec) if each in ACTIVE], 0)
    serving = (
        session.execute(consumers(model), bind_arguments=bind(model)).all() if CONSUMERS in spec.side_tables else []
    )
    in_hands = sum(len(consumer.running) for consumer in serving)
    by_row = not spec.strategy.holds_transaction
    return Stats(
        queue=spec.name,
        strategy=spec.strategy.name,
        states=states | {row.state: row.jobs for row in counted},
        due=sum(row.due for row in counted),
        oldest_due=max((float(row.oldest) for row in counted if row.oldest is not None), default=None),
        running=sum(row.jobs for row in counted if row.state == "processing") if by_row else in_hands,
        failed_by_attempts=_by_attempts(session, model) if finished else {},
        paused=CONTROL in spec.side_tables and bool(session.scalar(paused(model), bind_arguments=bind(model))),
        consumers=len(serving),
        missing_indexes=[
            str(index.name)
            for index in backend().checks.missing_indexes(session.connection(bind_arguments=bind(model)), spec)
        ],
    )


def _states(spec: QueueSpec) -> list[str]:
    if not spec.has("status"):
        return list(_KEPT_APART)
    return [state for state in STATES if getattr(spec.config.states, state) is not None]


def _count(session: Session, model: type[Any], which: JobFilter) -> list[Any]:
    jobs = surveyed(model, which).subquery("jobs")
    due: sa.ColumnElement[bool] = jobs.c.state == "pending"
    moments = [jobs.c[role] for role in ("run_at", "created_at") if role in jobs.c]
    if "run_at" in jobs.c:
        due = sa.and_(due, sa.or_(jobs.c.run_at <= clock(), jobs.c.run_at.is_(None)))
    oldest: sa.ColumnElement[Any] = sa.null()
    if moments:
        first = sa.func.min(sa.func.coalesce(*moments)).filter(due)
        oldest = sa.extract("epoch", clock() - sa.cast(first, sa.DateTime(timezone=True)))
    number = sa.func.count()
    counted = sa.select(
        jobs.c.state, number.label("jobs"), number.filter(due).label("due"), oldest.label("oldest")
    ).group_by(jobs.c.state)
    return list(session.execute(counted, bind_arguments=bind(model)))


def _by_attempts(session: Session, model: type[Any]) -> dict[int, int]:
    jobs = surveyed(model, JobFilter(states=("failed",))).subquery("jobs")
    if "attempts" not in jobs.c:
        return {}
    grouped = sa.select(jobs.c.attempts, sa.func.count()).group_by(jobs.c.attempts).order_by(jobs.c.attempts)
    return {attempts or 0: number for attempts, number in session.execute(grouped, bind_arguments=bind(model))}
