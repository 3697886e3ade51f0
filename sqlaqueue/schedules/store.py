"""Schedules in the database: declared when a program starts, looked at before firing, and kept up beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.notify_payloads import Heartbeat
from sqlaqueue.postgresql.checks_of import refuse_newer
from sqlaqueue.postgresql.schedule_tables import schedule_notification
from sqlaqueue.schedules.fire import recurrence_of
from sqlaqueue.schedules.recurrence import USUAL_GRACE, current_rules, in_utc
from sqlaqueue.schedules.schedule import STORED, Schedule, ScheduleGroup, due, due_in, is_known
from sqlaqueue.sql.portable import Span, clock, collected, earlier, filtered, is_among
from sqlaqueue.sql.types import insert_or_ignore, key_array

# -- declare -----------------------------------------------------------------------------------------------------------

DEFINITION = ("queue", "model", *STORED)
"""The columns that a definition consists of."""

_SPANS = ("every", "jitter", "misfire_grace")


class Declarations(NamedTuple):
    """What was found and written."""

    written: list[str]
    """The schedules that were new, or were changed in the program since it had last started."""
    kept: list[str]
    """Those that the program has changed, but that were changed or added at run time as well, and so are kept."""
    changed: list[str]
    """Those that another transaction has changed meanwhile; they are to be read again."""


class Declaration(NamedTuple):
    """A schedule of the program that has to be written."""

    name: str
    statement: Any
    keeps: bool
    """Whether the stored definition is kept, since it was changed at run time."""


def as_json(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a definition as JSON, to be stored as the last one of the program and compared with it."""
    spans = {name: values[name].total_seconds() for name in _SPANS if values[name] is not None}
    return {name: values[name] for name in DEFINITION} | spans


def from_code(code: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a definition that :func:`as_json` has written."""
    spans = {name: timedelta(seconds=code[name]) for name in _SPANS if code[name] is not None}
    return {name: code[name] for name in DEFINITION} | spans


def is_edited(row: Mapping[Any, Any]) -> bool:
    """Return whether a stored schedule differs from what a program last wrote, or comes from no program."""
    return row["code"] is None or as_json(row) != row["code"]


def declare(session: Session, group: ScheduleGroup, *, reset: bool = False) -> Declarations:
    """Write those schedules of the program that differ from what a program last wrote, and commit.

    A schedule that was changed at run time is left as it is. None is deleted: it may belong to another program.

    :param reset: overwrite what was changed at run time as well.
    """
    declared = Declarations([], [], [])
    found = declarations(session, group, reset=reset)
    for each, written in zip(found, write_declarations(session, group, some=found), strict=True):
        (declared.changed if not written else declared.kept if each.keeps else declared.written).append(each.name)
    return declared


def declarations(session: Session, group: ScheduleGroup, *, reset: bool = False) -> list[Declaration]:
    """Return what :func:`declare` has to write, by name."""
    table = group.tables.schedules
    known = is_among(table.c.name, sa.bindparam(None, list(group.declared), key_array(sa.Text())))
    columns = [table.c.name, table.c.code, *(table.c[name] for name in DEFINITION)]
    rows = session.execute(sa.select(*columns).where(known), bind_arguments=group.bind).mappings()
    stored = {row["name"]: row for row in rows}
    session.commit()
    found = (_declaration(table, stored.get(name), each, reset=reset) for name, each in sorted(group.declared.items()))
    return [each for each in found if each is not None]


def write_declarations(session: Session, group: ScheduleGroup, *, some: Sequence[Declaration]) -> list[bool]:
    """Write schedules, and commit; return for each whether it was written, and not changed since it was read."""
    name = group.tables.schedules.c.name
    written = [bool(session.execute(each.statement.returning(name), bind_arguments=group.bind).all()) for each in some]
    session.commit()
    return written


def _declaration(
    table: sa.Table, row: Mapping[Any, Any] | None, schedule: Schedule[Any], *, reset: bool
) -> Declaration | None:
    columns, name = schedule.columns(), schedule.name
    wanted = as_json(columns)
    values = {"name": name, **columns, "code": wanted}
    if row is None:
        return Declaration(name, insert_or_ignore(table, values), keeps=False)
    edited = is_edited(row)
    if row["code"] == wanted and not (reset and edited):
        return None
    unchanged = [table.c[each].is_not_distinct_from(sa.literal(row[each], table.c[each].type)) for each in DEFINITION]
    update = sa.update(table).where(table.c.name == name, *unchanged)
    if edited and as_json(row) != wanted and not reset:
        # The new definition is stored beside the edited one, for a reset.
        return Declaration(name, update.values(code=wanted), keeps=True)
    return Declaration(name, update.values(values), keeps=False)


# -- look --------------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """What one look at the stored schedules has found."""

    due_in: float | None
    """The seconds until the next schedule is due that this process can fire; None without one."""
    unknown: list[str]
    """Overdue schedules whose class or function this process does not have."""

    @property
    def is_due(self) -> bool:
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
    :raises DatabaseNotReadyError: if a migration has made the tables unusable for this version of sqlaqueue.
    """
    table = group.tables.schedules
    connection = session.connection(bind_arguments=group.bind)
    refuse_newer(connection, [table, group.tables.ticks], "a process that fires schedules")
    known = is_known(group, table)
    wanted = sa.and_(known, table.c.name.not_in(sorted(failing))) if failing else known
    planned = sa.func.coalesce(table.c.next_tick, table.c.created_at)
    grace = sa.func.coalesce(table.c.misfire_grace, sa.literal(USUAL_GRACE, Span()))
    overdue = sa.and_(~known, table.c.paused_at.is_(None), planned < earlier(clock(), grace))
    columns: list[sa.ColumnElement[Any]] = [
        filtered(sa.func.min(due_in(table)), wanted),
        filtered(collected(table.c.name), overdue),
    ]
    if notify is not None:
        columns.append(schedule_notification(Heartbeat(notify)))
    row: Any = session.execute(sa.select(*columns), bind_arguments=group.bind).one()
    session.commit()
    return Look(None if row[0] is None else float(row[0]), sorted(row[1] or ()))


# -- upkeep ------------------------------------------------------------------------------------------------------------

KEPT, KEPT_FOR = 100, timedelta(days=7)
"""The ticks that are kept: the newest of each schedule, and all of this time."""

DELETED = 10_000
"""How many ticks are deleted at once, at most."""


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
    old = ticks.c.fired_at < earlier(clock(), sa.literal(KEPT_FOR, Span()))
    found = sa.select(ticks.c.schedule, ticks.c.tick).where(old, sa.or_(~exists, surplus)).limit(DELETED)
    chosen = sa.tuple_(ticks.c.schedule, ticks.c.tick).in_(sa.select(*found.subquery("sqlaqueue_old").c))
    deleted = session.execute(sa.delete(ticks).where(chosen), bind_arguments=group.bind)
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
        before = min(row["now"], row["next_tick"] - timedelta(seconds=1))
        try:
            computed = recurrence.after(max(before, row["last_tick"] or before))
        except ConfigurationError:
            computed = None
        if computed != row["next_tick"]:
            moved.append(Moved(row["name"], row["rules"], rules, row["next_tick"], computed))
    session.commit()
    return moved
