"""One look at the stored schedules: when the next one is due, and which ones this process cannot fire."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.notify_payloads import Heartbeat
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import clock
from sqlaqueue.schedules.conditions import due_in, is_known
from sqlaqueue.schedules.group import ScheduleGroup


class Look(NamedTuple):
    """What a look has found."""

    due_in: float | None
    """The seconds until the next schedule is due that this process can fire; None without one."""
    unknown: list[str]
    """Overdue schedules whose class or function this process does not have."""


def due_names(session: Session, group: ScheduleGroup, failing: Collection[str]) -> list[str]:
    """Return the names of the schedules that are due and that this process can fire.

    :param failing: those to leave out.
    """
    table = group.tables.schedules
    due = sa.select(table.c.name).where(is_known(group, table), due_in(table) <= 0).order_by(table.c.next_tick)
    names = session.execute(due, bind_arguments=group.bind).scalars().all()
    return [name for name in names if name not in failing]


def look(session: Session, group: ScheduleGroup, process: str, failing: Collection[str]) -> Look:
    """Return when the next schedule is due, and send a notification by which the process notices that they arrive.

    :param process: the id of the process.
    :param failing: the names of schedules that could not be fired, and are tried again later.
    """
    table = group.tables.schedules
    known = is_known(group, table)
    wanted = sa.and_(known, table.c.name.not_in(sorted(failing))) if failing else known
    overdue = sa.and_(~known, table.c.paused_at.is_(None), table.c.next_tick < clock() - table.c.grace)
    proof = backend().side_tables.schedule_notification(Heartbeat(process))
    soonest, unknown, _ = session.execute(
        sa.select(
            sa.func.min(due_in(table)).filter(wanted),
            sa.func.array_agg(table.c.name, type_=sa.ARRAY(sa.Text())).filter(overdue),
            proof,
        ),
        bind_arguments=group.bind,
    ).one()
    session.commit()
    return Look(None if soonest is None else float(soonest), sorted(unknown or ()))
