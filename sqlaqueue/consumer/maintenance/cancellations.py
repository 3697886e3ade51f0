"""Maintenance: find out which running jobs are to be cancelled."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.run import Key, Run
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import with_plain_form


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
    spec, settings = context.spec, context.settings
    if CONTROL not in spec.side_tables or not runs:
        return []
    # All runs of one claim are on one shard, and a statement locks rows on one shard only.
    groups = [runs] if settings.distribution is None else [*_by_claim(runs)]
    statements = [_take(spec, [run.key for run in group]) for group in groups]
    rows = [row for each in statements for row in session.execute(each, bind_arguments=settings.bind_arguments)]
    session.commit()
    return [(tuple(row[:-1]), float(row[-1])) for row in rows]


def _by_claim(runs: Sequence[Run]) -> Iterable[list[Run]]:
    claims: dict[Any, list[Run]] = {}
    for run in runs:
        claims.setdefault(run.token, []).append(run)
    return claims.values()


def _take(spec: QueueSpec, keys: Sequence[Key]) -> sa.Executable:
    """Return the statement that deletes the requests to cancel jobs, and returns their keys and ages."""
    control = spec.side_tables[CONTROL]
    mine = sa.select(*spec.keys).where(spec.key_in(spec.keys, keys)).subquery("sqlaqueue_mine")
    key = key_json([mine.c[column.key] for column in spec.keys])
    age = sa.extract("epoch", sa.func.clock_timestamp() - control.c.created_at)
    # A request that is not committed yet must not block the leases that the same thread extends.
    asked = (
        sa.select(
            control.c.queue.label("sqlaqueue_queue"),
            control.c.key.label("sqlaqueue_key"),
            *mine.c,
            # Citus refuses a function of time in RETURNING. It has no queues that notify.
            *([] if spec.config.notify else [age.label("sqlaqueue_age")]),
        )
        .where(control.c.queue == spec.name, control.c.key == key)
        .with_for_update(of=control, skip_locked=True)
        .cte("sqlaqueue_asked")
    )
    taken = (
        sa.delete(control)
        .where(control.c.queue == asked.c.sqlaqueue_queue, control.c.key == asked.c.sqlaqueue_key)
        .returning(*(asked.c[column.key] for column in spec.keys), age if spec.config.notify else asked.c.sqlaqueue_age)
    )

    def without_using() -> Any:
        # RETURNING has the columns of the deleted rows only. In a CTE, as SQLAlchemy 2.0.32 does not compile a
        # parameter of several tuples that is used more than once.
        named = sa.select(*mine.c, key.label("sqlaqueue_key")).cte("sqlaqueue_named")
        keys = [
            sa.select(named.c[column.key])
            .where(control.c.key == named.c.sqlaqueue_key)
            .correlate(control)
            .scalar_subquery()
            for column in spec.keys
        ]
        mine_only = sa.delete(control).where(
            control.c.queue == spec.name, control.c.key.in_(sa.select(named.c.sqlaqueue_key))
        )
        return mine_only.returning(*keys, age)

    return with_plain_form(taken, without_using)
