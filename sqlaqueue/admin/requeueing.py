"""Make finished jobs pending again, and report those that have a twin by now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.beside_twins import Rows, attempt
from sqlaqueue.admin.bulk_changes import BATCH_SIZE, in_batches, in_parts, unchanged_jobs
from sqlaqueue.admin.job_filter import JobFilter
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.admin.shards import by_shard
from sqlaqueue.consumer.settle import MOMENT, SHORTEST_MOMENT
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import Key, key_value
from sqlaqueue.statements import verbs
from sqlaqueue.statements.selection import instances, key_of, select_jobs
from sqlaqueue.strategies.twins import unique_key
from sqlaqueue.write_routing import routing_to_primary


class Requeued(int):
    """How many jobs are pending again. ``twins`` and ``left`` are empty unless the queue is unique."""

    twins: dict[Any, str]
    """The keys of jobs that have a twin, each with the key of the twin as a text. They were cancelled, or left as they
    were, as ``Unique(on_return=...)`` says. A key is a value, or a tuple for a composite primary key."""
    left: list[Any]
    """The keys of jobs that were left as they were: a twin was being enqueued and was not committed yet, another
    transaction had locked the job, or there were too many such jobs in their batch. Requeue them again later."""

    refused: dict[Any, str]
    """Of several jobs those that the database refuses to change, each with the error. Those of a unique queue are among
    :attr:`left`, and only the log has the error."""

    def __new__(
        cls,
        number: int = 0,
        twins: dict[Any, str] | None = None,
        left: Sequence[Any] = (),
        refused: dict[Any, str] | None = None,
    ) -> Self:
        """Return a number with the keys of the jobs that were not counted."""
        made = super().__new__(cls, number)
        made.twins, made.left, made.refused = dict(twins or {}), list(left), dict(refused or {})
        return made


_FAILED = JobFilter(states=("failed",))
_LONGEST = 5.0
"""For how many seconds the jobs of a batch are tried one by one; what has been requeued is locked meanwhile."""


@requires_session
def requeue(
    session: Session,
    jobs: Any,
    job_filter: JobFilter = _FAILED,
    *,
    batch_size: int = BATCH_SIZE,
    limit: int | None = None,
) -> Requeued:
    """Make finished jobs pending again, with no attempt counted; commit each batch, and return their number.

    Of several twins in a batch the newest comes back, and the result names the others.

    :param jobs: a queue class, or ``select(Model).where(...)``; or instances.
    :param job_filter: selects jobs of a class or a select; failed ones by default.
    :param batch_size: number of jobs that are changed in one transaction.
    :param limit: maximum number of jobs of a class or a select; None for all.
    """
    if isinstance(jobs, type | sa.Select):
        results = in_batches(session, jobs, job_filter, requeue_some, size=batch_size, limit=limit)
        return _sum([one for one in results if isinstance(one, Requeued)])
    listed = instances(jobs, "requeue")
    if not listed:
        return Requeued()
    model: type[Any] = spec_of(type(listed[0])).model
    done = _requeue_keys(session, model, JobFilter(), [key_of(job, "requeue") for job in listed])
    session.commit()
    return done


@requires_session
def requeue_some(session: Session, model: type[Any], job_filter: JobFilter, keys: Sequence[Key]) -> Requeued:
    """Make finished jobs pending again; a ``change`` for :func:`in_batches`."""
    return _requeue_keys(session, model, job_filter, keys)


def _requeue_keys(session: Session, model: Any, job_filter: JobFilter, keys: Sequence[Key]) -> Requeued:
    """Requeue jobs together; each by itself if a twin of one of them is being enqueued."""

    def verb(some: Sequence[Key]) -> Any:
        return verbs.requeue(unchanged_jobs(model, job_filter, some))

    with routing_to_primary(session):
        spec = select_jobs(model, "requeue").spec
        if unique_key(spec) is None:
            refused: dict[Any, str] = {}
            parts = (in_parts(session, model, some, verb, refused) for some in by_shard(session, spec, keys))
            return Requeued(sum(map(len, parts)), refused=refused)
        rows = attempt(session, model, verb(keys), lock_timeout=MOMENT, keys=keys)
        if rows is not None:
            return _requeued(rows)
        # Backwards, so that of several twins among them the newest comes back.
        tried: dict[Key, Rows | None] = dict.fromkeys(reversed(keys))
        until = time.monotonic() + _LONGEST
        for key in tried:
            if time.monotonic() < until:
                tried[key] = attempt(session, model, verb([key]), lock_timeout=SHORTEST_MOMENT, keys=[key])
    done = _sum([_requeued(rows) for rows in tried.values() if rows is not None])
    return Requeued(done, done.twins, done.left + [key_value(key) for key, rows in tried.items() if rows is None])


def _requeued(rows: Rows) -> Requeued:
    twins = {row[0]: row[1] for row in rows if row[1]}
    # Without a key: a twin that was committed after the statement had begun.
    left = [row[0] for row in rows if row[1] == ""]
    return Requeued(len(rows) - len(twins) - len(left), twins, left)


def _sum(results: Sequence[Requeued]) -> Requeued:
    twins = {key: twin for one in results for key, twin in one.twins.items()}
    refused = {key: error for one in results for key, error in one.refused.items()}
    return Requeued(sum(results), twins, [key for one in results for key in one.left], refused)
