"""Maintenance: delete finished jobs and old attempts, reconcile message tables, and close unused connections."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.pool import Pool, QueuePool

from sqlaqueue.consumer import quarantine
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import Effect, ExecuteInOwnSession, Routine
from sqlaqueue.consumer.core.errors import is_transient
from sqlaqueue.consumer.maintenance.leases import look_for_unchanged
from sqlaqueue.consumer.maintenance.state import (
    MAINTAINERS,
    Deleted,
    Maintenance,
    Walk,
    batch_limits,
    delete_and_count,
)
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.consumer.settle import BESIDE_ORM, execute_for_keys
from sqlaqueue.flow_control.rates import delete_idle
from sqlaqueue.log import logger
from sqlaqueue.postgresql.claim_scan import planned_anew
from sqlaqueue.postgresql.side_tables import PAUSE, is_of_live_consumer
from sqlaqueue.queue.names import ATTEMPT, CONSUMERS, CONTROL, CRASH_JOURNAL, RATE
from sqlaqueue.queue.run import Key, key_text, keys_from
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sql.portable import Span, clock, earlier, is_among_rows, set_setting
from sqlaqueue.statements.verbs import reconcile
from sqlaqueue.strategies import KeyRange


def delete_old_attempts(maintenance: Maintenance, now: float) -> Routine:
    context, timers, walk = maintenance.context, maintenance.timers, maintenance.history
    if walk is None or not (context.has_claimed and timers.is_due("history", now)):
        return
    timers.set("history", now + context.intervals.retention())
    if context.polls.peers.rank >= MAINTAINERS:
        return
    if walk.begins_at <= now:
        walk.begin(now)
    try:
        deleted: Deleted = yield ExecuteInOwnSession(delete_batch, (context.settings, walk), slow=True)
    except DBAPIError:
        # The next batch is smaller.
        walk.record_error()
        raise
    more = deleted.number >= walk.limit
    walk.record_batch(deleted.newest, deleted.bound, deleted.seconds, more=more)
    if more:
        timers.set("history", time.monotonic() + context.intervals.between_deletions(deleted.seconds))


def delete_batch(session: Session, settings: ConsumerSettings, walk: Walk) -> Deleted:
    """Delete a batch of old attempts, and commit."""
    spec, bind = settings.spec, settings.bind_arguments
    table = spec.side_tables[ATTEMPT]
    bound = earlier(clock(), sa.literal(walk.age, Span()))
    *_, before = session.execute(sa.select(*batch_limits(settings), bound), bind_arguments=bind).one()
    old = sa.select(table.c.id).where(table.c.queue == spec.name, table.c.ended_at <= bound)
    if walk.since is not None:
        # Entries of deleted rows stay in the index until they are vacuumed.
        old = old.where(table.c.ended_at >= sa.literal(walk.since, table.c.ended_at.type))
    old = old.order_by(table.c.ended_at).limit(sa.literal(walk.limit).render_literal_execute())
    # Several Consumers delete: none waits for another.
    locked = old.with_for_update(skip_locked=True)
    if engine_of(session.connection(bind_arguments=bind).dialect) is None:
        chosen: sa.ColumnElement[bool] = is_among_rows(table.c.id, locked)
    else:
        # MariaDB refuses a limit in a subquery of IN.
        chosen = table.c.id.in_(session.execute(locked, bind_arguments=bind).scalars().all())
    deleting = sa.delete(table).where(chosen, planned_anew())
    deleted = delete_and_count(session, settings, deleting, table.c.ended_at, before)
    session.commit()
    return deleted


# -- reconcile ---------------------------------------------------------------------------------------------------------


RANGE = 20_000

_KEEP = timedelta(days=1)
_MOST_LOGGED = 20


def reconcile_messages(maintenance: Maintenance, now: float) -> Routine:
    """Compare messages with jobs, one range of keys after the other."""
    context, timers, intervals = maintenance.context, maintenance.timers, maintenance.context.intervals
    if not timers.is_due("reconcile", now):
        return
    timers.set("reconcile", now + intervals.reconcile(0))
    if maintenance.reconciled_upto is None:
        # The notification of quarantined jobs may have been lost.
        context.quarantine.may_wait = True
    if context.polls.peers.rank >= MAINTAINERS:
        # Check the rank again later, as this consumer may be one of the first then. The interval is longer, so that
        # many consumers are seldom woken for this.
        timers.set("reconcile", now + 3 * intervals.reconcile(0))
        return
    keys, maintenance.reconciled_upto = yield ExecuteInOwnSession(
        reconcile_range, (context, maintenance.reconciled_upto), slow=True
    )
    _log_repaired(context, keys)
    done = time.monotonic()
    maintenance.reconciling_took += done - now
    if maintenance.reconciled_upto is not None:
        timers.set("reconcile", done + intervals.between_ranges(done - now, found=bool(keys)))
        return
    timers.set("reconcile", done + intervals.reconcile(maintenance.reconciling_took))
    maintenance.reconciling_took = 0.0


def reconcile_all(context: ConsumerContext) -> Generator[Effect, Any, int]:
    """Find the jobs that claims have missed, give each a message or leave it out of claims, and return how many."""
    keys: Sequence[Key] = yield ExecuteInOwnSession(reconcile_at_once, (context,), slow=True)
    _log_repaired(context, keys)
    return len(keys) + (yield from look_for_unchanged(context))


def _log_repaired(context: ConsumerContext, keys: Sequence[Key]) -> None:
    if keys:
        some = ", ".join(map(key_text, keys[:_MOST_LOGGED]))
        more = f" and {len(keys) - _MOST_LOGGED} more" if len(keys) > _MOST_LOGGED else ""
        logger.warning(
            "queue %s: repaired what writes without triggers left: messages without a job, jobs without a message, or "
            "wrong counts of awaited jobs: %s%s",
            context.spec.name,
            some,
            more,
            extra=context.log_fields("messages_reconciled", count=len(keys)),
        )


def reconcile_at_once(session: Session, context: ConsumerContext) -> list[Key]:
    """Repair what bypassed the triggers, and delete what side tables no longer need."""
    spec, keys = context.spec, list[Key]()
    # On other engines nothing is kept by triggers, and claims look at the jobs that wait for others.
    bind = context.settings.bind_arguments
    if engine_of(session.connection(bind_arguments=bind).dialect) is None:
        repaired = session.execute(reconcile(spec.model), execution_options=BESIDE_ORM, bind_arguments=bind)
        keys = keys_from(repaired.scalars(), len(spec.keys))
    _delete_old(session, context)
    session.commit()
    return keys


def reconcile_range(session: Session, context: ConsumerContext, after: Key | None) -> tuple[list[Key], Key | None]:
    """Repair the messages of the next :data:`RANGE` jobs by key, or of all jobs if the strategy supports no ranges.

    Comparing all of a large table at once would keep the disk busy for as long as that takes.

    :param after: up to where the last range went; None to begin.
    :return: the keys of what was repaired, and up to where this range went; None at the end.
    """
    spec, bind = context.spec, context.settings.bind_arguments
    is_other = engine_of(session.connection(bind_arguments=bind).dialect) is not None
    if is_other or spec.strategy.reconcile_range(spec, KeyRange()) is None:
        return reconcile_at_once(session, context), None
    # Whatever the statistics say, the planner must use the indexes of the keys, and not read both tables for a range.
    off = [set_setting(f"enable_{way}", "off") for way in ("seqscan", "hashjoin", "mergejoin")]
    session.execute(sa.select(*off), bind_arguments=bind)
    ahead = sa.select(*spec.keys).where(KeyRange(after).holds(spec.keys), planned_anew())
    last = ahead.order_by(*spec.keys).offset(RANGE - 1).limit(1)
    upto = session.execute(last, bind_arguments=bind).one_or_none()
    part = KeyRange(after, None if upto is None else tuple(upto))
    verb: Any = spec.strategy.reconcile_range(spec, part)
    keys = execute_for_keys(session, context.settings, verb)
    if upto is None:
        _delete_old(session, context)
    session.commit()
    return keys, part.upto


def _delete_old(session: Session, context: ConsumerContext) -> None:
    spec, bind = context.spec, context.settings.bind_arguments
    if CRASH_JOURNAL in spec.side_tables:
        quarantine.delete_old_entries(session, spec)
    if RATE in spec.side_tables:
        session.execute(delete_idle(spec), bind_arguments=bind)
    control = spec.side_tables.get(CONTROL)
    if control is not None:
        old = control.c.created_at < earlier(clock(), _KEEP)
        mine = sa.and_(control.c.queue == spec.name, control.c.key != PAUSE, ~is_of_live_consumer(spec))
        session.execute(sa.delete(control).where(mine, old), bind_arguments=bind)
    consumers = spec.side_tables.get(CONSUMERS)
    if consumers is not None:
        dead = consumers.c.expires_at < earlier(clock(), _KEEP)
        session.execute(sa.delete(consumers).where(consumers.c.queue == spec.name, dead), bind_arguments=bind)


# -- retention ---------------------------------------------------------------------------------------------------------


def delete_old(maintenance: Maintenance, now: float) -> Routine:
    context, timers, retention = maintenance.context, maintenance.timers, maintenance.retention
    if not (retention.walks and context.has_claimed and timers.is_due("retention", now)):
        return
    timers.set("retention", now + context.intervals.retention())
    if context.polls.peers.rank >= MAINTAINERS:
        return
    more, busy = False, 0.0
    for walk in retention.walks:
        if walk.begins_at <= now:
            if not (yield ExecuteInOwnSession(retention.inspect, (context.settings,), slow=True)):
                return
            walk.begin(now)
        has_more, seconds = yield from _delete_batch(maintenance, walk)
        more, busy = more or has_more, busy + seconds
    if more:
        timers.set("retention", time.monotonic() + context.intervals.between_deletions(busy))


def _delete_batch(maintenance: Maintenance, walk: Walk) -> Generator[Effect, Any, tuple[bool, float]]:
    """Delete a batch; return whether there may be more, and for how many seconds the server was busy."""
    retention, settings, began = maintenance.retention, maintenance.context.settings, time.monotonic()
    try:
        deleted: Deleted = yield ExecuteInOwnSession(retention.delete_batch, (settings, walk), slow=True)
    except DBAPIError as error:
        if is_transient(error):
            raise
        took = time.monotonic() - began
        if not walk.record_error():
            return True, took
        return not (yield ExecuteInOwnSession(retention.skip_first, (settings, walk, error), slow=True)), took
    more, newest = deleted.number >= walk.limit, deleted.newest
    if not more:
        newest = yield ExecuteInOwnSession(retention.first_untried, (settings, walk, deleted.number), slow=True)
        more = bool(newest)
    walk.record_batch(newest, deleted.bound, deleted.seconds, more=more)
    if not more and walk.end():
        yield ExecuteInOwnSession(retention.warn_of_references, (settings, walk), slow=True)
    return more, deleted.seconds


# -- connections -------------------------------------------------------------------------------------------------------
# A pool keeps as many connections as were once used at the same time. Idle Consumers use one at a time, nearly always,
# and the listener has another one.


_UNUSED_AFTER = 30.0
"""Seconds without a job after which the connections of a pool are closed that are more than one."""

_busy_at: WeakKeyDictionary[Pool, float] = WeakKeyDictionary()
"""When a Consumer of this process has last had jobs, by its pool."""


def close_unused(maintenance: Maintenance, now: float) -> Routine:
    """Close the connections of the pool once no Consumer has had jobs for a while.

    Those of a host program stay, which may need them at any moment: it handles its signals itself.
    """
    context, timers = maintenance.context, maintenance.timers
    if not (context.has_claimed and context.handles_signals):
        return
    pool = context.engine.pool
    if context.busy_since is not None:
        _busy_at[pool] = now
    timers.start("connections", now + _UNUSED_AFTER)
    if timers.is_due("connections", now):
        timers.set("connections", now + _UNUSED_AFTER)
        if now - _busy_at.get(pool, float("-inf")) >= _UNUSED_AFTER:
            yield ExecuteInOwnSession(close_connections, (pool,))


def close_connections(session: Session, pool: Pool) -> None:
    """Close the connections in a pool, unless one of them is in use, or there is only one."""
    # A transaction at another isolation level has begun.
    session.rollback()
    if isinstance(pool, QueuePool) and pool.checkedin() > 1 and pool.checkedout() <= 0:
        pool.dispose()
