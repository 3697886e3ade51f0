"""What is done beside the firing: failures are recorded, old ticks deleted, and moved ticks found."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.spec import clock
from sqlaqueue.schedules.decide import recurrence_of
from sqlaqueue.schedules.group import ScheduleGroup
from sqlaqueue.schedules.recurrence import current_rules
from sqlaqueue.schedules.tables import in_utc

KEPT, KEPT_FOR = 100, timedelta(days=7)
"""The ticks that are kept: the newest of each schedule, and all of this time."""

DELETED = 10_000
"""How many ticks are deleted at once, at most."""

_SECOND = timedelta(seconds=1)


class Moved(NamedTuple):
    """A schedule whose next tick would be another one by the rules of this process."""

    schedule: str
    before: str
    """The versions of the rules by which the tick was computed."""
    rules: str
    """Those of this process."""
    next_tick: datetime
    computed: datetime | None


def record_failure(session: Session, group: ScheduleGroup, *, name: str, error: str) -> None:
    """Store why a schedule could not be fired, and commit. It stays due."""
    table = group.tables.schedules
    changed = sa.and_(table.c.name == name, table.c.last_error.is_distinct_from(error))
    session.execute(sa.update(table).where(changed).values(last_error=error), bind_arguments=group.bind)
    session.commit()


def delete_old_ticks(session: Session, group: ScheduleGroup) -> int:
    """Delete ticks that are older than a week and not among the newest hundred of their schedule, and commit.

    :return: their number; a full batch means that there may be more.
    """
    schedules, ticks = group.tables.schedules, group.tables.ticks
    newer = ticks.alias("sqlaqueue_newer")
    newest = sa.select(newer.c.tick).where(newer.c.schedule == schedules.c.name).order_by(newer.c.tick.desc())
    oldest_kept = newest.offset(KEPT - 1).limit(1).scalar_subquery()
    exists = sa.select(sa.literal(1)).where(schedules.c.name == ticks.c.schedule).exists()
    beyond = (schedules.c.name == ticks.c.schedule, ticks.c.tick < oldest_kept)
    surplus = sa.select(sa.literal(1)).where(*beyond).exists()
    old = ticks.c.fired_at < clock() - sa.literal(KEPT_FOR, sa.Interval())
    found = sa.select(ticks.c.schedule, ticks.c.tick).where(old, sa.or_(~exists, surplus)).limit(DELETED)
    batch = found.cte("sqlaqueue_old")
    same = (ticks.c.schedule == batch.c.schedule, ticks.c.tick == batch.c.tick)
    deleted = session.execute(sa.delete(ticks).where(*same), bind_arguments=group.bind)
    session.commit()
    count: int = deleted.rowcount  # type: ignore[attr-defined] # of a DELETE
    return count


def moved_ticks(session: Session, group: ScheduleGroup) -> list[Moved]:
    """Return the schedules whose next tick other rules have computed, and those of this process would put elsewhere."""
    table = group.tables.schedules
    waiting = (table.c.rules.is_not(None), table.c.rules != current_rules(), table.c.next_tick.is_not(None))
    rows = session.execute(sa.select(table, clock().label("now")).where(*waiting), bind_arguments=group.bind)
    moved = []
    for row in map(in_utc, rows.mappings()):
        recurrence, rules = recurrence_of(row), current_rules()
        before = min(row["now"], row["next_tick"] - _SECOND)
        try:
            computed = recurrence.after(max(before, row["last_tick"] or before))
        except ConfigurationError:
            computed = None
        if computed != row["next_tick"]:
            moved.append(Moved(row["name"], row["rules"], rules, row["next_tick"], computed))
    session.commit()
    return moved
