"""The maintenance task that rescues jobs whose lease has expired, as their worker died."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import is_lock_or_timeout, is_transient, is_twin, may_be_of_a_row
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.core.error_text import error_line
from sqlaqueue.consumer.executing.report import RescuedJob, report_rescued, report_unclaimable
from sqlaqueue.consumer.maintenance.extend_leases import limit_transaction
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.notifications.notify import notify_settled
from sqlaqueue.consumer.settling.settle import BESIDE_ORM, MOMENT, SHORTEST_MOMENT
from sqlaqueue.notify_payloads import Signal
from sqlaqueue.postgresql.triggers import notification
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.queue.run import Key, keys_from
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.sql.errors import violated_table
from sqlaqueue.statements.selection import returning_keys
from sqlaqueue.strategies import Verb
from sqlaqueue.strategies.listing import has_history, without_history
from sqlaqueue.strategies.twins import unique_key

_MOST_IN_PARTS, _LONGEST = 500, 1.0
"""How many jobs are rescued in parts, and for how many seconds; the rest is left to the next time."""

_MOST = 5_000
"""How many jobs are rescued together."""


def rescue_expired(maintenance: Maintenance, now: float) -> Routine:
    """Rescue the jobs of workers that died, when it is this consumer's turn.

    It looks twice. A lock on a row keeps its lease from being extended and the job from being rescued alike; when it
    ends, the worker that is alive has to come first.
    """
    context, timers = maintenance.context, maintenance.timers
    rescues, peers = context.polls.rescues, context.polls.peers
    if maintenance.expired and timers.is_due("rescue", now):
        timers.cancel("rescue")
        keys, maintenance.expired = maintenance.expired, ()
        rescued = yield ExecuteInOwnSession(rescue_jobs, (context, keys), slow=True)
        report_rescued(context, rescued)
        context.quarantine.may_wait |= bool(rescued)
    if not rescues.is_due:
        return
    rescues.begin(peers.rank)
    context.quarantine.may_wait |= not peers.listening
    if not maintenance.expired:
        maintenance.expired = yield ExecuteInOwnSession(look_for_expired, (context,), slow=True)
        if maintenance.expired:
            timers.set("rescue", time.monotonic() + maintenance.second_look)


def look_for_expired(session: Session, context: ConsumerContext) -> list[Key]:
    """Return the keys of jobs whose lease has expired, and whose rows no transaction has locked."""
    spec, settings = context.spec, context.settings
    others = [notification(spec, Signal.RESCUED)] if settings.notifies else []
    limit_transaction(session, context, *others)
    found = list[Key]()
    for shard in _specs(context):
        looked = expired_keys(shard, _MOST // len(spec.keys))
        looked = looked.with_for_update(of=spec.table, skip_locked=True, key_share=True)
        try:
            found += [tuple(row) for row in session.execute(looked, bind_arguments=settings.bind_arguments)]
            # A statement locks rows of one shard only.
            session.commit()
        except DBAPIError:
            session.rollback()
            if not shard.shard:
                raise
    return found


def _specs(context: ConsumerContext) -> list[QueueSpec]:
    """Return the queue, or what of it is on each shard."""
    spec, distribution = context.spec, context.settings.distribution
    if distribution is None:
        return [spec]
    return [spec.for_shard(distribution.attribute, value) for value in distribution.current_values()]


def rescue_jobs(session: Session, context: ConsumerContext, keys: Sequence[Key] | None = None) -> list[RescuedJob]:
    """Rescue jobs whose lease has expired, of any worker; the other consumers are notified of it.

    If the attempt history cannot be written, they are rescued without it.

    :param keys: the jobs, of which some may have ended; None for all.
    """
    spec = context.spec
    if context.settings.distribution is not None:
        return _rescue_shards(session, context, keys)
    if not has_history(spec):
        return _rescue_jobs(session, context, spec, keys)
    try:
        return _rescue_jobs(session, context, spec, keys)
    except DBAPIError as error:
        session.rollback()
        if is_transient(error):
            raise
        failed = error
    rescued = _rescue_jobs(session, context, without_history(spec), keys)
    if rescued:
        # Otherwise the history has lost nothing, and the error may have had another cause.
        context.settler.history.warn(failed)
    return rescued


def _rescue_shards(session: Session, context: ConsumerContext, keys: Sequence[Key] | None) -> list[RescuedJob]:
    """Rescue jobs of one shard after the other; a shard whose server does not answer is left to the next time.

    :raises DBAPIError: if one has failed, and no job of another one was rescued.
    """
    rescued, failed = list[RescuedJob](), None
    for shard in _specs(context):
        try:
            rescued += _rescue(session, context, _verb(shard, keys))
        except DBAPIError as error:
            session.rollback()
            failed = error
    if failed is not None and not rescued:
        raise failed
    return rescued


def _verb(spec: QueueSpec, keys: Sequence[Key] | None) -> Verb:
    return spec.strategy.rescue(spec) if keys is None else spec.strategy.rescue_some(spec, keys)


def _rescue_jobs(
    session: Session, context: ConsumerContext, spec: QueueSpec, keys: Sequence[Key] | None
) -> list[RescuedJob]:
    """Rescue jobs.

    If the database refuses one of them, or a twin of one is being enqueued, they are rescued in parts, so that the
    others need not wait for that.

    :param spec: the queue, with its attempt history or without.
    """
    unique = unique_key(spec)
    may_meet_twins = unique is not None and unique.returns_from_runs
    # The thread that rescues also extends leases, so it must not wait while the table of the history is locked.
    limit = MOMENT if has_history(spec) or may_meet_twins else None
    try:
        return _rescue(session, context, _verb(spec, keys), lock_timeout=limit)
    except DBAPIError as error:
        session.rollback()
        of_history = has_history(spec) and violated_table(error) == spec.side_tables[ATTEMPT].name
        is_refused = may_be_of_a_row(error) and not of_history
        if not (is_refused or (may_meet_twins and _meets_twin(error, spec))):
            raise
    if keys is None:
        rows = session.execute(expired_keys(spec), bind_arguments=context.settings.bind_arguments).all()
        keys = [tuple(row) for row in rows]
        session.rollback()
    # The thread that rescues also extends the leases of live runs.
    until = time.monotonic() + min(_LONGEST, context.settings.lease.total_seconds() / 8)
    return _rescue_parts(session, context, spec, keys[:_MOST_IN_PARTS], until)


def _rescue_parts(
    session: Session, context: ConsumerContext, spec: QueueSpec, keys: Sequence[Key], until: float
) -> list[RescuedJob]:
    """Rescue some jobs; by halves if that fails, down to the ones that cannot be rescued."""
    if not keys or context.workers_ended or time.monotonic() > until:
        return []
    try:
        return _rescue(session, context, spec.strategy.rescue_some(spec, keys), lock_timeout=SHORTEST_MOMENT)
    except DBAPIError as error:
        session.rollback()
        meets_twin = _meets_twin(error, spec)
        if not (meets_twin or may_be_of_a_row(error)):
            raise
        if len(keys) == 1:
            if has_history(spec) and not meets_twin:
                # It may be the history that is refused.
                return _rescue_parts(session, context, without_history(spec), keys, until)
            if not meets_twin:
                found = context.claimer.unclaimable.add(keys[0], error_line(error))
                report_unclaimable(context, found, error, "rescued")
            return []
    half = len(keys) // 2
    first = _rescue_parts(session, context, spec, keys[:half], until)
    return first + _rescue_parts(session, context, spec, keys[half:], until)


def _meets_twin(error: DBAPIError, spec: QueueSpec) -> bool:
    return is_lock_or_timeout(error) or is_twin(error, spec)


def expired_keys(spec: QueueSpec, most: int = _MOST_IN_PARTS) -> AnySelect:
    """Return a SELECT of the keys of jobs whose lease has expired.

    :param most: how many; by default as many as are rescued in parts.
    """
    expires = spec.column("lease_expires_at", "rescue()")
    expired = sa.select(*spec.keys).where(spec.in_state("processing"), expires <= clock())
    # In any order, so that the same ones are not tried each time.
    return expired.where(*spec.on_shard(spec.table)).order_by(sa.func.random()).limit(most)


def _rescue(
    session: Session, context: ConsumerContext, verb: Verb, *, lock_timeout: str | None = None
) -> list[RescuedJob]:
    settings, spec = context.settings, context.spec
    others: list[sa.ColumnElement[Any]] = [notification(spec, Signal.RESCUED)] if settings.notifies else []
    if lock_timeout is not None:
        others.append(sa.func.set_config("lock_timeout", lock_timeout, sa.true()))
    limit_transaction(session, context, *others)
    statement = returning_keys(spec, verb)
    found = session.execute(statement, execution_options=BESIDE_ORM, bind_arguments=settings.bind_arguments).scalars()
    rescued = keys_from(found, len(spec.keys))
    # Some of them may have failed by that.
    notify_settled(session, spec, context.waiters, rescued)
    jobs = rescued_jobs(session, spec, rescued)
    session.commit()
    return jobs


def rescued_jobs(session: Session, spec: QueueSpec, keys: Sequence[Key]) -> list[RescuedJob]:
    """Return jobs that were rescued in this transaction, with whether each has failed by that."""
    failed: dict[Key, Any] = {}
    if keys:
        roles = [spec.columns.get(role, sa.null()) for role in ("attempts", "max_attempts")]
        mine = sa.select(*roles, *spec.keys).where(spec.key_in(spec.keys, keys), spec.in_state("failed"))
        found: Any = session.execute(mine, bind_arguments={"mapper": spec.mapper})
        for attempts, limit, *key in found:
            failed[tuple(key)] = (attempts or 0, limit or spec.config.max_attempts)
    return [RescuedJob(key, *failed.get(key, ())) for key in keys]
