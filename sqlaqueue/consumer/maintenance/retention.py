"""Maintenance: delete finished jobs that are older than ``QueueConfig(retention=...)``."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from sqlalchemy.exc import DBAPIError

from sqlaqueue.consumer.core.database_errors import is_transient
from sqlaqueue.consumer.core.effects import Effect, ExecuteInOwnSession, Routine
from sqlaqueue.consumer.maintenance.retention_walk import Walk
from sqlaqueue.consumer.maintenance.state import MAINTAINERS, Maintenance


def delete_old(maintenance: Maintenance, now: float) -> Routine:
    """Delete old finished jobs: a batch each time, with pauses while there are more."""
    context, timers, retention = maintenance.context, maintenance.timers, maintenance.retention
    if not (retention.walks and context.has_claimed and timers.is_due("retention", now)):
        return
    timers.set("retention", now + context.intervals.retention())
    if context.polls.peers.rank >= MAINTAINERS:
        return
    more, began = False, time.monotonic()
    for walk in retention.walks:
        if walk.begins_at <= now:
            if not (yield ExecuteInOwnSession(retention.inspect, (context.settings,), slow=True)):
                return
            walk.begin(now)
        more |= yield from _delete_batch(maintenance, walk)
    if more:
        done = time.monotonic()
        timers.set("retention", done + context.intervals.between_batches(done - began))


def _delete_batch(maintenance: Maintenance, walk: Walk) -> Generator[Effect, Any, bool]:
    """Delete a batch; return whether there may be more."""
    retention, settings, began = maintenance.retention, maintenance.context.settings, time.monotonic()
    try:
        deleted, newest, bound = yield ExecuteInOwnSession(retention.delete_batch, (settings, walk), slow=True)
    except DBAPIError as error:
        if is_transient(error):
            raise
        if not walk.record_error():
            return True
        return not (yield ExecuteInOwnSession(retention.skip_first, (settings, walk, error), slow=True))
    took, more = time.monotonic() - began, bool(deleted >= walk.limit)
    if not more:
        newest = yield ExecuteInOwnSession(retention.first_untried, (settings, walk, deleted), slow=True)
        more = bool(newest)
    walk.record_batch(newest, bound, took, more=more)
    if not more and walk.end():
        yield ExecuteInOwnSession(retention.warn_of_references, (settings, walk), slow=True)
    return more
