"""Maintenance: find out which running jobs are to be cancelled."""

from __future__ import annotations

import time
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.keys import Key
from sqlaqueue.queue.backend import CONTROL, backend
from sqlaqueue.queue.run import Run


def cancel_requested(maintenance: Maintenance, now: float) -> Routine:
    """Cancel the running jobs for which there is a request."""
    context, timers = maintenance.context, maintenance.timers
    # Reset before the state is read: a request that arrives later sets it again, and the next execution queries it.
    notified, context.polls.cancellation_requested = context.polls.cancellation_requested, False
    since = context.busy_since
    if since is None:
        timers.cancel("cancellations")
        return
    timers.start("cancellations", since + context.intervals.cancellations())
    if not (notified or timers.is_due("cancellations", now)):
        return
    timers.set("cancellations", now + context.intervals.cancellations())
    runs = context.claimed_runs()
    if runs:
        requested = yield ExecuteInOwnSession(take_requests, (context, runs))
        context.request_cancellation(requested, time.monotonic())


def take_requests(session: Session, context: ConsumerContext, runs: Sequence[Run]) -> list[tuple[Key, float]]:
    """Delete the requests to cancel ``runs``, and return their keys with the ages of the requests in seconds."""
    spec, bind = context.spec, context.settings.bind_arguments
    control = spec.side_tables.get(CONTROL)
    if control is None or not runs:
        return []
    mine = sa.select(*spec.keys).where(spec.key_in(spec.keys, [run.key for run in runs])).subquery("mine")
    key = backend().side_tables.key_json([mine.c[column.key] for column in spec.keys])
    # A request that is not committed yet must not block the leases that the same thread extends.
    asked = (
        sa.select(control.c.queue.label("asked_queue"), control.c.key.label("asked_key"), *mine.c)
        .where(control.c.queue == spec.name, control.c.key == key)
        .with_for_update(of=control, skip_locked=True)
        .cte("asked")
    )
    age = sa.extract("epoch", sa.func.clock_timestamp() - control.c.created_at)
    taken = (
        sa.delete(control)
        .where(control.c.queue == asked.c.asked_queue, control.c.key == asked.c.asked_key)
        .returning(*(asked.c[column.key] for column in spec.keys), age)
    )
    found = [(tuple(row[:-1]), float(row[-1])) for row in session.execute(taken, bind_arguments=bind)]
    session.commit()
    return found
