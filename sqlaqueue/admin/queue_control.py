"""Operations on a whole queue: pause, resume, consumers, rescue, reconcile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin.beside_twins import attempt
from sqlaqueue.admin.bulk_changes import NO_SYNCHRONIZATION, execute, savepoint
from sqlaqueue.admin.job_filter import bind_arguments
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.admin.shards import specs_of_expired
from sqlaqueue.consumer.errors import may_be_of_a_row
from sqlaqueue.consumer.maintenance.leases import expired_keys
from sqlaqueue.consumer.settle import MOMENT, SHORTEST_MOMENT
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements import verbs
from sqlaqueue.statements.selection import returning_keys, select_jobs
from sqlaqueue.strategies.twins import unique_key
from sqlaqueue.write_routing import routing_to_primary

_LONGEST = 5.0
"""For how many seconds jobs are rescued one by one; what has been rescued is locked meanwhile."""


@requires_session
def pause(session: Session, model: type[Any]) -> None:
    """Pause a queue, so that none of its jobs is claimed, and commit."""
    with routing_to_primary(session):
        session.execute(verbs.pause(model), bind_arguments=bind_arguments(model))
    session.commit()


@requires_session
def resume(session: Session, model: type[Any]) -> None:
    """Let Consumers claim jobs of a paused queue again, and commit."""
    with routing_to_primary(session):
        session.execute(verbs.resume(model), bind_arguments=bind_arguments(model))
    session.commit()


@requires_session
def paused(session: Session, model: type[Any]) -> bool:
    """Return whether a queue is paused."""
    return bool(session.scalar(verbs.paused(model), bind_arguments=bind_arguments(model)))


@requires_session
def consumers(session: Session, model: type[Any]) -> Sequence[Any]:
    """Return the live Consumers of a queue, as rows with the columns of :func:`sqlaqueue.consumers`."""
    return session.execute(verbs.consumers(model), bind_arguments=bind_arguments(model)).all()


@requires_session
def rescue(session: Session, model: type[Any]) -> int:
    """Make jobs whose lease has expired pending again, commit, and return their number.

    A job of a unique queue that has a twin by now counts as well. One whose twin is not committed yet is left as it is;
    if there are many of these, other jobs may be left to the next call.
    """
    spec = select_jobs(model, "rescue").spec
    unique = unique_key(spec)
    with routing_to_primary(session):
        if unique is None or not unique.returns_from_runs:
            try:
                with savepoint(session, model):
                    number = _rescue_together(session, model)
            except DBAPIError as error:
                if not may_be_of_a_row(error):
                    raise
                number = _rescue_each(session, model, spec)
        else:
            rows = attempt(session, model, verbs.rescue(model), lock_timeout=MOMENT)
            number = _rescue_each(session, model, spec) if rows is None else len(rows)
    session.commit()
    return number


def _rescue_each(session: Session, model: type[Any], spec: QueueSpec) -> int:
    """Rescue one job after the other, without those that have a twin, or that the database refuses to change."""
    number, until = 0, time.monotonic() + _LONGEST
    for key in session.execute(expired_keys(spec), bind_arguments=bind_arguments(model)).all():
        if time.monotonic() > until:
            break
        verb = returning_keys(spec, spec.strategy.rescue_some(spec, [tuple(key)]))
        number += len(attempt(session, model, verb, lock_timeout=SHORTEST_MOMENT, keys=[tuple(key)]) or ())
    return number


@requires_session
def preview_rescue(session: Session, model: type[Any]) -> int:
    """Return how many jobs :func:`rescue` would make pending; roll back."""
    number = _rescue_together(session, model)
    session.rollback()
    return number


def _rescue_together(session: Session, model: type[Any]) -> int:
    """Rescue jobs in one statement, or in one for each shard of a distributed table, and return their number."""
    bind, number = bind_arguments(model), 0
    with routing_to_primary(session):
        for spec in specs_of_expired(session, select_jobs(model, "rescue").spec):
            verb = returning_keys(spec, spec.strategy.rescue(spec))
            number += len(session.execute(verb, execution_options=NO_SYNCHRONIZATION, bind_arguments=bind).all())
    return number


@requires_session
def reconcile(session: Session, model: type[Any]) -> int:
    """Insert missing messages and delete superfluous ones, commit, and return the number of jobs concerned."""
    return execute(session, model, verbs.reconcile(model))
