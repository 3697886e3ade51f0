"""Maintenance: delete attempts that are older than ``QueueConfig(attempt_history=...)``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.configuration.settings import ConsumerSettings
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.maintenance.retention_walk import Walk, batch_limits
from sqlaqueue.consumer.maintenance.state import MAINTAINERS, Maintenance
from sqlaqueue.postgresql.claim_scan import planned_anew
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.queue.spec import clock


def delete_old_attempts(maintenance: Maintenance, now: float) -> Routine:
    """Delete old attempts: a batch each time, with pauses while there are more."""
    context, timers, walk = maintenance.context, maintenance.timers, maintenance.history
    if walk is None or not (context.has_claimed and timers.is_due("history", now)):
        return
    timers.set("history", now + context.intervals.retention())
    if context.polls.peers.rank >= MAINTAINERS:
        return
    if walk.begins_at <= now:
        walk.begin(now)
    began = time.monotonic()
    try:
        ended, bound = yield ExecuteInOwnSession(delete_batch, (context.settings, walk), slow=True)
    except DBAPIError:
        # The next batch is smaller.
        walk.record_error()
        raise
    done, more = time.monotonic(), len(ended) >= walk.limit
    walk.record_batch(max(ended, default=None), bound, done - began, more=more)
    if more:
        timers.set("history", done + context.intervals.between_batches(done - began))


def delete_batch(session: Session, settings: ConsumerSettings, walk: Walk) -> tuple[Sequence[datetime], datetime]:
    """Delete a batch of the oldest attempts of a queue, and commit.

    :return: when the deleted attempts ended, and the time before which attempts had to end.
    """
    spec, bind = settings.spec, settings.bind_arguments
    table = spec.side_tables[ATTEMPT]
    bound = clock() - sa.literal(walk.age, sa.Interval())
    *_, before = session.execute(sa.select(*batch_limits(settings), bound), bind_arguments=bind).one()
    old = sa.select(table.c.id).where(table.c.queue == spec.name, table.c.ended_at <= bound)
    if walk.since is not None:
        # Entries of deleted rows stay in the index until they are vacuumed.
        old = old.where(table.c.ended_at >= sa.literal(walk.since, table.c.ended_at.type))
    old = old.order_by(table.c.ended_at).limit(sa.literal(walk.limit).render_literal_execute())
    # Several Consumers delete: none waits for another.
    chosen = sa.func.array(old.with_for_update(skip_locked=True).scalar_subquery())
    deleting = sa.delete(table).where(table.c.id == sa.any_(chosen), planned_anew())
    found = session.execute(deleting.returning(table.c.ended_at), bind_arguments=bind).scalars().all()
    session.commit()
    return found, before
