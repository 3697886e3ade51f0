"""The tick of a job: :class:`Tick`, and :func:`tick_of` for handlers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session

from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.schedules.tables import ScheduleTables
from sqlaqueue.session_types import check_session
from sqlaqueue.write_routing import routing_to_primary


class Tick(NamedTuple):
    """The moment at which a schedule wanted a job."""

    schedule: str
    """The name of the schedule."""
    at: datetime
    """The moment, in UTC."""
    late: timedelta
    """The time from then until now, by the database's clock."""


def tick_of(session: Session | scoped_session[Any], job: Any) -> Tick | None:
    """Return the tick for which a schedule has enqueued a job; None for any other job.

    Ticks are kept for a week, and the newest hundred of each schedule for ever. In async code:
    ``await session.run_sync(tick_of, job)``.

    :param job: an instance that is in the database.
    :raises NotAQueueError: if it is no instance of a queue class.
    :raises StatementError: if it is not in the database.
    """
    check_session(session, "tick_of", is_async=False)
    spec = spec_of(type(job) if isinstance(job, QueueMixin) else job)
    state: Any = sa.inspect(job)
    key = state.identity
    if key is None:
        msg = f"tick_of(): this {type(job).__name__} is not in the database"
        raise StatementError(msg)
    return tick_of_key(session, spec, key)


def tick_of_key(session: Session | scoped_session[Any], spec: QueueSpec, key: Key) -> Tick | None:
    """Return the same for the job of a key, whose row may be deleted already."""
    ticks = ScheduleTables.look_up(spec).ticks
    if any(getattr(column.type, "timezone", False) for column in spec.keys):
        # The text of a moment depends on the time zone of the session.
        same = [
            sa.cast(ticks.c.key[place].astext, column.type) == sa.literal(part, column.type)
            for place, (column, part) in enumerate(zip(spec.keys, key, strict=True))
        ]
    else:
        pairs = zip(key, spec.keys, strict=True)
        literals = [sa.cast(sa.literal(part, column.type), column.type) for part, column in pairs]
        same = [ticks.c.key == key_json(literals)]
    ticked = (
        sa.select(ticks.c.schedule, ticks.c.tick, clock() - ticks.c.tick)
        .where(ticks.c.queue == spec.name, *same)
        # A key may have been used by an earlier job.
        .order_by(ticks.c.fired_at.desc())
        .limit(1)
    )
    own: Session = session() if isinstance(session, scoped_session) else session
    # A replica may not have the tick yet.
    with routing_to_primary(own):
        found = own.execute(ticked, bind_arguments={"mapper": spec.mapper}).one_or_none()
    return None if found is None else Tick(found[0], found[1].astimezone(UTC), found[2])
