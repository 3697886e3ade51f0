"""Each tick is fired exactly once, whatever happens to processes, connections, definitions and the clock."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.programs import FORKS
from tests.schedules.fault_checks import check
from tests.schedules.fault_database import FaultDatabase
from tests.schedules.fault_process import PROGRAMS, run

if TYPE_CHECKING:
    from tests.servers import Database

pytestmark = pytest.mark.once

DEADLINE = 60
"""Seconds until a test fails that waits in vain."""


@dataclass
class Processes:
    """The processes that fire, and what was done to them."""

    urls: dict[str, str]
    directory: Path
    rng: random.Random
    running: dict[str, tuple[str, BaseProcess]] = field(default_factory=dict)
    """The roles and processes by the names of their connections."""
    faults: Counter[str] = field(default_factory=Counter)
    started: int = 0

    def start(self, role: str) -> None:
        """Start a process, of a random version of the program."""
        name = f"{role}-{self.started}"
        self.started += 1
        (self.directory / name).touch()
        arguments = (role, self.urls[role], self.rng.random(), name, self.rng.choice(PROGRAMS), self.directory / name)
        process = FORKS.Process(target=run, args=arguments)
        process.start()
        self.running[name] = (role, process)

    def check(self) -> None:
        """None has ended by itself."""
        for name, (_, process) in self.running.items():
            assert process.is_alive(), f"{name} has ended:\n{(self.directory / name).read_text()}"

    def kill(self, name: str) -> None:
        """Kill a process, and start another one in its place."""
        role, process = self.running.pop(name)
        process.kill()
        process.join()
        self.faults["kills"] += 1
        self.start(role)

    def freeze(self, name: str) -> None:
        """Stop a process for a second."""
        _, process = self.running[name]
        os.kill(process.pid or 0, signal.SIGSTOP)
        time.sleep(1)
        os.kill(process.pid or 0, signal.SIGCONT)
        self.faults["freezes"] += 1

    def end(self) -> None:
        """Kill all."""
        for _, process in self.running.values():
            process.kill()
            process.join()


@dataclass
class Ordeal:
    """The faults of one test."""

    database: FaultDatabase
    processes: Processes
    rng: random.Random

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, while no process may end."""
        until = time.monotonic() + DEADLINE
        while not condition():
            self.processes.check()
            assert time.monotonic() < until, f"in vain: {what}\n{self.report()}"
            time.sleep(0.02)

    def report(self) -> str:
        """Return what the schedules and processes say about themselves."""
        query = "SELECT name, next_tick, last_error FROM sqlaqueue_schedule WHERE paused_at IS NULL ORDER BY 2 LIMIT 9"
        rows = self.database.connection.execute(query).fetchall()
        for table, state in (("kept", "finished_at IS NULL"), ("single", "finished_at IS NULL"), ("deleted", "true")):
            query = f"SELECT statement_timestamp(), to_jsonb({table}) FROM {table} WHERE {state} LIMIT 3"
            rows += self.database.connection.execute(query).fetchall()
        for _, process in self.processes.running.values():
            os.kill(process.pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        texts = [(self.processes.directory / name).read_text()[-5000:] for name in self.processes.running]
        return "\n".join([f"{self.processes.faults}", *map(str, rows), *texts])

    def round(self, fault: str, forward: float, back: float) -> None:
        """Let time pass, with a fault while processes fire what is due; then let the clock go back, and on again."""
        fired = self.database.ticks()
        for _ in range(3):
            self.database.administrate()
        self.move_clock(forward)
        self.strike(fault)
        self.database.administrate()
        if back:
            # So that ticks of the new definitions are in the past, while the clock has not reached them again.
            self.wait(lambda: self.database.behind() == 0, "due schedules")
            self.move_clock(-back)
            self.database.administrate_all()
            self.wait(lambda: self.database.behind() == 0, "edited schedules")
            self.move_clock(back)
        self.wait(lambda: self.database.ticks() >= fired + 30, "ticks")

    def move_clock(self, seconds: float) -> None:
        self.database.move_clock(seconds)
        self.processes.faults["clock changes"] += 1

    def strike(self, fault: str) -> None:
        """Kill or freeze a process that is firing, or end its backend."""
        # The backend of a process that was killed may still be at work.
        found = self.database.firing_backend(list(self.processes.running))
        name = self.rng.choice(list(self.processes.running)) if found is None else found[0]
        time.sleep(self.rng.random() * 0.1)
        self.processes.faults["while firing"] += found is not None
        match fault:
            case "kill":
                self.processes.kill(name)
            case "freeze":
                self.processes.freeze(name)
            case "terminate" if found is not None:
                self.database.number("SELECT count(pg_terminate_backend(%s))", found[1])
                self.processes.faults["ended backends"] += 1
            case _:
                query = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name <> ''"
                self.processes.faults["ended backends"] += self.database.number(query)

    def finish(self) -> None:
        """Let everything be fired and run that is left."""
        self.database.resume_all()
        self.wait(lambda: self.database.overdue() == 0, "schedules are overdue")
        failed = self.database.connection.execute("SELECT name, last_error FROM sqlaqueue_schedule").fetchall()
        assert not [row for row in failed if row[1] is not None], failed
        self.database.pause_all()
        # A consumer that looked for the jobs of killed ones while the clock was set back may not look again, but each
        # looks when it starts.
        self.processes.start("consumer")
        self.wait(lambda: self.database.unfinished() == 0, "jobs are unfinished")
        self.processes.check()
        self.processes.end()


@contextlib.contextmanager
def ordeal(database: Database, directory: Path, seed: int, roles: list[str]) -> Iterator[Ordeal]:
    rng = random.Random(seed)
    urls = {role: database.url("asyncpg" if role == "async_scheduler" else "psycopg") for role in roles}
    processes = Processes(urls, directory, rng)
    with database.connect() as connection:
        found = Ordeal(FaultDatabase.create(database, connection, rng), processes, rng)
        try:
            for role in roles:
                processes.start(role)
            found.wait(lambda: found.database.ticks() > 0, "the first tick")
            yield found
        finally:
            processes.end()


def seed_of(config: pytest.Config) -> int:
    return config.getoption("--seed") or time.time_ns()


def check_logs(processes: Processes) -> None:
    """Every schedule could be fired: an ended connection is no reason to give up one of them."""
    for file in processes.directory.iterdir():
        text = file.read_text()
        assert "cannot be fired" not in text, text


def test_each_tick_is_fired_exactly_once(database: Database, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    with ordeal(database, tmp_path, seed_of(pytestconfig), ["scheduler", "async_scheduler", "consumer"]) as test:
        for fault, back in (("kill", 7), ("freeze", 0), ("kill", 0), ("terminate", 7)):
            test.round(fault, test.rng.uniform(5, 30), back)
        test.finish()
        figures = check(test.database)
    check_logs(test.processes)
    assert figures.ticks > 300


@pytest.mark.thorough
def test_ten_thousand_ticks(
    database: Database, tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = ["scheduler", "scheduler", "async_scheduler", "consumer", "consumer"]
    began = time.monotonic()
    with ordeal(database, tmp_path, seed_of(pytestconfig), roles) as test:
        for number in range(30):
            fault = "kill" if number % 3 else test.rng.choice(["freeze", "terminate", "terminate all"])
            test.round(fault, test.rng.uniform(1, 60), test.rng.choice([0, 0, test.rng.uniform(1, 20)]))
        # More than are fired at once.
        test.round("kill", 1100, 0)
        test.finish()
        figures, faults = check(test.database), test.processes.faults
    check_logs(test.processes)
    with capsys.disabled():
        sys.stdout.write(f"{figures} {dict(faults)} {time.monotonic() - began:.0f} s\n")
    assert figures.ticks >= 10_000
    assert figures.largest == 1000
    assert figures.passed_over > 0
    assert faults["kills"] >= 20
    assert faults["while firing"] >= 10
    assert faults["clock changes"] >= 10
