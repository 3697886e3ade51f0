"""The maintenance task that rescues jobs whose lease has expired, as their worker died."""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import is_lock_or_timeout, is_transient, is_twin
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.report import emit_rescued
from sqlaqueue.consumer.maintenance.extend_leases import limit_transaction
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.notifications.notify import notify_settled
from sqlaqueue.consumer.settling.settle import BESIDE_ORM, MOMENT, SHORTEST_MOMENT
from sqlaqueue.keys import Key, keys_from
from sqlaqueue.notify_payloads import Signal
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.distribution import Distribution
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.returning import returning_keys
from sqlaqueue.strategies import Verb
from sqlaqueue.strategies.parts.attempt_history import has_history, without_history
from sqlaqueue.strategies.parts.unique_key import unique_key

_MOST_ALONE, _LONGEST = 500, 1.0
"""How many jobs are rescued one by one, and for how many seconds; the rest is left to the next time."""


def rescue_expired(maintenance: Maintenance, now: float) -> Routine:  # noqa: ARG001 - as all tasks
    """Rescue the jobs of workers that died, when it is this consumer's turn."""
    context = maintenance.context
    rescues, peers = context.polls.rescues, context.polls.peers
    if not rescues.is_due:
        return
    rescues.begin(peers.rank)
    rescued = yield ExecuteInOwnSession(rescue_jobs, (context,))
    emit_rescued(context, rescued)
    context.quarantine.may_wait |= bool(rescued) or not peers.listening


def rescue_jobs(session: Session, context: ConsumerContext) -> list[Key]:
    """Rescue jobs whose lease has expired, of any worker; the other consumers are notified of it.

    If the attempt history cannot be written, they are rescued without it.
    """
    spec, distribution = context.spec, context.settings.distribution
    if distribution is not None:
        return _rescue_shards(session, context, distribution)
    if not has_history(spec):
        return _rescue_jobs(session, context, spec)
    try:
        return _rescue_jobs(session, context, spec)
    except DBAPIError as error:
        session.rollback()
        if is_transient(error):
            raise
        failed = error
    rescued = _rescue_jobs(session, context, without_history(spec))
    if rescued:
        # Otherwise the history has lost nothing, and the error may have had another cause.
        context.settler.history.warn(failed)
    return rescued


def _rescue_shards(session: Session, context: ConsumerContext, distribution: Distribution) -> list[Key]:
    """Rescue jobs of one shard after the other; a shard whose server does not answer is left to the next time.

    :raises DBAPIError: if one has failed, and no job of another one was rescued.
    """
    rescued, failed = list[Key](), None
    for value in distribution.current_values():
        shard = context.spec.for_shard(distribution.attribute, value)
        try:
            rescued += _rescue(session, context, shard.strategy.rescue(shard))
        except DBAPIError as error:
            session.rollback()
            failed = error
    if failed is not None and not rescued:
        raise failed
    return rescued


def _rescue_jobs(session: Session, context: ConsumerContext, spec: QueueSpec) -> list[Key]:
    """Rescue jobs.

    If a twin of one of them is being enqueued, each is rescued by itself, so that the others need not wait for that.

    :param spec: the queue, with its attempt history or without.
    """
    unique = unique_key(spec)
    if unique is None or not unique.returns_from_runs:
        # The thread that rescues also extends leases, so it must not wait while the table of the history is locked.
        limit = MOMENT if has_history(spec) else None
        return _rescue(session, context, spec.strategy.rescue(spec), lock_timeout=limit)
    try:
        return _rescue(session, context, spec.strategy.rescue(spec), lock_timeout=MOMENT)
    except DBAPIError as error:
        session.rollback()
        if not _meets_twin(error, spec):
            raise
    return _rescue_each(session, context, spec)


def _rescue_each(session: Session, context: ConsumerContext, spec: QueueSpec) -> list[Key]:
    """Rescue one job after the other; those whose twin is not committed yet are left to the next time."""
    rescued = list[Key]()
    found = session.execute(expired_keys(spec), bind_arguments=context.settings.bind_arguments).all()
    session.rollback()
    # The thread that rescues also extends the leases of live runs.
    until = time.monotonic() + min(_LONGEST, context.settings.lease.total_seconds() / 8)
    for row in found:
        if context.workers_ended or time.monotonic() > until:
            break
        verb = spec.strategy.rescue_some(spec, [tuple(row)])
        try:
            rescued += _rescue(session, context, verb, lock_timeout=SHORTEST_MOMENT)
        except DBAPIError as error:
            session.rollback()
            if not _meets_twin(error, spec):
                raise
    return rescued


def _meets_twin(error: DBAPIError, spec: QueueSpec) -> bool:
    return is_lock_or_timeout(error) or is_twin(error, spec)


def expired_keys(spec: QueueSpec) -> AnySelect:
    """Return a SELECT of the keys of jobs whose lease has expired, as many as are rescued one by one."""
    expires = spec.column("lease_expires_at", "rescue()")
    expired = sa.select(*spec.keys).where(spec.in_state("processing"), expires <= clock())
    # In any order, so that the same ones are not tried each time.
    return expired.order_by(sa.func.random()).limit(_MOST_ALONE)


def _rescue(session: Session, context: ConsumerContext, verb: Verb, *, lock_timeout: str | None = None) -> list[Key]:
    settings, spec = context.settings, context.spec
    others: list[sa.ColumnElement[Any]] = [backend().notification(spec, Signal.RESCUED)] if settings.notifies else []
    if lock_timeout is not None:
        others.append(sa.func.set_config("lock_timeout", lock_timeout, sa.true()))
    limit_transaction(session, context, *others)
    statement = returning_keys(spec, verb)
    found = session.execute(statement, execution_options=BESIDE_ORM, bind_arguments=settings.bind_arguments).scalars()
    rescued = keys_from(found, len(spec.keys))
    # Some of them may have failed by that.
    notify_settled(session, spec, context.waiters, rescued)
    session.commit()
    return rescued
