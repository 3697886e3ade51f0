"""Show and change the stored schedules of a queue's tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.jobs import bind_arguments
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.schedules.fire import recurrence_of
from sqlaqueue.schedules.recurrence import Recurrence, ScheduleTables, grace_of, in_utc
from sqlaqueue.schedules.schedule import PAUSED, Schedule, from_json
from sqlaqueue.schedules.store import from_code, is_edited
from sqlaqueue.sessions import routing_to_primary
from sqlaqueue.sql.engine import WRITES_LATER
from sqlaqueue.sql.portable import clock
from sqlaqueue.sql.types import insert_or_ignore

Origin = Literal["program", "edited", "added"]

_CHANGEABLE = ("cron", "every", "timezone", "values", "jitter", "catch_up", "misfire_grace", "skip_unfinished")


@dataclass(frozen=True)
class ScheduleInfo:
    """A stored schedule.

    ::

        for info in schedules.list():
            print(info.name, info.words, info.next_ticks(3))
    """

    name: str
    queue: str
    model: str | None
    """The name of the class of its jobs; None for the class of the queue."""
    cron: str | None
    every: timedelta | None
    timezone: str
    values: Mapping[str, Any]
    factory: str | None
    """The name of the function that makes its jobs; None if their values are stored."""
    jitter: timedelta
    catch_up: int
    misfire_grace: timedelta | None
    """The age from which a tick counts as missed; None for a minute, or until the next tick if that is sooner."""
    skip_unfinished: bool
    words: str
    """When it ticks, in words; or what is wrong with its definition."""
    origin: Origin
    """Whether the definition is a program's, was edited at run time since, or was added at run time."""
    paused_at: datetime | None
    run_requested_at: datetime | None
    last_tick: datetime | None
    next_tick: datetime | None
    late: timedelta | None
    """For how long it has been overdue; None if it is not."""
    last_error: str | None
    """Why it could not be fired."""
    rules: str | None
    """The versions of the rules by which its next tick was computed."""
    created_at: datetime

    def next_ticks(self, number: int = 5) -> list[datetime]:
        """Return its next ticks in UTC, from the stored one on; none while it is paused or its definition is wrong."""
        recurrence = Recurrence(self.cron, self.every, self.timezone, self.created_at)
        found: list[datetime] = []
        tick = self.next_tick
        try:
            while tick is not None and len(found) < number:
                found.append(tick)
                tick = recurrence.after(tick)
        except ConfigurationError:
            return []
        return found


def schedules(session: Session, model: type[Any]) -> list[ScheduleInfo]:
    """Return all schedules in the tables of a queue, by name; they may be of other queues as well."""
    table = _table(model)
    rows = session.execute(
        sa.select(table, clock().label("now")).order_by(table.c.name), bind_arguments=bind_arguments(model)
    )
    return [_info(in_utc(row)) for row in rows.mappings()]


def schedule(session: Session, model: type[Any], name: str) -> ScheduleInfo:
    """Return one schedule."""
    return _info(_row(session, model, name))


def add_schedule(session: Session, model: type[Any], schedule: Schedule[Any]) -> None:
    """Store a schedule, and commit."""
    of = schedule.model
    if ScheduleTables.look_up(spec_of(of)) != ScheduleTables.look_up(spec_of(model)):
        msg = (
            f"ScheduleAdmin.add(): {schedule!r}: the schedules of {of.__name__} are in other tables than those of "
            f"{model.__name__}; use ScheduleAdmin(session, {of.__name__})"
        )
        raise StatementError(msg)
    with routing_to_primary(session):
        insert = insert_or_ignore(_table(of), {"name": schedule.name, **schedule.columns()})
        written = session.execute(insert.returning(sa.literal(1)), bind_arguments=bind_arguments(of)).all()
    if not written:
        session.rollback()
        raise StatementError(f"there is a schedule {schedule.name!r} already; edit it, or use another name")
    session.commit()


def edit_schedule(session: Session, model: type[Any], name: str, /, **changes: Any) -> None:
    """Change the definition of a schedule, and commit."""
    unknown = [each for each in changes if each not in _CHANGEABLE]
    if unknown or not changes:
        wrong = f"{unknown[0]}= cannot be changed" if unknown else "there are no changes"
        msg = f"ScheduleAdmin.edit({name!r}): {wrong}; what can be changed is {', '.join(_CHANGEABLE)}"
        raise StatementError(msg)
    row = _row(session, model, name, **{WRITES_LATER: True})
    given: dict[str, Any] = {each: row[each] for each in _CHANGEABLE}
    if changes.get("cron") is not None:
        given["every"] = None
    if changes.get("every") is not None:
        given["cron"] = None
    of = ScheduleTables.look_up(spec_of(model)).classes().get((row["queue"], row["model"] or ""))
    if of is None:
        msg = f"the schedule {name!r} cannot be edited: its class {row['model'] or row['queue']} is not imported here"
        raise StatementError(msg)
    if "values" not in changes:
        given["values"] = from_json(spec_of(of), sa.inspect(of), row["values"])
    edited = Schedule(name, of, **(given | changes), make=None if row["factory"] is None else _unused)
    columns = edited.columns()
    # Only these: another change may have been made since the row was read.
    written = {*changes, *(("cron", "every") if {"cron", "every"} & changes.keys() else ())}
    changed = {each: columns[each] for each in _CHANGEABLE if each in written}
    _update(session, model, name, {**changed, "last_error": None})


def pause_schedule(session: Session, model: type[Any], name: str) -> None:
    """Pause a schedule, and commit."""
    _update(session, model, name, {"paused_at": sa.func.coalesce(_table(model).c.paused_at, clock())})


def resume_schedule(session: Session, model: type[Any], name: str) -> None:
    """Resume a paused schedule with its next tick, and commit."""
    table = _table(model)
    planned = sa.case((table.c.paused_at.is_not(None), PAUSED), else_=table.c.planned_for)
    _update(session, model, name, {"paused_at": None, "planned_for": planned})


def run_schedule(session: Session, model: type[Any], name: str) -> None:
    """Let a running process fire a schedule now, and commit."""
    _update(session, model, name, {"run_requested_at": clock()})


def reset_schedule(session: Session, model: type[Any], name: str) -> None:
    """Replace what was changed at run time by the definition of the program, and commit."""
    code = _row(session, model, name, **{WRITES_LATER: True})["code"]
    if code is None:
        msg = f"the schedule {name!r} cannot be reset: it was added at run time, and no program has declared it since"
        raise StatementError(msg)
    _update(session, model, name, {**from_code(code), "last_error": None})


def remove_schedule(session: Session, model: type[Any], name: str) -> None:
    """Delete a schedule, and commit."""
    _row(session, model, name, **{WRITES_LATER: True})
    table = _table(model)
    with routing_to_primary(session):
        session.execute(sa.delete(table).where(table.c.name == name), bind_arguments=bind_arguments(model))
    session.commit()


def _table(model: type[Any]) -> sa.Table:
    return ScheduleTables.look_up(spec_of(model)).schedules


def _row(session: Session, model: type[Any], name: str, **options: Any) -> dict[str, Any]:
    table = _table(model)
    query = sa.select(table, clock().label("now")).where(table.c.name == name)
    found = session.execute(query, execution_options=options, bind_arguments=bind_arguments(model))
    row = found.mappings().one_or_none()
    if row is None:
        names = session.scalars(sa.select(table.c.name).order_by(table.c.name), bind_arguments=bind_arguments(model))
        known = ", ".join(map(repr, names.all()))
        raise StatementError(
            f"there is no schedule {name!r}; {f'there are {known}' if known else 'there are no schedules'}"
        )
    return in_utc(row)


def _update(session: Session, model: type[Any], name: str, values: Mapping[str, Any]) -> None:
    table = _table(model)
    statement = sa.update(table).where(table.c.name == name).values(values)
    with routing_to_primary(session):
        found = session.execute(statement.returning(table.c.name), bind_arguments=bind_arguments(model)).all()
    if not found:
        _row(session, model, name)
    session.commit()


def _info(row: Mapping[str, Any]) -> ScheduleInfo:
    paused, now = row["paused_at"] is not None, row["now"]
    next_tick = None if paused else row["next_tick"]
    # What was never looked at is due since it was created.
    due = None if paused else next_tick or row["edited_at"] or row["created_at"]
    since = min((each for each in (due, row["run_requested_at"]) if each is not None), default=None)
    try:
        words = recurrence_of(row).in_words()
    except ConfigurationError as error:
        words = str(error)
    return ScheduleInfo(
        **{each: row[each] for each in ScheduleInfo.__dataclass_fields__ if each in row and each != "next_tick"},
        words=words,
        origin="added" if row["code"] is None else "edited" if is_edited(row) else "program",
        next_tick=next_tick,
        late=now - since if since is not None and since < now - grace_of(row["misfire_grace"]) else None,
    )


def _unused(_: Any) -> Any:
    """Stand for the function of a schedule, which may be another program's."""
