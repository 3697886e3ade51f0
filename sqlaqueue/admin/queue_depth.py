"""The depth of a queue: how many of its jobs wait and run, counted up to a limit, so that the cost is bounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.job_filter import bind_arguments
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.admin.shards import across_shards
from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.due_times import due_since
from sqlaqueue.queue.config import is_count
from sqlaqueue.queue.spec import QueueSpec, clock, within_calendar
from sqlaqueue.strategies.update_status import waits_for_twin

DEFAULT_LIMIT = 100_000
"""The number of jobs up to which each number is counted by default."""


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The result of :func:`depth`. No number is higher than the limit that it was given."""

    pending: int
    """The number of pending jobs, including those that an open transaction runs."""
    due: int
    """The number of pending jobs whose time has come, of the first hundred priorities."""
    oldest_due: float | None
    """The seconds for which the oldest of them has been due; None if there is none, or the model does not tell."""
    processing: int | None
    """The number of jobs that read as processing; None under a strategy that holds a transaction, or without leases."""
    running: int | None
    """The number of those that have a lease: the others wait for a twin. None as above."""
    expired: int | None
    """The number of those whose lease has expired, and that were not rescued yet. None as above."""


@requires_session
def depth(session: Session, model: type[Any], *, limit: int = DEFAULT_LIMIT) -> Depth:
    """Return how many jobs of a whole queue wait and run, of subclasses as well.

    It reads the indexes for claims and leases only, and at most ``limit`` entries of each, or of each priority.

    :param limit: the number up to which jobs are counted: a higher number of jobs is returned as this one.
    :raises NotAQueueError: if ``model`` is not a queue.
    :raises StatementError: if ``limit`` is not an integer of 1 or more.
    """
    spec = spec_of(model)
    if not is_count(limit):
        msg = f"depth({model.__name__}): limit={limit!r}: give an integer of 1 or more"
        raise StatementError(msg)
    jobs = spec.strategy.pending_jobs(spec, limit)
    first = jobs.limit(limit).subquery("sqlaqueue_first_pending")
    pending = sa.select(sa.func.count().label("pending")).select_from(first).subquery("sqlaqueue_counted_pending")
    due_times = due_since(spec, jobs.order_by(None).subquery("sqlaqueue_pending_jobs"), limit)
    since = across_shards(session, spec, due_times).subquery("sqlaqueue_due_since")
    age = sa.extract("epoch", clock() - within_calendar(sa.func.min(since.c.since))).label("age")
    due = sa.select(sa.func.count().label("due"), age).select_from(since).subquery("sqlaqueue_counted_due")
    found = sa.select(pending.c.pending, due.c.due, due.c.age)
    counted = pending.join(due, sa.true())
    if has_leases(spec):
        leases = _leases(spec, limit).subquery("sqlaqueue_counted_leases")
        found, counted = found.add_columns(*leases.c), counted.join(leases, sa.true())
    row = session.execute(found.select_from(counted), bind_arguments=bind_arguments(model)).mappings().one()
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
    """Return whether running jobs of a queue have a lease, which may expire."""
    return spec.has("status") and spec.has("lease_expires_at") and not spec.strategy.holds_transaction


def _leases(spec: QueueSpec, limit: int) -> AnySelect:
    expires = spec.columns["lease_expires_at"]
    waits = waits_for_twin(spec).label("waits")
    # In the order of the index, so that the server does not scan the table instead.
    running = sa.select(expires.label("expires"), waits).where(spec.in_state("processing")).order_by(expires)
    first = running.limit(limit).subquery("sqlaqueue_first_running")
    number = sa.func.count()
    expired = sa.and_(first.c.expires <= clock(), ~first.c.waits)
    counts: list[sa.ColumnElement[Any]] = [
        number.label("processing"),
        number.filter(first.c.waits).label("waiting"),
        number.filter(expired).label("expired"),
    ]
    return sa.select(*counts).select_from(first)
