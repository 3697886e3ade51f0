"""Each tick is fired exactly once, whatever happens to processes, connections, definitions and the clock."""

import contextlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from sqlaqueue.schedules.recurrence import Recurrence
from tests.faults.processes import Process, Processes, Role
from tests.faults.tick_checker import RULES, Figures, FiredTick, InsertedJob, TickHistory, figures_of, read, violations
from tests.faults.ticks import PROGRAMS, Clock, Setting, TickDatabase, consume, schedule, schedule_async, schedules
from tests.servers import Database

pytestmark = pytest.mark.once


class Ordeal(Processes):
    """The processes that fire the schedules of a database, and what is done to both."""

    def __init__(self, database: Database, firing: TickDatabase, directory: Path, rng: random.Random) -> None:
        super().__init__(directory, rng)
        self.database, self._url = firing, database.url
        self._alive: list[Process] = []

    def play(self, role: Role) -> None:
        """Start a process, of a random version of the program."""
        url = self._url("asyncpg" if role is schedule_async else "psycopg")
        self._alive.append(self.start(role, role.__name__, url=url, program=self.rng.choice(PROGRAMS)))

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, while no process may end."""
        self.wait_until(lambda: self._all_run() and condition(), lambda: f"{what}\n{self._report()}")

    def _all_run(self) -> bool:
        for one in self._alive:
            assert not one.has_exited, f"{one.name} has ended:\n{one.output}"
        return True

    def _report(self) -> str:
        """Return what the schedules and jobs say about themselves."""
        query = "SELECT name, next_tick, last_error FROM sqlaqueue_schedule WHERE paused_at IS NULL ORDER BY 2 LIMIT 9"
        rows = self.database.connection.execute(query).fetchall()
        for table, state in (("kept", "finished_at IS NULL"), ("single", "finished_at IS NULL"), ("deleted", "true")):
            query = f"SELECT statement_timestamp(), to_jsonb({table}) FROM {table} WHERE {state} LIMIT 3"
            rows += self.database.connection.execute(query).fetchall()
        return "\n".join(map(str, rows))

    def faults(self) -> Counter[str]:
        return Counter(record.details["kind"] for record in self.records() if record.event == "fault")

    def round(self, fault: str, forward: float, back: float) -> None:
        """Let time pass, with a fault while processes fire what is due; then let the clock go back, and on again."""
        fired = self.database.ticks()
        for _ in range(3):
            self.database.administrate()
        self._move_clock(forward)
        self._strike(fault)
        self.database.administrate()
        if back:
            # So that ticks of the new definitions are in the past, while the clock has not reached them again.
            self.wait(lambda: self.database.behind() == 0, "due schedules")
            self._move_clock(-back)
            self.database.administrate_all()
            self.wait(lambda: self.database.behind() == 0, "edited schedules")
            self._move_clock(back)
        self.wait(lambda: self.database.ticks() >= fired + 30, "ticks")

    def _move_clock(self, seconds: float) -> None:
        self.database.move_clock(seconds)
        self.record_fault("clock change", seconds=seconds)

    def _strike(self, fault: str) -> None:
        """Kill or freeze a process that is firing, or end its backend."""
        # The backend of a process that was killed may still be at work.
        found = self.database.firing_backend([one.name for one in self._alive])
        name = self.rng.choice(self._alive).name if found is None else found[0]
        process = next(one for one in self._alive if one.name == name)
        time.sleep(self.rng.random() * 0.1)
        if found is not None:
            self.record_fault("while firing", to=name)
        match fault:
            case "kill":
                process.kill()
                self._alive.remove(process)
                self.play(process.role)
            case "freeze":
                process.send_signal(signal.SIGSTOP)
                time.sleep(1)
                process.send_signal(signal.SIGCONT)
            case "terminate" if found is not None:
                self.database.number("SELECT count(pg_terminate_backend(%s))", found[1])
                self.record_fault("terminated connection", pid=found[1])
            case _:
                query = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name <> ''"
                self.record_fault("terminated connections", number=self.database.number(query))

    def finish(self) -> TickHistory:
        """Let everything be fired and run that is left, and return the history."""
        self.database.resume_all()
        self.wait(lambda: self.database.overdue() == 0, "no schedule is overdue")
        failed = self.database.connection.execute("SELECT name, last_error FROM sqlaqueue_schedule").fetchall()
        assert not [row for row in failed if row[1] is not None], failed
        self.database.pause_all()
        # A consumer that looked for the jobs of killed ones while the clock was set back may not look again, but each
        # looks when it starts.
        self.play(consume)
        self.wait(lambda: self.database.unfinished() == 0, "all jobs are finished")
        for one in self._alive:
            one.clear()
        for one in self.processes:
            # An ended connection is no reason to give up a schedule.
            assert "cannot be fired" not in one.output, one.output
        return read(self.database)


@contextlib.contextmanager
def ordeal(database: Database, directory: Path, rng: random.Random, roles: list[Role]) -> Iterator[Ordeal]:
    with (
        database.connect() as connection,
        Ordeal(database, TickDatabase.create(database, connection, rng), directory, rng) as test,
    ):
        for role in roles:
            test.play(role)
        test.wait(lambda: test.database.ticks() > 0, "the first tick")
        yield test


def test_each_tick_is_fired_exactly_once(database: Database, tmp_path: Path, rng: random.Random) -> None:
    with ordeal(database, tmp_path, rng, [schedule, schedule_async, consume]) as test:
        for fault, back in (("kill", 7), ("freeze", 0), ("kill", 0), ("terminate", 7)):
            test.round(fault, rng.uniform(5, 30), back)
        history = test.finish()
        assert violations(history) == {}
    assert figures_of(history).ticks > 300


@pytest.mark.thorough
def test_ten_thousand_ticks(
    database: Database, tmp_path: Path, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with ordeal(database, tmp_path, rng, [schedule, schedule, schedule_async, consume, consume]) as test:
        for number in range(30):
            fault = "kill" if number % 3 else rng.choice(["freeze", "terminate", "terminate all"])
            test.round(fault, rng.uniform(1, 60), rng.choice([0, 0, rng.uniform(1, 20)]))
        # More than are fired at once.
        test.round("kill", 1100, 0)
        history, faults = test.finish(), test.faults()
        assert violations(history) == {}
    figures = figures_of(history)
    with capsys.disabled():
        sys.stdout.write(f"{figures} {dict(faults)} {time.monotonic() - began:.0f} s\n")
    assert figures.ticks >= 10_000
    assert figures.largest == 1000
    assert figures.passed_over > 0
    assert faults["SIGKILL"] >= 20
    assert faults["while firing"] >= 10
    assert faults["clock change"] >= 10


# -- the checker -------------------------------------------------------------------------------------------------------

START = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def valid_history() -> TickHistory:
    """Return a history of twelve seconds, in which each tick is fired by itself, a moment after it is due."""
    ticks, jobs = [], []
    for each in schedules("old"):
        last, end = START - SECOND, START + 12 * SECOND
        recurrence = Recurrence(each.cron, each.every, each.timezone, START)
        while (last := recurrence.after(last)) and last <= end:
            if last > START:
                key, queue, at = len(ticks), each.model.__tablename__, last + SECOND / 10
                ticks.append(FiredTick(each.name, last, queue, key, at, at, key))
                jobs.append(InsertedJob(queue, key, each.name, last, None))
    return TickHistory(Clock([Setting(timedelta(), START)]), ticks, jobs, {})


def at(history: TickHistory, name: str, number: int = 3) -> int:
    """Return where the tick with a number is among those of all schedules."""
    return [place for place, row in enumerate(history.ticks) if row.schedule == name][number]


def miss_a_tick(history: TickHistory) -> None:
    place = at(history, "all every 1 kept")
    del history.ticks[place], history.jobs[place]


def miss_a_schedule(history: TickHistory) -> None:
    for rows in (history.ticks, history.jobs):
        rows[:] = [row for row in rows if row.schedule != "paused kept"]


def fire_twice(history: TickHistory) -> None:
    row, job = history.ticks[at(history, "all every 1 kept")], history.jobs[at(history, "all every 1 kept")]
    history.ticks.append(row._replace(id=9999))
    history.jobs.append(job._replace(id=9999))


def lose_a_job(history: TickHistory) -> None:
    del history.jobs[5]


def add_a_job(history: TickHistory) -> None:
    history.jobs.append(history.jobs[5]._replace(id=9999))


def give_a_job_the_tick_of_another(history: TickHistory) -> None:
    history.jobs[5] = history.jobs[5]._replace(tick=START)


def insert_a_job_twice(history: TickHistory) -> None:
    history.jobs.append(history.jobs[at(history, "all every 1 kept")])


def make_no_job(history: TickHistory) -> None:
    place = at(history, "all every 1 kept")
    history.ticks[place] = history.ticks[place]._replace(id=None)
    del history.jobs[place]


def run_two_jobs_at_once(history: TickHistory) -> None:
    history.jobs[5] = history.jobs[5]._replace(unfinished=2)


def fire_early(history: TickHistory) -> None:
    place = at(history, "all every 1 kept")
    history.ticks[place] = history.ticks[place]._replace(
        began=START + SECOND / 100, written=history.ticks[place].tick - SECOND / 10
    )


def go_back(history: TickHistory) -> None:
    for place in (at(history, "all every 1 kept", 3), at(history, "all every 1 kept", 4)):
        row = history.ticks[place]
        later = row.written + (2 * SECOND if place == at(history, "all every 1 kept", 3) else timedelta())
        history.ticks[place] = row._replace(written=later)


def fire_beside_the_definition(history: TickHistory) -> None:
    place = at(history, "all every 1 kept")
    half = history.ticks[place].tick - SECOND / 2
    history.ticks.append(history.ticks[place]._replace(tick=half, id=9999))
    history.jobs.append(history.jobs[place]._replace(tick=half, id=9999))


def fire_while_it_is_paused(history: TickHistory) -> None:
    history.pauses.append(("paused kept", START + 2 * SECOND, START + 5 * SECOND))


VIOLATIONS: list[tuple[Callable[[TickHistory], None], set[str]]] = [
    (miss_a_tick, {"as_much_as_possible_is_caught_up"}),
    (miss_a_schedule, {"each_schedule_is_fired"}),
    (fire_twice, {"each_tick_is_fired_once"}),
    (lose_a_job, {"each_tick_has_its_job"}),
    (add_a_job, {"each_tick_has_its_job"}),
    (give_a_job_the_tick_of_another, {"each_tick_has_its_job"}),
    (insert_a_job_twice, {"each_job_is_inserted_once"}),
    (make_no_job, {"each_tick_has_its_job"}),
    (run_two_jobs_at_once, {"one_job_is_alone"}),
    (fire_early, {"no_tick_is_fired_early"}),
    (go_back, {"ticks_are_fired_in_order"}),
    (fire_beside_the_definition, {"ticks_are_those_of_the_definition"}),
    (fire_while_it_is_paused, {"nothing_is_fired_while_it_is_paused"}),
]
"""How the valid history is changed, and the rules that this violates."""


def test_a_valid_history_has_no_violations() -> None:
    history = valid_history()
    assert violations(history) == {}
    assert figures_of(history) == Figures(len(history.ticks), len(history.ticks), 1, 0)


@pytest.mark.parametrize(("violate", "expected"), VIOLATIONS, ids=[violate.__name__ for violate, _ in VIOLATIONS])
def test_each_violation_is_reported(violate: Callable[[TickHistory], None], expected: set[str]) -> None:
    history = valid_history()
    violate(history)
    assert violations(history).keys() == expected


def test_every_rule_is_violated_by_some_history() -> None:
    assert {rule for _, rules in VIOLATIONS for rule in rules} == {rule.__name__ for rule in RULES}
