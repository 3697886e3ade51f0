"""SQL about the rows of schedules: which are due, and which a process can fire."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.spec import clock
from sqlaqueue.schedules.group import ScheduleGroup

PAUSED = "paused"
"""The ``planned_for`` of a paused schedule, whose ticks are passed over until it is resumed."""


BATCH = 100
"""How many schedules are fired in one transaction, at most."""

AHEAD = timedelta(days=1)
"""If the last tick is further in the future than this, the clock was wrong, and has been set back since."""


def plan(table: sa.FromClause) -> sa.ColumnElement[str]:
    """Return what ``next_tick`` depends on, as a text.

    It is stored in ``planned_for`` with each ``next_tick``, so a row whose text differs was changed since, by whatever
    means, and its next tick has to be computed again.
    """
    seconds: sa.ColumnElement[Any] = sa.extract("epoch", table.c.every)
    edited: sa.ColumnElement[Any] = sa.extract("epoch", table.c.edited_at)
    timing = sa.func.concat_ws("|", table.c.cron, seconds, table.c.timezone, edited)
    return sa.case((table.c.paused_at.is_(None), timing), else_=sa.literal_column(f"'{PAUSED}'"))


def due_in(table: sa.FromClause) -> sa.ColumnElement[Any]:
    """Return the seconds after which a schedule has to be looked at; negative for one that is late, NULL for never."""
    running = table.c.paused_at.is_(None)
    ahead = table.c.last_tick > clock() + sa.literal(AHEAD, sa.Interval())
    replanned = sa.or_(
        table.c.planned_for.is_distinct_from(plan(table)), sa.and_(running, sa.or_(table.c.next_tick.is_(None), ahead))
    )
    until_tick = sa.case((running, _until(table.c.next_tick)))
    soonest = sa.func.least(_until(table.c.run_requested_at), until_tick)
    return sa.case((replanned, sa.literal_column("0")), else_=soonest)


def is_known(group: ScheduleGroup, table: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return the condition that this process has the class of a schedule's jobs, and the function that makes them."""
    model = sa.func.coalesce(table.c.model, "", type_=sa.Text())
    classes = [sa.and_(table.c.queue == queue, model == name) for queue, name in group.tables.classes()]
    factories = sorted(group.factories)
    return sa.and_(sa.or_(*classes), sa.or_(table.c.factory.is_(None), table.c.factory.in_(factories)))


def _until(moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.extract("epoch", moment - clock())


def due(
    group: ScheduleGroup,
    columns: Sequence[sa.ColumnElement[Any]],
    *,
    failing: Collection[str],
    only: Collection[str] | None = None,
) -> AnySelect:
    """Return a SELECT of the first schedules that are due and that this process can fire, the most urgent first.

    :param failing: the names of schedules to leave out.
    :param only: the names of the schedules to look at; None for all.
    """
    table = group.tables.schedules
    found = sa.select(*columns).where(is_known(group, table), due_in(table) <= 0)
    if failing:
        found = found.where(table.c.name.not_in(sorted(failing)))
    if only is not None:
        found = found.where(table.c.name.in_(sorted(only)))
    return found.order_by(table.c.next_tick.asc().nulls_first()).limit(BATCH)
