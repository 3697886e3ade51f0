"""Enqueue jobs that are unique: :func:`enqueue`.

::

    [(reminder, created)] = enqueue(session, Reminder(customer_id=7, kind="invoice"))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, get_args, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session

from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.session_types import check_session, session_in_scope
from sqlaqueue.statements.selection import instances
from sqlaqueue.strategies.twins import UniqueKey, unique_key
from sqlaqueue.unique.enqueueing import Enqueued, Enqueueing, OnTwin
from sqlaqueue.write_routing import execute

T = TypeVar("T")


@overload
def enqueue(
    session: Session | scoped_session[Any], jobs: Iterable[T], /, *, on_twin: OnTwin = "skip"
) -> list[Enqueued[T]]: ...
@overload
def enqueue(session: Session | scoped_session[Any], jobs: T, /, *, on_twin: OnTwin = "skip") -> list[Enqueued[T]]: ...
def enqueue(session: Any, jobs: Any, /, *, on_twin: OnTwin = "skip") -> list[Enqueued[Any]]:
    """Insert those jobs that have no twin, in the session's transaction, and return what became of each, in order.

    Twins are as :class:`~sqlaqueue.Unique` says. Jobs are looked for first, so that the call does not wait for a twin
    that can be seen, whatever another transaction does with it. It does wait for a transaction that has inserted a twin
    and not committed it, up to the ``lock_timeout`` of the session. If that transaction is rolled back, the job is
    inserted.

    As ``session.add()`` and ``session.flush()`` do, it flushes the session, adds the objects that the jobs refer to,
    and applies defaults. Do not add the jobs to the session yourself.

    :param jobs: a new instance of a queue class, or several of one queue.
    :param on_twin: what to do about a job that has a twin. ``"skip"`` returns the twin. ``"raise"`` inserts nothing,
        and raises an error. ``"replace"`` moves the values of the new job to a twin that is pending: all columns but
        its key, the attributes that make it unique, and those of the queue; its attempts count from 0.
        ``"replace_keep_time"`` does so, and leaves its ``run_at``. A twin that is running is never changed.
    :raises JobExists: with ``on_twin="raise"``, for the first job that has a twin.
    :raises StatementError: for instances that are in the database, and for a queue that cannot replace.
    :raises sqlalchemy.exc.DBAPIError: if the server refuses a row; under REPEATABLE READ and SERIALIZABLE with the
        SQLSTATE 40001 if a twin was committed after the transaction had begun. Roll back, and repeat the transaction.
    """
    check_session(session, "enqueue", is_async=False, has_async_version=True)
    return enqueue_in(session_in_scope(session), jobs, on_twin)


def enqueue_in(session: Session, jobs: Any, on_twin: OnTwin) -> list[Enqueued[Any]]:
    """Enqueue jobs as :func:`enqueue` documents."""
    listed: list[Any] = instances(jobs, "enqueue")
    if on_twin not in get_args(OnTwin):
        msg = f"enqueue(on_twin={on_twin!r}): use one of {', '.join(map(repr, get_args(OnTwin)))}"
        raise StatementError(msg)
    if not listed:
        return []
    spec = spec_of(type(listed[0]))
    _check_new(session, listed)
    key = unique_key(spec)
    if on_twin.startswith("replace"):
        _check_can_replace(spec, key, on_twin)
    if key is None:
        session.add_all(listed)
        session.flush()
        return [Enqueued(job, created=True) for job in listed]
    result: list[Enqueued[Any]] = execute(session, Enqueueing(key, listed, on_twin).run)
    return result


def _check_new(session: Session, jobs: Sequence[Any]) -> None:
    """Refuse instances that are no new jobs of this session.

    :raises StatementError: naming the class and the fix.
    """
    seen: set[int] = set()
    for job in jobs:
        name, state = type(job).__name__, sa.inspect(job)
        if id(job) in seen:
            msg = f"enqueue(): the same {name} is given twice; make an instance for each job"
            raise StatementError(msg)
        seen.add(id(job))
        if state.key is not None:
            msg = (
                f"enqueue(): this {name} is in the database already; give new instances, and do not add them to the "
                "session, which flushes them before a query"
            )
            raise StatementError(msg)
        if state.session is not None and state.session is not session:
            msg = f"enqueue(): this {name} was added to another session; do not add it, enqueue() does"
            raise StatementError(msg)


def _check_can_replace(spec: QueueSpec, key: UniqueKey | None, on_twin: OnTwin) -> None:
    """Refuse to replace where there are no twins, or where a running job reads as pending.

    :raises StatementError: naming the class and the fix.
    """
    what = f"enqueue(on_twin={on_twin!r}): {spec.model.__name__}"
    if key is None:
        msg = f"{what} is not unique, so its jobs have no twins; set QueueConfig(unique=Unique(...))"
        raise StatementError(msg)
    if not spec.strategy.tells_running_apart:
        msg = (
            f'{what}: under the strategy "{spec.strategy.name}" a running job still reads as pending, and its values '
            'would change while it runs; use strategy="update_status", or on_twin="skip"'
        )
        raise StatementError(msg)
