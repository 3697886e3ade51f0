"""Maintenance: write what has ended in each minute of a queue with ``QueueConfig(statistics=True)``.

All Consumers of a queue share a row for each minute, by an INSERT that adds to the row of the others, in a transaction
of its own: none waits for longer than such a statement takes, and no settlement waits at all. The first that writes in
a minute measures the depth of the queue, so a minute without a row is one in which no Consumer ran.
"""

from __future__ import annotations

import random
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.maintenance.state import MAINTAINERS, Maintenance, batch_limits
from sqlaqueue.consumer.outcomes import MinuteCounts
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.postgresql.due_times import count_waiting
from sqlaqueue.postgresql.side_tables import COUNTED, MEASURED
from sqlaqueue.queue.names import MINUTE
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sql.portable import clock, epoch
from sqlaqueue.sql.types import insert_or_replace

DEPTH_LIMIT = 100_000
"""The number of jobs up to which pending and due ones are counted, which takes some milliseconds."""

KEPT, PIECE = 31 * 1440, 1440
"""For how many minutes rows are kept, and of how many minutes older ones are deleted by one transaction."""

EVERY = 60.0
"""Seconds between two writes."""

_EARLIEST, _LATEST = 1.0, 10.0
"""Seconds after the end of a minute between which a Consumer writes it, so that not all of them write together."""

_LONGEST = 2**31 - 1


def write_counts(maintenance: Maintenance, now: float) -> Routine:
    """Write what has ended since the last time, soon after the end of each minute."""
    context, timers = maintenance.context, maintenance.timers
    counts = context.counts
    if counts is None or not (context.has_claimed and timers.is_due("minute", now)):
        return
    timers.set("minute", now + EVERY)
    measures = context.polls.peers.rank < MAINTAINERS
    if not (measures or counts):
        with context.lock:
            counts.since = now
        return
    depth: dict[str, int | None] = {}
    if measures:
        try:
            depth = yield ExecuteInOwnSession(measure, (context.settings, counts.since), slow=True)
        except DBAPIError as error:
            # The counts are written all the same.
            context.log_error("maintenance_error", "queue %s: maintenance: %s: %s", error)
    moment = yield from _write(context, counts, depth)
    # A minute ends by the clock of the database.
    late = random.uniform(_EARLIEST, _LATEST)  # noqa: S311 - no secret
    timers.set("minute", time.monotonic() + EVERY - moment % EVERY + late)


def write_last_counts(context: ConsumerContext) -> Routine:
    """Write at the end of a run what has ended since the last time."""
    counts = context.counts
    if counts:
        try:
            yield from _write(context, counts, {})
        except Exception as error:  # noqa: BLE001 - they are lost for the charts, and nothing depends on them
            context.log_error("maintenance_error", "queue %s: maintenance: %s: %s", error)


def _write(context: ConsumerContext, counts: MinuteCounts, depth: dict[str, int | None]) -> Routine:
    newer = MinuteCounts()
    with context.lock:
        context.counts = newer
    try:
        return (yield ExecuteInOwnSession(write_minute, (context.settings, counts, depth)))
    except Exception:
        with context.lock:
            newer.put_back(counts)
        raise


def measure(session: Session, settings: ConsumerSettings, since: float) -> dict[str, int | None]:
    """Return the depth of the queue, unless another Consumer has written that of this minute; delete old minutes.

    :param since: see :func:`write_minute`.
    """
    spec, bind = settings.spec, settings.bind_arguments
    table = spec.side_tables[MINUTE]
    mine = table.c.queue == spec.name
    *_, now = session.execute(sa.select(*batch_limits(settings), epoch(clock())), bind_arguments=bind).one()
    minute = _minute(float(now), since)
    measured = sa.select(table.c.pending).where(mine, table.c.minute == minute).scalar_subquery()
    first = sa.select(sa.func.min(table.c.minute)).where(mine).scalar_subquery()
    known, oldest = session.execute(sa.select(measured, first), bind_arguments=bind).one()
    depth: dict[str, int | None] = {}
    if known is None:
        by_priority = engine_of(session.connection(bind_arguments=bind).dialect) is None
        pending, due = count_waiting(spec, DEPTH_LIMIT, by_priority=by_priority)
        counted = session.execute(sa.select(pending, due.c.due, due.c.age), bind_arguments=bind).one()
        age = None if counted.age is None else min(max(round(counted.age), 0), _LONGEST)
        depth = dict(zip(MEASURED, (counted.pending, min(counted.due, DEPTH_LIMIT), age), strict=True))
    if oldest is not None and oldest < minute - KEPT:
        until = min(oldest + PIECE, minute - KEPT)
        session.execute(sa.delete(table).where(mine, table.c.minute < until), bind_arguments=bind)
    session.commit()
    return depth


def write_minute(
    session: Session, settings: ConsumerSettings, counts: MinuteCounts, depth: dict[str, int | None]
) -> float:
    """Add counts to the row of their minute, and return the database's time in seconds since the epoch.

    They are those of the time since ``counts.since``, a minute or so, and belong to the minute that has most of it.

    :param depth: the columns of what was measured; empty for nothing.
    """
    spec, bind = settings.spec, settings.bind_arguments
    table = spec.side_tables[MINUTE]
    *_, now = session.execute(sa.select(*batch_limits(settings), epoch(clock())), bind_arguments=bind).one()
    if counts or depth:
        row: dict[str, Any] = {"queue": spec.name, "minute": _minute(float(now), counts.since)}
        row |= dict.fromkeys(MEASURED) | depth | counts.values()
        session.execute(insert_or_replace(table, row, raised=MEASURED, added=COUNTED), bind_arguments=bind)
    session.commit()
    return float(now)


def _minute(now: float, since: float) -> int:
    """Return the number of the minute of the middle between a time of this process's clock and now.

    :param now: the database's time in seconds since the epoch.
    """
    return int((now - (time.monotonic() - since) / 2) // 60)
