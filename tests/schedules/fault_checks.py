"""The checks of the fault test: what was fired is compared with what the definitions want."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlaqueue import Schedule
from sqlaqueue.schedules.recurrence import MOST, Recurrence
from tests.schedules.fault_database import FaultDatabase
from tests.schedules.fault_process import EDITS, schedules

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


class Fired(NamedTuple):
    """The ticks of a schedule that one transaction has fired."""

    ticks: list[datetime]
    began: datetime
    written: datetime


class Figures(NamedTuple):
    """What was checked."""

    ticks: int
    jobs: int
    largest: int
    """The most ticks of a schedule in one transaction."""
    passed_over: int
    """The missed ticks that were not caught up."""


def check(database: FaultDatabase) -> Figures:
    """Check everything, and return the figures."""
    rows = _ticks(database)
    jobs = _check_jobs(database, rows)
    largest = passed_over = 0
    origins = dict(database.connection.execute("SELECT name, created_at FROM sqlaqueue_schedule").fetchall())
    rows.sort(key=lambda row: (row.schedule, row.written))
    groups = {name: list(group) for name, group in itertools.groupby(rows, lambda row: row.schedule)}
    for schedule in schedules("old"):
        own = groups[schedule.name]
        _check_times(database, own)
        computed = [row for row in own if (row.schedule, row.tick) not in database.requested]
        fired = _by_transaction(computed)
        largest = max(largest, *(len(each.ticks) for each in fired))
        # One that was deleted last has no row.
        origin = origins.get(schedule.name, database.settings[0].since).astimezone(UTC)
        if schedule.name.startswith(_UNTOUCHED):
            _check_order(schedule.name, fired)
            passed_over += _check_untouched(database, schedule, origin, fired)
        else:
            _check_touched(database, schedule, origin, fired)
    return Figures(len(rows), jobs, largest, passed_over)


def _ticks(database: FaultDatabase) -> list[FiredTick]:
    columns = "schedule, tick, queue, (key->>0)::bigint, began, written, transaction::text::bigint"
    found = database.connection.execute(f"SELECT {columns} FROM sqlaqueue_tick").fetchall()
    rows = [FiredTick(name, tick.astimezone(UTC), *others) for name, tick, *others in found]
    twice = {key: count for key, count in Counter((row.schedule, row.tick) for row in rows).items() if count > 1}
    assert not twice, f"{len(twice)} ticks were fired more than once: {_few(twice)}"
    return rows


def _check_jobs(database: FaultDatabase, rows: Iterable[FiredTick]) -> int:
    """Each tick with a key has one job, and each job one tick; the job is that of its tick."""
    # A job that is deleted and tried again is inserted again, as the same one.
    found = database.connection.execute("SELECT DISTINCT queue, id, schedule, tick FROM inserted_job").fetchall()
    jobs = {(queue, key): (name, tick) for queue, key, name, tick in found}
    assert len(jobs) == len(found)
    again = "SELECT count(*) - count(DISTINCT id) FROM inserted_job WHERE queue <> 'deleted'"
    assert database.number(f"{again} GROUP BY queue ORDER BY 1 DESC LIMIT 1") == 0
    ticks: dict[tuple[str, int], FiredTick] = {}
    for row in rows:
        if row.id is None:
            # Its last job was unfinished, or a twin of its job.
            assert row.schedule.startswith("alone") or row.queue == "single", row
        else:
            assert (row.queue, row.id) not in ticks, f"two ticks have one job: {row}"
            ticks[row.queue, row.id] = row
    without_tick, without_job = jobs.keys() - ticks.keys(), ticks.keys() - jobs.keys()
    assert not without_tick, f"{len(without_tick)} jobs have no tick: {_few(jobs[key] for key in without_tick)}"
    assert not without_job, f"{len(without_job)} ticks have no job: {_few(ticks[key] for key in without_job)}"
    for key, (name, tick) in jobs.items():
        assert name == ticks[key].schedule
        assert tick in {None, ticks[key].tick}
    query = "SELECT schedule, max(unfinished) FROM inserted_job WHERE unfinished > 1 GROUP BY schedule"
    beside = database.connection.execute(query).fetchall()
    assert not beside, f"jobs were enqueued beside unfinished ones: {beside}"
    return len(jobs)


def _check_times(database: FaultDatabase, rows: Iterable[FiredTick]) -> None:
    """No tick is fired before the clock has reached it."""
    for row in rows:
        assert row.tick <= database.latest(row.began, row.written), f"fired too early: {row}"


def _by_transaction(rows: list[FiredTick]) -> list[Fired]:
    """Return what each transaction has fired, in the order of their locks on the schedule."""
    found = []
    for _, group in itertools.groupby(rows, lambda row: row.transaction):
        own = list(group)
        found.append(Fired(sorted(row.tick for row in own), own[0].began, own[-1].written))
    return found


def _check_order(name: str, fired: list[Fired]) -> None:
    """No tick is fired after a later one, although the clock went back."""
    for before, after in itertools.pairwise(fired):
        assert before.ticks[-1] < after.ticks[0], f"{name!r} went back: {before.ticks[-1]}, then {after.ticks[0]}"


def _check_untouched(database: FaultDatabase, schedule: Schedule[Any], origin: datetime, fired: list[Fired]) -> int:
    """The ticks are those of the definition; what is missing was missed, and as much as possible was caught up.

    :return: how many are missing.
    """
    recurrence = Recurrence(schedule.cron, schedule.every, schedule.timezone, origin)
    wanted = set(_between(recurrence, origin, fired[-1].ticks[-1]))
    found = {tick for each in fired for tick in each.ticks}
    assert found <= wanted, f"{schedule.name!r} was fired for {_few(found - wanted)}"
    left_out = sorted(wanted - found)
    if schedule.skip_unfinished:
        # The newest tick of those that are due; there may be no job even for it.
        assert all(len(each.ticks) == 1 for each in fired)
        return len(left_out)
    later = iter(fired)
    firing = next(later)
    for tick in left_out:
        while firing.ticks[-1] < tick:
            firing = next(later)
        clock = database.latest(database.settings[0].since, firing.written)
        caught_up = _decided(database, firing, found)
        missed = f"{schedule.name!r} was not fired for {tick}, but for {caught_up} ticks from {firing.ticks[0]} on"
        assert tick < firing.ticks[0], missed
        assert caught_up >= schedule.catch_up, missed
        assert tick < clock - schedule.grace or caught_up >= MOST, missed
    return len(left_out)


def _decided(database: FaultDatabase, firing: Fired, found: Iterable[datetime]) -> int:
    """Return of how many ticks a transaction has decided that they are fired.

    It fires them itself, up to a number of jobs and a time; those that are left are fired by later transactions, with
    what has become due by then.
    """
    due = {tick for tick in found if firing.ticks[0] <= tick <= database.earliest(firing.began, firing.written)}
    return len(due.union(firing.ticks))


def _check_touched(database: FaultDatabase, schedule: Schedule[Any], origin: datetime, fired: list[Fired]) -> None:
    name, crons = schedule.name, [schedule.cron]
    if name.startswith(("edited", "version")):
        crons = [*EDITS]
    # A schedule that was deleted and written anew may tick before its origin, but on the same full seconds.
    recurrences = [Recurrence(cron, schedule.every, schedule.timezone, origin) for cron in crons]
    found = {tick for each in fired for tick in each.ticks}
    first, last = min(found, default=origin) - _SECOND, max(found, default=origin)
    wanted = {tick for each in recurrences for tick in _between(each, first, last)}
    assert found <= wanted, f"{name!r} was fired for {_few(found - wanted)}"
    if not name.startswith("moved"):
        _check_order(name, fired)
    for paused, since, until in database.pauses:
        if paused == name:
            beside = [each.ticks for each in fired if since < each.began and each.written < until]
            assert not beside, f"{name!r} was fired while it was paused, for {_few(beside)}"


def _between(recurrence: Recurrence, after: datetime, until: datetime) -> Iterable[datetime]:
    tick = recurrence.after(after)
    assert tick is not None
    return recurrence.newest(tick, until, tick, 1, 10**9)


def _few(found: Iterable[Any]) -> list[str]:
    return [str(each) for each in itertools.islice(found, 5)]
