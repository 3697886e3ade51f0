"""The firing: one short transaction that writes ticks, enqueues their jobs, and moves schedules to their next tick.

The rows of due schedules are locked with SKIP LOCKED, so any number of processes can fire without a leader. The primary
key of a tick is the last resort: whatever else happens, such as a ``next_tick`` that was set back, a tick gets one job.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.recurrence import DueTicks, Recurrence, due_ticks, grace_of, in_utc
from sqlaqueue.schedules.schedule import AHEAD, BATCH, PAUSED, ScheduleGroup, Tick, due, from_json, plan
from sqlaqueue.sql.portable import clock, converted
from sqlaqueue.sql.types import numbered_rows
from sqlaqueue.unique.enqueue import enqueue_in

# -- what becomes of a due schedule, without I/O -----------------------------------------------------------------------


@dataclass
class DueSchedule:
    """A locked row, and what is decided about it."""

    row: Mapping[Any, Any]
    model: type[Any]
    due: DueTicks
    ticks: list[datetime]
    """The ticks to fire, with the one that was requested by "run now"."""
    is_cut: bool = False
    """Whether ticks are left that are due as well."""

    def until(self, number: int) -> DueSchedule:
        """Return what becomes of it if only the first ticks are fired now; the others stay due."""
        due, following = self.due, self.ticks[number]
        if following in self.due.fired:
            due = due._replace(last=self.ticks[number - 1], next=following)
        return replace(self, due=due, ticks=self.ticks[:number], is_cut=True)

    @property
    def name(self) -> str:
        return str(self.row["name"])

    @property
    def spec(self) -> QueueSpec:
        return spec_of(self.model)

    @property
    def rules(self) -> str | None:
        """The versions of the rules by which the next tick was computed."""
        before: str | None = self.row["rules"]
        return before if self.row["plan"] == PAUSED else recurrence_of(self.row).rules()

    @property
    def left_request(self) -> datetime | None:
        """The time of a requested run that is still to come; None if it was fired now, or there is none."""
        requested: datetime | None = self.row["run_requested_at"]
        return requested if requested is not None and (self.is_cut or requested > self.row["now"]) else None


def recurrence_of(row: Mapping[Any, Any]) -> Recurrence:
    """Return when a stored schedule ticks."""
    return Recurrence(row["cron"], row["every"], row["timezone"], row["created_at"])


def decide(row: Mapping[Any, Any], model: type[Any]) -> DueSchedule:
    """Return what becomes of a locked row; refuse a definition, which may have been written by SQL, without ticks."""
    due = DueTicks([], None, None, None)
    if row["plan"] != PAUSED:
        recurrence = recurrence_of(row)
        recurrence.check()
        due = _due_ticks(row, recurrence)
    # One at a time: the first would be unfinished when the second is fired.
    ticks = due.fired[-1:] if row["skip_unfinished"] else due.fired
    requested = row["run_requested_at"]
    if requested is not None and requested <= row["now"]:
        ticks = [*ticks, requested]
    return DueSchedule(row, model, due, list(dict.fromkeys(ticks)))


def _due_ticks(row: Mapping[Any, Any], recurrence: Recurrence) -> DueTicks:
    """Return what to do about the ticks of a schedule: from the stored one on, or from new ones if it was changed."""
    now, stored, last = row["now"], row["next_tick"], _last_tick(row)
    options = {"misfire_grace": row["misfire_grace"], "catch_up": row["catch_up"]}
    clock_was_wrong = last != row["last_tick"]
    if stored is not None and row["planned_for"] == row["plan"] and not clock_was_wrong:
        return due_ticks(recurrence, stored, now, **options)
    # Nothing is fired for the time before it was created, changed or resumed; nor, when the clock has gone back a
    # little, for a time that has passed before.
    since = row["created_at"] if row["planned_for"] is None and row["edited_at"] is None else _changed_at(row)
    first = recurrence.after(max(since, last or since))
    due = DueTicks([], None, None, None) if first is None else due_ticks(recurrence, first, now, **options)
    if stored is None or row["planned_for"] is None or clock_was_wrong or stored > min(since, now):
        return due
    # The former definition had a tick before the change, which was not fired yet.
    grace, is_newest = row["misfire_grace"], due.last is None
    on_time = now - stored <= grace_of(grace) and (is_newest or grace is not None)
    fires = on_time or (row["catch_up"] > 0 and not due.fired)
    return due._replace(
        fired=[stored, *due.fired] if fires else due.fired,
        last=due.last or stored,
        missed=due.missed if fires else stored,
    )


def _last_tick(row: Mapping[Any, Any]) -> datetime | None:
    """Return the newest tick that has passed; None if it is far ahead, as the clock was wrong."""
    last: datetime | None = row["last_tick"]
    return None if last is not None and last > row["now"] + AHEAD else last


def _changed_at(row: Mapping[Any, Any]) -> datetime:
    """Return when a schedule was changed, which a trigger records; without it, now."""
    now: datetime = row["now"]
    edited, planned = row["edited_at"], row["planned_at"]
    if edited is None or (planned is not None and edited <= planned):
        return now
    changed: datetime = edited
    return min(changed, now)


# -- the jobs ----------------------------------------------------------------------------------------------------------


def make_job(schedule: DueSchedule, at: datetime, factories: Mapping[str, Callable[..., Any]]) -> Any:
    """Return the job of a tick, a new instance.

    :param factories: the functions ``make`` of the program by their stored names.
    :raises ConfigurationError: if the stored values, or what ``make`` returns, make no job.
    """
    row, model, spec = schedule.row, schedule.model, schedule.spec
    values = from_json(spec, sa.inspect(model), row["values"])
    if row["factory"] is None:
        job = model(**values)
    else:
        try:
            # What it sets in context variables must not reach the next one.
            job = copy_context().run(factories[row["factory"]], Tick(schedule.name, at, row["now"] - at))
        except SystemExit as error:
            msg = f"make= of the schedule {schedule.name!r} raised {error!r}"
            raise ConfigurationError(msg) from error
        if not isinstance(job, model) or not sa.inspect(job).transient:
            msg = f"make= of the schedule {schedule.name!r} returned {job!r}, and not a new {model.__name__}"
            raise ConfigurationError(msg)
        for attribute, value in values.items():
            setattr(job, attribute, value)
    run_at = spec.attributes.get("run_at")
    if run_at is not None and getattr(job, run_at, None) is None:
        # A run that was requested is due at once.
        jitter = timedelta(0) if at == row["run_requested_at"] else jitter_of(schedule.name, at, row["jitter"])
        moment: Any = at + jitter
        column = spec.columns["run_at"]
        if not getattr(column.type, "timezone", False):
            # The server converts it to the time zone of the session, as it does when it compares the column with the
            # clock.
            moment = converted(sa.literal(moment, sa.DateTime(timezone=True)), column.type)
        setattr(job, run_at, moment)
    return job


def jitter_of(name: str, tick: datetime, longest: timedelta) -> timedelta:
    """Return how much later than its tick a job is due: the same in every process, and spread evenly over ticks."""
    digest = hashlib.sha256(f"{name}|{tick.timestamp()}".encode()).digest()
    return longest * (int.from_bytes(digest[:8]) / 2**64)


_MOST_SECONDS, _MOST_JOBS = 1.0, 1000
"""After so long, or with so many jobs, a transaction ends, and what else is due is fired by the next one."""

_TOO_SLOW = 20.0
"""Seconds after which a function ``make`` has failed: the server would end the transaction soon."""


class Fired(NamedTuple):
    """One tick that was fired."""

    schedule: str
    tick: datetime
    late: timedelta
    """The time from the tick to the firing."""
    job: Any = None
    """The instance; None if no job was enqueued, as the last one is unfinished or the new one a duplicate."""
    key: Key | None = None


@dataclass
class Firing:
    """The result of one transaction."""

    locked: int = 0
    """How many schedules were locked."""
    more: bool = False
    """Whether more may be due."""
    moved: list[str] = field(default_factory=list)
    """The schedules that have their next tick now."""
    fired: list[Fired] = field(default_factory=list)
    missed: list[tuple[str, datetime]] = field(default_factory=list)
    """Schedules of which ticks were passed over, with the first of these ticks."""
    failed: list[tuple[str, Exception]] = field(default_factory=list)
    """Schedules whose definition is wrong, or whose function has failed; they stay due."""


class TooSlowError(Exception):
    """A function ``make`` has taken too long for the schedules that are locked meanwhile."""

    def __init__(self, schedule: str, seconds: float) -> None:
        super().__init__(f"make= took {seconds:.0f} seconds; do what takes long in the handler")
        self.schedule = schedule


def fire(
    session: Session, group: ScheduleGroup, *, failing: Collection[str] = (), only: Collection[str] | None = None
) -> Firing:
    """Fire schedules that are due, and commit.

    These are up to :data:`BATCH` of them, fewer if ``make`` takes long or there are many jobs. A schedule whose
    definition or function fails stays due. An error of the database undoes the whole transaction.

    :param failing: the names of schedules to leave out.
    :param only: the names of the schedules to look at.
    :raises TooSlowError: if a function has taken very long. The transaction is lost.
    """
    table = group.tables.schedules
    columns = [*table.c, plan(table).label("plan"), clock().label("now")]
    locked = due(group, columns, failing=failing, only=only).with_for_update(skip_locked=True, key_share=True)
    rows = [in_utc(row) for row in session.execute(locked, bind_arguments=group.bind).mappings()]
    firing = Firing(len(rows), more=len(rows) == BATCH)
    if rows:
        schedules = _decided(group, rows, firing)
        _leave_out_fired(session, group, schedules)
        unfinished = _unfinished(session, group, schedules)
        made = _made(session, group, schedules, unfinished, firing)
        by_queue: dict[QueueSpec, list[_Made]] = {}
        for each in made:
            by_queue.setdefault(each.schedule.spec, []).append(each)
        for spec, some in by_queue.items():
            firing.fired += _enqueue(session, group, spec, some)
        done = [each.schedule for each in made]
        firing.missed += [(each.name, each.due.missed) for each in done if each.due.missed is not None]
        firing.moved += [each.name for each in done]
        _move_on(session, group, done, firing.fired)
    session.commit()
    return firing


def _decided(group: ScheduleGroup, rows: Sequence[Any], firing: Firing) -> list[DueSchedule]:
    classes, decided = group.tables.classes(), []
    for row in rows:
        try:
            decided.append(decide(row, classes[row["queue"], row["model"] or ""]))
        except Exception as error:  # noqa: BLE001 - the definition may have been written by SQL, and the others are right
            firing.failed.append((row["name"], error))
    return decided


class _Made(NamedTuple):
    """A schedule with the jobs of its ticks, and the ticks without a job."""

    schedule: DueSchedule
    jobs: Sequence[tuple[datetime, Any]]
    skipped: Sequence[datetime]


def _made(
    session: Session,
    group: ScheduleGroup,
    schedules: Sequence[DueSchedule],
    unfinished: Collection[str],
    firing: Firing,
) -> list[_Made]:
    """Make the jobs, until the transaction has taken long enough or has many jobs."""
    made: list[_Made] = []
    factories, began, number = group.factories, time.monotonic(), 0
    for each in schedules:
        one_at_a_time = 0 if each.name in unfinished else 1
        count = min(len(each.ticks), one_at_a_time) if each.row["skip_unfinished"] else len(each.ticks)
        jobs: list[tuple[datetime, Any]] = []
        longest, called, failure = 0.0, time.monotonic(), None
        try:
            for tick in each.ticks[:count]:
                called = time.monotonic()
                if number + len(jobs) >= _MOST_JOBS or called - began > _MOST_SECONDS:
                    break
                jobs.append((tick, make_job(each, tick, factories)))
                longest = max(longest, time.monotonic() - called)
        except Exception as error:  # noqa: BLE001 - the function is the program's, and the other schedules are right
            longest, failure = max(longest, time.monotonic() - called), error
        if longest > _TOO_SLOW:
            # The server may have ended the connection meanwhile, so there is nothing to roll back.
            session.invalidate()
            raise TooSlowError(each.name, longest) from failure
        if failure is not None:
            firing.failed.append((each.name, failure))
            continue
        number += len(jobs)
        if len(jobs) < count:
            firing.more = True
            if jobs:
                made.append(_Made(each.until(len(jobs)), jobs, []))
            break
        made.append(_Made(each, jobs, each.ticks[count:]))
    return made


def _leave_out_fired(session: Session, group: ScheduleGroup, schedules: Sequence[DueSchedule]) -> None:
    """Leave out ticks that were fired before: of a schedule that was deleted, or whose next tick was set back."""
    wanted = [(each.name, tick) for each in schedules for tick in each.ticks]
    if not wanted:
        return
    ticks = group.tables.ticks
    names, moments = [name for name, _ in wanted], [tick for _, tick in wanted]
    given = numbered_rows({"schedule": (sa.Text(), names), "tick": (ticks.c.tick.type, moments)}, "number")
    same = sa.and_(ticks.c.schedule == given.c.schedule, ticks.c.tick == given.c.tick)
    rows = sa.select(ticks.c.schedule, ticks.c.tick).select_from(given.join(ticks, same))
    found: Any = session.execute(rows, bind_arguments=group.bind)
    fired = {(name, tick.astimezone(UTC)) for name, tick in found}
    for each in schedules:
        requested = each.row["run_requested_at"]
        if (each.name, requested) in fired and requested in each.ticks:
            each.ticks.append(each.row["now"])
        each.ticks = [tick for tick in each.ticks if (each.name, tick) not in fired]


def _unfinished(session: Session, group: ScheduleGroup, schedules: Sequence[DueSchedule]) -> set[str]:
    """Return those schedules with ``skip_unfinished`` whose last job is unfinished."""
    by_queue: dict[QueueSpec, list[str]] = {}
    for each in schedules:
        if each.row["skip_unfinished"] and each.ticks and each.row["last_job"] is not None:
            by_queue.setdefault(each.spec, []).append(each.name)
    table, found = group.tables.schedules, set[str]()
    for spec, names in by_queue.items():
        same = [column == converted(table.c.last_job[at].astext, column.type) for at, column in enumerate(spec.keys)]
        running = [~spec.finished] if spec.has("status") else []
        jobs = sa.select(table.c.name).join_from(table, spec.table, sa.and_(*same))
        unfinished = jobs.where(table.c.name.in_(names), *running)
        found.update(session.execute(unfinished, bind_arguments=group.bind).scalars())
    return found


def _enqueue(session: Session, group: ScheduleGroup, spec: QueueSpec, made: Sequence[_Made]) -> list[Fired]:
    """Enqueue the jobs of one queue, and write their ticks."""
    wanted = [(each.schedule, tick, job) for each in made for tick, job in each.jobs]
    fired = [_fired(each.schedule, tick) for each in made for tick in each.skipped]
    enqueued = enqueue_in(session, [job for _, _, job in wanted], "skip")
    for (schedule, tick, _), (job, created) in zip(wanted, enqueued, strict=True):
        new = {"job": job, "key": tuple(sa.inspect(job).identity)} if created else {}
        fired.append(_fired(schedule, tick)._replace(**new))
    keys = [each.key for each in fired if each.key is not None]
    messages = spec.strategy.insert_new_messages(spec, keys) if keys else None
    if messages is not None:
        session.execute(messages, bind_arguments=group.bind)
    if fired:
        _write_ticks(session, group, spec, fired)
    return fired


def _fired(schedule: DueSchedule, tick: datetime) -> Fired:
    return Fired(schedule.name, tick, schedule.row["now"] - tick)


def _write_ticks(session: Session, group: ScheduleGroup, spec: QueueSpec, fired: Sequence[Fired]) -> None:
    ticks = group.tables.ticks
    keys = [each.key or (None,) * len(spec.keys) for each in fired]
    columns: dict[str, tuple[Any, Sequence[Any]]] = {
        "schedule": (sa.Text(), [each.schedule for each in fired]),
        "tick": (ticks.c.tick.type, [each.tick for each in fired]),
        **{f"key{place}": (column.type, [key[place] for key in keys]) for place, column in enumerate(spec.keys)},
    }
    given = numbered_rows(columns, "number")
    parts = [given.c[f"key{place}"] for place in range(len(spec.keys))]
    key = sa.case((parts[0].is_not(None), key_json(parts)))
    rows = sa.select(given.c.schedule, given.c.tick, sa.literal(spec.name, sa.Text()), key, clock())
    statement = sa.insert(ticks).from_select(["schedule", "tick", "queue", "key", "fired_at"], rows)
    session.execute(statement, bind_arguments=group.bind)


def _move_on(session: Session, group: ScheduleGroup, schedules: Sequence[DueSchedule], fired: Sequence[Fired]) -> None:
    """Write the next ticks, what they were computed for, and the last job."""
    if not schedules:
        return
    table, ticks = group.tables.schedules, group.tables.ticks
    text, moment = sa.Text(), table.c.next_tick.type
    newest = {each.schedule: each.tick for each in fired if each.key is not None}
    written = {
        "last_tick": (moment, [each.due.last or _last_tick(each.row) for each in schedules]),
        "next_tick": (moment, [each.due.next for each in schedules]),
        "planned_for": (text, [each.row["plan"] for each in schedules]),
        "planned_at": (moment, [each.row["now"] for each in schedules]),
        "rules": (text, [each.rules for each in schedules]),
        "run_requested_at": (moment, [each.left_request for each in schedules]),
    }
    columns = {"name": (text, [each.name for each in schedules]), **written}
    columns["fired"] = (moment, [newest.get(each.name) for each in schedules])
    given = numbered_rows(columns, "number")
    own = (ticks.c.schedule == given.c.name, ticks.c.tick == given.c.fired)
    job = sa.func.coalesce(sa.select(ticks.c.key).where(*own).scalar_subquery(), table.c.last_job)
    values = {name: given.c[name] for name in written} | {"last_job": job, "last_error": None}
    statement = sa.update(table).where(table.c.name == given.c.name).values(values)
    session.execute(statement, bind_arguments=group.bind, execution_options={"synchronize_session": False})
