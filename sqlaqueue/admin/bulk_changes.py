"""Change many jobs in batches, each in a short transaction, so that claims need not wait for long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.admin.job_filter import JobFilter, bind_arguments, next_keys
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.admin.shards import by_shard
from sqlaqueue.keys import Key
from sqlaqueue.queue.states import FINISHED
from sqlaqueue.statements import manage
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.write_routing import routing_to_primary

NO_SYNCHRONIZATION = {"synchronize_session": False}
"""Execution options: the instances in the session are not synchronized, as the commit expires them."""

BATCH_SIZE = 1000
"""Default number of jobs that are changed in one transaction."""

Change = Callable[[Session, type[Any], JobFilter, Sequence[Key]], int]
"""Changes the jobs with these keys that still match the filter, and returns their number."""


@requires_session
def in_batches(
    session: Session,
    model: Any,
    job_filter: JobFilter,
    change: Change,
    *,
    size: int = BATCH_SIZE,
    limit: int | None = None,
) -> Iterator[int]:
    """Change jobs, and yield after each commit the number of jobs that the batch has changed.

    :param change: changes one batch, such as :func:`requeue_some`, :func:`cancel_some` or :func:`purge_some`.
    :param size: number of jobs in a batch.
    :param limit: maximum number of jobs to select; None for all.
    :raises StatementError: if the queue does not support the change.
    """
    after, left = None, limit
    while left is None or left > 0:
        keys = next_keys(session, model, job_filter, after, size if left is None else min(size, left))
        if not keys:
            return
        changed = change(session, model, job_filter, keys)
        session.commit()
        yield changed
        after, left = keys[-1], None if left is None else left - len(keys)


_FINISHED = JobFilter(states=FINISHED)


@requires_session
def purge(
    session: Session,
    model: Any,
    job_filter: JobFilter = _FINISHED,
    *,
    batch_size: int = BATCH_SIZE,
    limit: int | None = None,
) -> int:
    """Delete finished jobs, commit each batch, and return their number.

    :param model: a queue class, or ``select(Model).where(...)``.
    :param job_filter: selects jobs; all finished ones by default.
    :param batch_size: number of jobs that are deleted in one transaction.
    :param limit: maximum number of jobs; None for all.
    """
    return sum(in_batches(session, model, job_filter, purge_some, size=batch_size, limit=limit))


@requires_session
def cancel_some(session: Session, model: type[Any], job_filter: JobFilter, keys: Sequence[Key]) -> int:
    """Cancel pending jobs, and request the cancellation of running ones, which are not counted."""
    return _change_some(session, model, keys, lambda some: manage.cancel(unchanged_jobs(model, job_filter, some)))


@requires_session
def purge_some(session: Session, model: type[Any], job_filter: JobFilter, keys: Sequence[Key]) -> int:
    """Delete finished jobs; a ``change`` for :func:`in_batches`."""
    states = FINISHED if job_filter.states is None else job_filter.states

    def verb(some: Sequence[Key]) -> Any:
        return manage.purge(unchanged_jobs(model, job_filter, some), states=states, limit=len(some))

    return _change_some(session, model, keys, verb)


@requires_session
def execute(session: Session, model: type[Any], verb: Any) -> int:
    """Execute a verb, commit, and return the number of changed jobs."""
    changed = _change(session, model, verb)
    session.commit()
    return changed


@requires_session
def preview(session: Session, model: type[Any], verb: Any) -> int:
    """Execute a verb, roll back, and return the number of jobs that it would change."""
    changed = _change(session, model, verb)
    session.rollback()
    return changed


def _change_some(session: Session, model: Any, keys: Sequence[Key], verb: Callable[[Sequence[Key]], Any]) -> int:
    with routing_to_primary(session):
        shards = by_shard(session, select_jobs(model, "change").spec, keys)
    return sum(_change(session, model, verb(some)) for some in shards)


def _change(session: Session, model: type[Any], verb: Any) -> int:
    with routing_to_primary(session):
        return len(
            session.execute(verb, execution_options=NO_SYNCHRONIZATION, bind_arguments=bind_arguments(model))
            .scalars()
            .all()
        )


def unchanged_jobs(model: Any, job_filter: JobFilter, keys: Sequence[Key]) -> Any:
    """Return a SELECT of the jobs with these keys whose state still matches the filter."""
    spec, _, select, _ = select_jobs(model, "change")
    jobs = select.where(spec.key_in(spec.keys, keys))
    if job_filter.states is None or not spec.has("status"):
        return jobs
    return jobs.where(spec.in_state(*job_filter.states))
