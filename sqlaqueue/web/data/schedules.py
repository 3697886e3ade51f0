"""The schedules of the queues that a user sees."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy.orm import Session

from sqlaqueue.admin.jobs import bind_arguments
from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.admin.schedules import schedules as read_all
from sqlaqueue.postgresql.faults import missing_tables
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.recurrence import ScheduleTables


def read_schedules(session: Session, spec: QueueSpec, queues: Iterable[str]) -> list[ScheduleInfo]:
    """Return the schedules of some queues, by name, from the tables that the queue of ``spec`` shares with others.

    :param queues: the names of queues; schedules of others are left out.
    """
    tables = ScheduleTables.look_up(spec)
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    # A program without schedules need not have the tables.
    if missing_tables(connection, [tables.schedules]):
        return []
    wanted = set(queues)
    return [each for each in read_all(session, spec.model) if each.queue in wanted]


def one_of_each_table(specs: Iterable[QueueSpec]) -> list[QueueSpec]:
    """Return one queue for each table of schedules: those of one MetaData and schema share it."""
    found: dict[tuple[int, str | None], QueueSpec] = {}
    for spec in specs:
        tables = ScheduleTables.look_up(spec)
        found.setdefault((id(tables.metadata), tables.schema), spec)
    return list(found.values())
