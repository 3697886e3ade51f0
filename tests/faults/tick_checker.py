"""What must hold of ticks, as rules: what was fired is compared with what the definitions want."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

from sqlaqueue import Schedule
from sqlaqueue.schedules.recurrence import MOST, Recurrence, grace_of
from tests.faults.history import Violations, violations_of
from tests.faults.ticks import EDITS, Clock, TickDatabase, schedules

_SECOND = timedelta(seconds=1)
_UNTOUCHED = ("all", "newest", "some", "alone")


class FiredTick(NamedTuple):
    """A row of ``sqlaqueue_tick``."""

    schedule: str
    tick: datetime
    queue: str
    id: int | None
    """The key of the job."""
    began: datetime
    """The real time at which its transaction began."""
    written: datetime
    transaction: int


class InsertedJob(NamedTuple):
    queue: str
    id: int
    schedule: str
    tick: datetime | None
    """The tick that it names, if it does."""
    unfinished: int | None
    """How many jobs of its schedule were unfinished then, with this one, where one may be."""


class Fired(NamedTuple):
    """The ticks of a schedule that one transaction has fired."""

    ticks: list[datetime]
    began: datetime
    written: datetime


@dataclass
class TickHistory:
    """What was fired, and what was done to the schedules and to the clock."""

    clock: Clock
    ticks: list[FiredTick]
    jobs: list[InsertedJob]
    origins: dict[str, datetime]
    """When the schedules were written; one that was deleted last is missing."""
    requested: set[tuple[str, datetime]] = field(default_factory=set)
    """The runs that were requested, by schedule and moment."""
    pauses: list[tuple[str, datetime, datetime]] = field(default_factory=list)
    """The schedules that were paused, from when until when by the real clock."""

    @cached_property
    def fired(self) -> dict[str, list[Fired]]:
        """What each transaction has fired by itself for a schedule, in the order of their locks on the schedule."""
        found: dict[str, list[Fired]] = {}
        computed = [row for row in self.ticks if (row.schedule, row.tick) not in self.requested]
        rows = sorted(computed, key=lambda row: (row.schedule, row.written))
        for (name, _), group in itertools.groupby(rows, lambda row: (row.schedule, row.transaction)):
            own = list(group)
            ticks = sorted(row.tick for row in own)
            found.setdefault(name, []).append(Fired(ticks, own[0].began, own[-1].written))
        return found

    def origin(self, schedule: Schedule[Any]) -> datetime:
        return self.origins.get(schedule.name, self.clock.began).astimezone(UTC)

    def ticks_of(self, schedule: Schedule[Any]) -> set[datetime]:
        return {tick for each in self.fired.get(schedule.name, ()) for tick in each.ticks}

    def passed_over(self, schedule: Schedule[Any]) -> list[datetime]:
        """Return the ticks of a schedule that nothing has changed, which were missed and not caught up."""
        origin = self.origin(schedule)
        recurrence = Recurrence(schedule.cron, schedule.every, schedule.timezone, origin)
        found = self.ticks_of(schedule)
        return sorted(set(_between(recurrence, origin, max(found, default=origin))) - found)


def read(database: TickDatabase) -> TickHistory:
    columns = "schedule, tick, queue, (key->>0)::bigint, began, written, transaction::text::bigint"
    ticks = database.connection.execute(f"SELECT {columns} FROM sqlaqueue_tick").fetchall()
    jobs = database.connection.execute("SELECT queue, id, schedule, tick, unfinished FROM inserted_job").fetchall()
    return TickHistory(
        database.clock,
        [FiredTick(name, tick.astimezone(UTC), *others) for name, tick, *others in ticks],
        [InsertedJob(*job) for job in jobs],
        dict(database.connection.execute("SELECT name, created_at FROM sqlaqueue_schedule").fetchall()),
        database.requested,
        database.pauses,
    )


def _schedules(*, untouched: bool) -> list[Schedule[Any]]:
    return [each for each in schedules("old") if each.name.startswith(_UNTOUCHED) == untouched]


def each_schedule_is_fired(history: TickHistory) -> Violations:
    for name in sorted({each.name for each in schedules("old")} - {row.schedule for row in history.ticks}):
        yield f"{name!r} was never fired"


def each_tick_is_fired_once(history: TickHistory) -> Violations:
    """No two processes fire one tick, and no two of them one job."""
    for (name, tick), count in Counter((row.schedule, row.tick) for row in history.ticks).items():
        if count > 1:
            yield f"{name!r} was fired {count} times for {tick}"
    for job, count in Counter((row.queue, row.id) for row in history.ticks if row.id is not None).items():
        if count > 1:
            yield f"{count} ticks have the job {job}"


def each_job_is_inserted_once(history: TickHistory) -> Violations:
    """A job is inserted once; one that is deleted and tried again is inserted again, as the same one."""
    jobs = {(job.queue, job.id): (job.schedule, job.tick) for job in history.jobs}
    for queue, key, schedule, tick in {each[:4] for each in history.jobs}:
        if jobs[queue, key] != (schedule, tick):
            yield f"the job {key} of {queue!r} was inserted for {schedule!r} at {tick} and for {jobs[queue, key]}"
    for (queue, key), count in Counter((job.queue, job.id) for job in history.jobs if job.queue != "deleted").items():
        if count > 1:
            yield f"the job {key} of {queue!r} was inserted {count} times"


def each_tick_has_its_job(history: TickHistory) -> Violations:
    """Each tick with a key has one job, and each job one tick; the job is that of its tick."""
    ticks = {(row.queue, row.id): row for row in history.ticks if row.id is not None}
    for row in history.ticks:
        # Its last job was unfinished, or a duplicate of its job.
        if row.id is None and not row.schedule.startswith("alone") and row.queue != "single":
            yield f"no job was made for {row}"
    jobs = {(job.queue, job.id): (job.schedule, job.tick) for job in history.jobs}
    for missing in jobs.keys() - ticks.keys():
        yield f"the job {missing} of {jobs[missing]} has no tick"
    for missing in ticks.keys() - jobs.keys():
        yield f"{ticks[missing]} has no job"
    for job in jobs.keys() & ticks.keys():
        schedule, tick = jobs[job]
        if schedule != ticks[job].schedule or tick not in {None, ticks[job].tick}:
            yield f"the job {job} of {jobs[job]} has the tick {ticks[job]}"


def one_job_is_alone(history: TickHistory) -> Violations:
    """Where a schedule may have one unfinished job, it has no other."""
    for job in history.jobs:
        if (job.unfinished or 0) > 1:
            yield f"{job} was enqueued beside an unfinished one"


def no_tick_is_fired_early(history: TickHistory) -> Violations:
    for row in history.ticks:
        if row.tick > history.clock.latest(row.began, row.written):
            yield f"fired too early: {row}"


def ticks_are_fired_in_order(history: TickHistory) -> Violations:
    """No tick is fired after a later one, although the clock went back."""
    for name, fired in history.fired.items():
        if not name.startswith("moved"):
            for before, after in itertools.pairwise(fired):
                if before.ticks[-1] >= after.ticks[0]:
                    yield f"{name!r} went back: {before.ticks[-1]}, then {after.ticks[0]}"


def ticks_are_those_of_the_definition(history: TickHistory) -> Violations:
    """Only ticks of a definition are fired."""
    for schedule in schedules("old"):
        name, origin, found = schedule.name, history.origin(schedule), history.ticks_of(schedule)
        crons = [*EDITS] if name.startswith(("edited", "version")) else [schedule.cron]
        recurrences = [Recurrence(cron, schedule.every, schedule.timezone, origin) for cron in crons]
        # A schedule that was deleted and written anew may tick before its origin, but on the same full seconds.
        first = origin if name.startswith(_UNTOUCHED) else min(found, default=origin) - _SECOND
        wanted = {tick for each in recurrences for tick in _between(each, first, max(found, default=origin))}
        if not found <= wanted:
            yield f"{name!r} was fired for {_few(found - wanted)}"


def as_much_as_possible_is_caught_up(history: TickHistory) -> Violations:
    """What is missing was missed, and as much as possible was caught up."""
    for schedule in _schedules(untouched=True):
        fired, found = history.fired.get(schedule.name, []), history.ticks_of(schedule)
        if schedule.skip_unfinished:
            # The newest tick of those that are due; there may be no job even for it.
            if any(len(each.ticks) > 1 for each in fired):
                yield f"{schedule.name!r} was fired for several ticks at once"
            continue
        for tick in history.passed_over(schedule):
            firing = next(each for each in fired if each.ticks[-1] >= tick)
            clock = history.clock.latest(history.clock.began, firing.written)
            caught_up = _decided(history, firing, found)
            was_missed = tick < firing.ticks[0] and (
                tick < clock - grace_of(schedule.misfire_grace) or caught_up >= MOST
            )
            if not was_missed or caught_up < schedule.catch_up:
                yield f"{schedule.name!r} was not fired for {tick}, but for {caught_up} from {firing.ticks[0]} on"


def _decided(history: TickHistory, firing: Fired, found: Iterable[datetime]) -> int:
    """Return of how many ticks a transaction has decided that they are fired.

    It fires them itself, up to a number of jobs and a time; those that are left are fired by later transactions, with
    what has become due by then.
    """
    earliest = history.clock.earliest(firing.began, firing.written)
    return len({tick for tick in found if firing.ticks[0] <= tick <= earliest}.union(firing.ticks))


def nothing_is_fired_while_it_is_paused(history: TickHistory) -> Violations:
    for name, since, until in history.pauses:
        beside = [each.ticks for each in history.fired.get(name, ()) if since < each.began and each.written < until]
        if beside:
            yield f"{name!r} was fired while it was paused, for {_few(beside)}"


RULES = (
    each_schedule_is_fired,
    each_tick_is_fired_once,
    each_job_is_inserted_once,
    each_tick_has_its_job,
    one_job_is_alone,
    no_tick_is_fired_early,
    ticks_are_fired_in_order,
    ticks_are_those_of_the_definition,
    as_much_as_possible_is_caught_up,
    nothing_is_fired_while_it_is_paused,
)


def violations(history: TickHistory) -> dict[str, list[str]]:
    """Return the violations of each rule by its name; empty if all hold."""
    return violations_of(RULES, history)


class Figures(NamedTuple):
    ticks: int
    jobs: int
    largest: int
    """The most ticks of a schedule in one transaction."""
    passed_over: int
    """The missed ticks that were not caught up."""


def figures_of(history: TickHistory) -> Figures:
    """Return how much a history has to check."""
    return Figures(
        len(history.ticks),
        len({(job.queue, job.id) for job in history.jobs}),
        max(len(each.ticks) for fired in history.fired.values() for each in fired),
        sum(len(history.passed_over(each)) for each in _schedules(untouched=True)),
    )


def _between(recurrence: Recurrence, after: datetime, until: datetime) -> Iterator[datetime]:
    tick = recurrence.after(after)
    assert tick is not None
    yield from recurrence.newest(tick, until, tick, 1, 10**9)


def _few(found: Iterable[Any]) -> list[str]:
    return [str(each) for each in itertools.islice(found, 5)]
