"""Change many jobs without getting in the way of claims: batch by batch, each in a short transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.sessions import takes_session
from sqlaqueue.admin.which import JobFilter, bind, next_keys
from sqlaqueue.consumer.sessions.write_routing import routing_to_primary
from sqlaqueue.keys import Key
from sqlaqueue.queue.config import FINISHED
from sqlaqueue.statements import manage
from sqlaqueue.statements.selection import instances, select_jobs

QUIET = {"synchronize_session": False}
"""Instances that a session holds are not brought up to date; the commit expires them."""

BATCH = 1000
"""How many jobs are changed in one transaction, unless somebody asks for another number."""

Change = Callable[[Session, type[Any], JobFilter, Sequence[Key]], int]
"""Changes the jobs with these keys, as far as they still are in the states meant, and returns how many."""


@takes_session
def in_batches(
    session: Session, model: Any, which: JobFilter, change: Change, *, size: int = BATCH, limit: int | None = None
) -> Iterator[int]:
    """Change jobs, and yield after each commit how many the batch has changed.

    :param change: what is done to a batch, such as :func:`requeue_some`, :func:`cancel_some` or :func:`purge_some`.
    :param size: how many jobs make a batch.
    :param limit: the most jobs to look at; None for all.
    :raises StatementError: when the queue cannot do what is asked.
    """
    after, left = None, limit
    while left is None or left > 0:
        keys = next_keys(session, model, which, after, size if left is None else min(size, left))
        if not keys:
            return
        changed = change(session, model, which, keys)
        session.commit()
        yield changed
        after, left = keys[-1], None if left is None else left - len(keys)


_FAILED, _FINISHED = JobFilter(states=("failed",)), JobFilter(states=FINISHED)


@takes_session
def requeue(
    session: Session, jobs: Any, which: JobFilter = _FAILED, *, batch_size: int = BATCH, limit: int | None = None
) -> int:
    """Make finished jobs wait again, with no attempt counted; commit batch by batch, and return how many.

    :param jobs: a queue class, or ``select(Model).where(...)``; or instances.
    :param which: which jobs of a class or a select are meant; by default those that failed.
    :param batch_size: how many jobs are changed in one transaction.
    :param limit: the most jobs of a class or a select; None for all.
    """
    if isinstance(jobs, type | sa.Select):
        return sum(in_batches(session, jobs, which, requeue_some, size=batch_size, limit=limit))
    listed = instances(jobs, "requeue")
    return execute(session, type(listed[0]), manage.requeue(listed)) if listed else 0


@takes_session
def purge(
    session: Session, model: Any, which: JobFilter = _FINISHED, *, batch_size: int = BATCH, limit: int | None = None
) -> int:
    """Delete finished jobs, commit batch by batch, and return how many.

    :param model: a queue class, or ``select(Model).where(...)``.
    :param which: which jobs are meant; by default all that are finished.
    :param batch_size: how many jobs are deleted in one transaction.
    :param limit: the most jobs; None for all.
    """
    return sum(in_batches(session, model, which, purge_some, size=batch_size, limit=limit))


@takes_session
def requeue_some(session: Session, model: type[Any], which: JobFilter, keys: Sequence[Key]) -> int:
    """Make finished jobs wait again."""
    return _change(session, model, manage.requeue(still(model, which, keys)))


@takes_session
def cancel_some(session: Session, model: type[Any], which: JobFilter, keys: Sequence[Key]) -> int:
    """Cancel waiting jobs and ask running ones to stop; the latter are not counted."""
    return _change(session, model, manage.cancel(still(model, which, keys)))


@takes_session
def purge_some(session: Session, model: type[Any], which: JobFilter, keys: Sequence[Key]) -> int:
    """Delete finished jobs."""
    states = FINISHED if which.states is None else which.states
    return _change(session, model, manage.purge(still(model, which, keys), states=states, limit=len(keys)))


@takes_session
def execute(session: Session, model: type[Any], verb: Any) -> int:
    """Execute a verb, commit, and return how many jobs it has changed."""
    changed = _change(session, model, verb)
    session.commit()
    return changed


@takes_session
def preview(session: Session, model: type[Any], verb: Any) -> int:
    """Return how many jobs a verb would change: it is executed and rolled back."""
    changed = _change(session, model, verb)
    session.rollback()
    return changed


def _change(session: Session, model: type[Any], verb: Any) -> int:
    with routing_to_primary(session):
        return len(session.execute(verb, execution_options=QUIET, bind_arguments=bind(model)).scalars().all())


def still(model: Any, which: JobFilter, keys: Sequence[Key]) -> Any:
    """Return the jobs with these keys, unless somebody else has changed their state since they were looked up."""
    spec, _, select, _ = select_jobs(model, "change")
    jobs = select.where(spec.key_in(spec.keys, keys))
    if which.states is None or not spec.has("status"):
        return jobs
    return jobs.where(spec.in_state(*which.states))
