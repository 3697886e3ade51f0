"""Change many jobs in batches, each in a short transaction, so that claims need not wait for long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin.job_filter import JobFilter, bind_arguments, next_keys
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.admin.shards import by_shard
from sqlaqueue.consumer.errors import error_line, kind_of, may_be_of_a_row
from sqlaqueue.log import fields, logger
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.run import Key, key_text, key_value
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of, own_work
from sqlaqueue.statements import verbs
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.write_routing import routing_to_primary

NO_SYNCHRONIZATION = {"synchronize_session": False}
"""Execution options: the instances in the session are not synchronized, as the commit expires them."""

BATCH_SIZE = 1000
"""Default number of jobs that are changed in one transaction."""

_CHECK_DEFERRED = sa.text("SET CONSTRAINTS ALL IMMEDIATE")

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
        try:
            changed = change(session, model, job_filter, keys)
            session.commit()
        except DBAPIError as error:
            # One of many jobs, which is alone in its batch by chance.
            if len(keys) > 1 or (after is None and size > 1) or not may_be_of_a_row(error):
                raise
            session.rollback()
            warn_of_refusal(select_jobs(model, "change").spec, keys[0], error)
            changed = 0
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
    return _change_some(session, model, keys, lambda some: verbs.cancel(unchanged_jobs(model, job_filter, some)))


@requires_session
def purge_some(session: Session, model: type[Any], job_filter: JobFilter, keys: Sequence[Key]) -> int:
    """Delete finished jobs; a ``change`` for :func:`in_batches`."""
    states = FINISHED if job_filter.states is None else job_filter.states

    def verb(some: Sequence[Key]) -> Any:
        return verbs.purge(unchanged_jobs(model, job_filter, some), states=states, limit=len(some))

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


Verb = Callable[[Sequence[Key]], Any]
"""Makes the statement that changes the jobs with these keys."""


def _change_some(session: Session, model: Any, keys: Sequence[Key], verb: Verb) -> int:
    with routing_to_primary(session):
        shards = by_shard(session, select_jobs(model, "change").spec, keys)
        return sum(len(in_parts(session, model, some, verb)) for some in shards)


def in_parts(
    session: Session, model: Any, keys: Sequence[Key], verb: Verb, refused: dict[Any, str] | None = None
) -> Sequence[sa.Row[Any]]:
    """Execute a verb on some jobs, and return its rows.

    If the database refuses to change one of several jobs, for a constraint, a trigger, a policy or a foreign key, the
    others are changed by halves, and a warning names the one that stays as it is.

    :param refused: receives the keys of jobs that stay as they are, each with the error.
    """
    if len(keys) <= 1:
        return _execute(session, model, verb(keys))
    return _in_savepoints(session, model, keys, verb, {} if refused is None else refused)


@contextmanager
def savepoint(session: Session, model: Any) -> Iterator[None]:
    """Execute the block in a savepoint, to whose end deferred constraints are checked as well.

    At the commit, a job that violates one would undo the changes of all.
    """
    with own_work():
        nested = session.begin_nested()
    with nested:
        yield
        bind = bind_arguments(model)
        if engine_of(session.get_bind(**bind).dialect) is None:
            session.execute(_CHECK_DEFERRED, bind_arguments=bind)


def _in_savepoints(
    session: Session, model: Any, keys: Sequence[Key], verb: Verb, refused: dict[Any, str]
) -> Sequence[sa.Row[Any]]:
    try:
        with savepoint(session, model):
            return _execute(session, model, verb(keys))
    except DBAPIError as error:
        if not may_be_of_a_row(error):
            raise
        if len(keys) == 1:
            warn_of_refusal(select_jobs(model, "change").spec, keys[0], error)
            refused[key_value(keys[0])] = error_line(error)
            return ()
    half = len(keys) // 2
    return [row for part in (keys[:half], keys[half:]) for row in _in_savepoints(session, model, part, verb, refused)]


def _execute(session: Session, model: Any, statement: Any) -> Sequence[sa.Row[Any]]:
    rows: Sequence[sa.Row[Any]] = session.execute(
        statement, execution_options=NO_SYNCHRONIZATION, bind_arguments=bind_arguments(model)
    ).all()
    return rows


def warn_of_refusal(spec: QueueSpec, key: Key, error: DBAPIError) -> None:
    """Log that the database refuses to change a job, and that it stays as it is."""
    text = "job %s of queue %s stays as it is, as the database refuses to change it: %s"
    extra = fields("change_refused", queue=spec.name, job_key=key_value(key), error_kind=kind_of(error))
    logger.warning(text, key_text(key), spec.name, error_line(error), extra=extra)


def _change(session: Session, model: type[Any], verb: Any) -> int:
    with routing_to_primary(session):
        return len(_execute(session, model, verb))


def unchanged_jobs(model: Any, job_filter: JobFilter, keys: Sequence[Key]) -> Any:
    """Return a SELECT of the jobs with these keys whose state still matches the filter."""
    spec, _, select, _ = select_jobs(model, "change")
    jobs = select.where(spec.key_in(spec.keys, keys))
    if job_filter.states is None or not spec.has("status"):
        return jobs
    return jobs.where(spec.in_state(*job_filter.states))
