"""The firing: one short transaction that writes ticks, enqueues their jobs, and moves schedules to their next tick.

The rows of due schedules are locked with SKIP LOCKED, so any number of processes can fire without a leader. The primary
key of a tick is the last resort: whatever else happens, such as a ``next_tick`` that was set back, a tick gets one job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.keys import Key
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.schedules.conditions import due_in, is_known, plan
from sqlaqueue.schedules.decide import DueSchedule, decide
from sqlaqueue.schedules.group import ScheduleGroup
from sqlaqueue.schedules.scheduled_job import make_job
from sqlaqueue.schedules.tables import in_utc
from sqlaqueue.unique.enqueue import enqueue_in

BATCH = 100
"""How many schedules are fired in one transaction, at most."""

LIMITS = {"lock_timeout": "5s", "idle_in_transaction_session_timeout": "30s"}
"""Other processes pass over the rows that a firing has locked, so it must not wait for long, nor stand still."""


class Fired(NamedTuple):
    """One tick that was fired."""

    schedule: str
    tick: datetime
    late: timedelta
    """The time from the tick to the firing."""
    job: Any = None
    """The instance; None if no job was enqueued, as the last one is unfinished or a twin exists."""
    key: Key | None = None


@dataclass
class Firing:
    """The result of one transaction."""

    schedules: int = 0
    """How many schedules were locked; fewer than :data:`BATCH` means that no more are due."""
    fired: list[Fired] = field(default_factory=list)
    missed: list[tuple[str, datetime]] = field(default_factory=list)
    """Schedules of which ticks were passed over, with the first of these ticks."""


def fire(session: Session, group: ScheduleGroup, *, failing: Collection[str] = (), only: str | None = None) -> Firing:
    """Fire the schedules that are due, up to :data:`BATCH` of them, and commit.

    An error undoes the whole transaction.

    :param failing: the names of schedules to leave out.
    :param only: the name of one schedule to look at.
    """
    limits = [sa.func.set_config(name, value, sa.true()) for name, value in LIMITS.items()]
    session.execute(sa.select(*limits), bind_arguments=group.bind)
    rows = _lock(session, group, failing, only)
    firing = Firing(len(rows))
    if rows:
        classes = group.tables.classes()
        schedules = [decide(row, classes[row["queue"], row["model"] or ""]) for row in rows]
        firing.missed += [(each.name, each.due.missed) for each in schedules if each.due.missed is not None]
        _leave_out_fired(session, group, schedules)
        unfinished = _unfinished(session, group, schedules)
        by_queue: dict[QueueSpec, list[DueSchedule]] = {}
        for each in schedules:
            by_queue.setdefault(each.spec, []).append(each)
        for spec, some in by_queue.items():
            firing.fired += _enqueue(session, group, spec, some, unfinished)
        _move_on(session, group, schedules)
    session.commit()
    return firing


def _lock(session: Session, group: ScheduleGroup, failing: Collection[str], only: str | None) -> Sequence[Any]:
    table = group.tables.schedules
    columns = (table, plan(table).label("plan"), clock().label("now"))
    due = sa.select(*columns).where(is_known(group, table), due_in(table) <= 0)
    if failing:
        due = due.where(table.c.name.not_in(sorted(failing)))
    if only is not None:
        due = due.where(table.c.name == only)
    due = due.order_by(table.c.next_tick.asc().nulls_first()).limit(BATCH)
    locked = due.with_for_update(skip_locked=True, key_share=True)
    return [in_utc(row) for row in session.execute(locked, bind_arguments=group.bind).mappings()]


def _leave_out_fired(session: Session, group: ScheduleGroup, schedules: Sequence[DueSchedule]) -> None:
    """Leave out ticks that were fired before: of a schedule that was deleted, or whose next tick was set back."""
    wanted = [(each.name, tick) for each in schedules for tick in each.ticks]
    if not wanted:
        return
    ticks = group.tables.ticks
    names, moments = [name for name, _ in wanted], [tick for _, tick in wanted]
    given = backend().numbered_rows({"schedule": (sa.Text(), names), "tick": (ticks.c.tick.type, moments)}, "number")
    same = sa.and_(ticks.c.schedule == given.c.schedule, ticks.c.tick == given.c.tick)
    rows = sa.select(ticks.c.schedule, ticks.c.tick).select_from(given.join(ticks, same))
    found: Any = session.execute(rows, bind_arguments=group.bind)
    fired = {(name, tick.astimezone(UTC)) for name, tick in found}
    for each in schedules:
        each.ticks = [tick for tick in each.ticks if (each.name, tick) not in fired]


def _unfinished(session: Session, group: ScheduleGroup, schedules: Sequence[DueSchedule]) -> set[str]:
    """Return those schedules with ``skip_unfinished`` whose last job is unfinished."""
    by_queue: dict[QueueSpec, list[str]] = {}
    for each in schedules:
        if each.row["skip_unfinished"] and each.ticks:
            by_queue.setdefault(each.spec, []).append(each.name)
    ticks, found = group.tables.ticks, set[str]()
    for spec, names in by_queue.items():
        given = backend().numbered_rows({"schedule": (sa.Text(), names)}, "number")
        own = sa.and_(ticks.c.schedule == given.c.schedule, ticks.c.queue == spec.name, ticks.c.key.is_not(None))
        newest = sa.select(ticks.c.key).where(own).order_by(ticks.c.tick.desc()).limit(1)
        last = sa.select(given.c.schedule, newest.scalar_subquery().label("key")).subquery("last")
        same = [column == sa.cast(last.c.key[place].astext, column.type) for place, column in enumerate(spec.keys)]
        running = [~spec.finished] if spec.has("status") else []
        jobs = sa.select(last.c.schedule).join_from(last, spec.table, sa.and_(*same)).where(*running)
        found.update(session.execute(jobs, bind_arguments=group.bind).scalars())
    return found


def _enqueue(
    session: Session, group: ScheduleGroup, spec: QueueSpec, schedules: Sequence[DueSchedule], unfinished: set[str]
) -> list[Fired]:
    """Enqueue the jobs of one queue, and write their ticks."""
    wanted: list[tuple[DueSchedule, datetime]] = []
    fired: list[Fired] = []
    for each in schedules:
        count = (0 if each.name in unfinished else 1) if each.row["skip_unfinished"] else len(each.ticks)
        wanted += [(each, tick) for tick in each.ticks[:count]]
        fired += [Fired(each.name, tick, each.row["now"] - tick) for tick in each.ticks[count:]]
    jobs = [make_job(each, tick, group.factories) for each, tick in wanted]
    for (each, tick), (job, created) in zip(wanted, enqueue_in(session, jobs, "skip"), strict=True):
        new = (job, tuple(sa.inspect(job).identity)) if created else ()
        fired.append(Fired(each.name, tick, each.row["now"] - tick, *new))
    keys = [each.key for each in fired if each.key is not None]
    messages = spec.strategy.insert_new_messages(spec, keys) if keys else None
    if messages is not None:
        session.execute(messages, bind_arguments=group.bind)
    if fired:
        _write_ticks(session, group, spec, fired)
    return fired


def _write_ticks(session: Session, group: ScheduleGroup, spec: QueueSpec, fired: Sequence[Fired]) -> None:
    ticks = group.tables.ticks
    keys = [each.key or (None,) * len(spec.keys) for each in fired]
    columns: dict[str, tuple[Any, Sequence[Any]]] = {
        "schedule": (sa.Text(), [each.schedule for each in fired]),
        "tick": (ticks.c.tick.type, [each.tick for each in fired]),
        **{f"key{place}": (column.type, [key[place] for key in keys]) for place, column in enumerate(spec.keys)},
    }
    given = backend().numbered_rows(columns, "number")
    parts = [given.c[f"key{place}"] for place in range(len(spec.keys))]
    key = sa.case((parts[0].is_not(None), backend().side_tables.key_json(parts)))
    rows = sa.select(given.c.schedule, given.c.tick, sa.literal(spec.name, sa.Text()), key, clock())
    statement = sa.insert(ticks).from_select(["schedule", "tick", "queue", "key", "fired_at"], rows)
    session.execute(statement, bind_arguments=group.bind)


def _move_on(session: Session, group: ScheduleGroup, schedules: Sequence[DueSchedule]) -> None:
    """Write the next ticks, and what they were computed for."""
    table = group.tables.schedules
    text, moment = sa.Text(), table.c.next_tick.type
    written = {
        "last_tick": (moment, [each.last_tick for each in schedules]),
        "next_tick": (moment, [each.due.next for each in schedules]),
        "planned_for": (text, [each.row["plan"] for each in schedules]),
        "rules": (text, [each.rules for each in schedules]),
        "run_requested_at": (moment, [each.left_request for each in schedules]),
    }
    given = backend().numbered_rows({"name": (text, [each.name for each in schedules]), **written}, "number")
    values = {name: given.c[name] for name in written} | {"last_error": None}
    statement = sa.update(table).where(table.c.name == given.c.name).values(values)
    session.execute(statement, bind_arguments=group.bind, execution_options={"synchronize_session": False})
