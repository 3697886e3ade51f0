"""One look at the stored schedules: when the next one is due, and which ones this process cannot fire."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.notify_payloads import Heartbeat
from sqlaqueue.postgresql.schedule_tables import schedule_notification
from sqlaqueue.queue.spec import clock
from sqlaqueue.schedules.conditions import due, due_in, is_known
from sqlaqueue.schedules.group import ScheduleGroup


class Look(NamedTuple):
    """What a look has found."""

    due_in: float | None
    """The seconds until the next schedule is due that this process can fire; None without one."""
    unknown: list[str]
    """Overdue schedules whose class or function this process does not have."""

    @property
    def is_due(self) -> bool:
        """Whether one is due now."""
        return self.due_in is not None and self.due_in <= 0


def due_names(session: Session, group: ScheduleGroup, *, failing: Collection[str]) -> list[tuple[str, str]]:
    """Return the names and queues of the first schedules that are due and that this process can fire.

    :param failing: those to leave out.
    """
    table = group.tables.schedules
    rows: Any = session.execute(due(group, [table.c.name, table.c.queue], failing=failing), bind_arguments=group.bind)
    return [(name, queue) for name, queue in rows]


def look(session: Session, group: ScheduleGroup, *, failing: Collection[str] = (), notify: str | None = None) -> Look:
    """Return when the next schedule is due.

    :param failing: the names of schedules that could not be fired, and are tried again later.
    :param notify: the id of the process, to send a notification by which it learns that notifications arrive.
    """
    table = group.tables.schedules
    known = is_known(group, table)
    wanted = sa.and_(known, table.c.name.not_in(sorted(failing))) if failing else known
    planned = sa.func.coalesce(table.c.next_tick, table.c.created_at)
    overdue = sa.and_(~known, table.c.paused_at.is_(None), planned < clock() - table.c.grace)
    columns: list[sa.ColumnElement[Any]] = [
        sa.func.min(due_in(table)).filter(wanted),
        sa.func.array_agg(table.c.name, type_=sa.ARRAY(sa.Text())).filter(overdue),
    ]
    if notify is not None:
        columns.append(schedule_notification(Heartbeat(notify)))
    row: Any = session.execute(sa.select(*columns), bind_arguments=group.bind).one()
    session.commit()
    return Look(None if row[0] is None else float(row[0]), sorted(row[1] or ()))
