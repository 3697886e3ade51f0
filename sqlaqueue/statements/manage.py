"""Statements for jobs that the caller has not claimed.

They are ``cancel()``, ``requeue()``, ``rescue()``, ``purge()`` and ``reconcile()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.config import is_count
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements.returning import returning_keys, returning_nothing
from sqlaqueue.statements.selection import instances, key_of, refuse_runs_of_consumers, select_jobs


def cancel(jobs: Any, /) -> Any:
    """Return a statement that cancels pending jobs and requests the cancellation of running ones, without waiting.

    It returns the keys of the jobs that are now cancelled, not of those whose cancellation is requested.

    :param jobs: instances, a queue class, or ``select(Model).where(...)``.
    :raises HandlerMisuseError: for the job of a handler, in the handler of a Consumer.
    """
    if not isinstance(jobs, type | sa.Select):
        jobs = instances(jobs, "cancel")
        refuse_runs_of_consumers(jobs, "cancel")
    spec, select = _spec_and_select(jobs, "cancel")
    return (
        returning_nothing() if spec is None else returning_keys(spec, spec.strategy.cancel(spec, select), chosen=True)
    )


def requeue(jobs: Any, /) -> Any:
    """Return a statement that makes finished jobs pending again, with 0 attempts.

    For a queue with ``QueueConfig(unique=...)`` the statement returns a second column ``twin``: the key of the twin, as
    a text, for a job that has one and is not pending therefore, and None for the others.

    :param jobs: instances, a queue class, or ``select(Model).where(...)``.
    """
    listed = () if isinstance(jobs, type | sa.Select) else instances(jobs, "requeue")
    spec, select = _spec_and_select(listed or jobs, "requeue")
    return (
        returning_nothing()
        if spec is None
        else returning_keys(spec, spec.strategy.requeue(spec, select), listed, chosen=True)
    )


def rescue(model: type[Any], /) -> Any:
    """Return a statement that makes jobs whose lease has expired pending again.

    A job that was claimed alone keeps its attempt, and fails if it was the last. A job that was claimed with others
    gets its attempt back, and Consumers claim it alone from then on. Under a strategy without leases the statement
    changes nothing.

    :raises StatementError: if the model leaves out ``lease_expires_at``.
    """
    spec, *_ = select_jobs(model, "rescue")
    return returning_keys(spec, spec.strategy.rescue(spec))


def purge(
    model: Any, /, *, older_than: Delay | None = None, states: Iterable[str] = FINISHED, limit: int = 1000
) -> Any:
    """Return a statement that deletes up to ``limit`` finished jobs. Repeat it until it returns no keys.

    :param model: a queue class, or ``select(Model).where(...)``.
    :param older_than: the minimum age since the job finished, in seconds or as a timedelta; None for any age.
    :param states: which of ``completed``, ``failed`` and ``cancelled`` to delete.
    :raises StatementError: for other states, or if ``limit`` is not a positive integer.
    """
    spec, _, select, _ = select_jobs(model, "purge")
    names = tuple(states)
    if not names or not set(names) <= set(FINISHED):
        msg = f"purge(states={names!r}): use some of {', '.join(FINISHED)}; only finished jobs can be purged"
        raise StatementError(msg)
    if not is_count(limit):
        msg = f"purge(limit={limit!r}): the limit must be an integer of 1 or more"
        raise StatementError(msg)
    age = None if older_than is None else sa.literal(timedelta(seconds=seconds(older_than)), sa.Interval())
    return returning_keys(spec, spec.strategy.purge(spec, select, names, age, sa.literal(limit)), chosen=True)


def reconcile(model: type[Any], /) -> Any:
    """Return a statement that repairs a message table after changes that bypassed its triggers.

    Pending jobs without a message get one; messages whose job does not exist or is not pending are deleted. Without a
    message table the statement changes nothing.
    """
    spec, *_ = select_jobs(model, "reconcile")
    return returning_keys(spec, spec.strategy.reconcile(spec))


def _spec_and_select(jobs: Any, verb: str) -> tuple[QueueSpec | None, AnySelect]:
    if isinstance(jobs, type | sa.Select):
        spec, _, select, _ = select_jobs(jobs, verb)
        return spec, select
    listed = instances(jobs, verb)
    if not listed:
        return None, sa.select()
    spec = spec_of(type(listed[0]))
    return spec, sa.select(spec.model).where(spec.key_in(spec.keys, [key_of(job, verb) for job in listed]))
