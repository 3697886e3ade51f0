"""Random histories with processes that are killed: no two twins count, and no job is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, admin
from sqlaqueue.strategies.unique_key import twin_in
from tests.unique.models import create, make_job
from tests.unique.random_process import CONFIGURATIONS

if TYPE_CHECKING:
    from tests.servers import Database

USUAL = ("waiting",)


class Processes:
    """The processes of a test."""

    def __init__(self, url: str, name: str, directory: Path, rng: random.Random) -> None:
        self.url, self.name, self.directory, self.rng = url, name, directory, rng
        self.running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, role: str) -> None:
        number = len(list(self.directory.iterdir()))
        command = [sys.executable, "-m", "tests.unique.random_process", role, self.url, self.name]
        arguments = [str(self.rng.randrange(10**6)), str(self.directory / f"{number}.{role}")]
        (self.directory / f"{number}.{role}").touch()
        with (self.directory / f"{number}.{role}.out").open("wb") as output:
            process = subprocess.Popen([*command, *arguments], stdout=output, stderr=output)
        self.running.append((role, process))

    def kill_one(self) -> None:
        """Kill a process, and start another one in its place."""
        role, process = self.running.pop(self.rng.randrange(len(self.running)))
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.start(role)

    def replace_dead(self) -> None:
        for role, process in list(self.running):
            if process.poll() is not None:
                assert role == "worker", f"the {role} has failed, see {self.directory}"
                self.running.remove((role, process))
                self.start(role)

    def kill_all(self) -> None:
        for _, process in self.running:
            process.kill()
            process.wait()

    def enqueued(self) -> set[int]:
        """Return the keys of jobs whose insertion was about to be committed."""
        files = [*self.directory.glob("*.producer"), *self.directory.glob("*.worker")]
        return {int(key) for file in files for line in file.read_text().splitlines() for key in line.split()}


@pytest.mark.once
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.thorough) for name in CONFIGURATIONS]
)
def test_no_two_twins_count_and_no_job_is_lost(
    shared: Database, engine: sa.Engine, tmp_path: Path, name: str, pytestconfig: pytest.Config
) -> None:
    kind, unique = CONFIGURATIONS[name]
    job = make_job(kind, unique, max_attempts=4, lease=1)
    create(engine, job)
    rng = random.Random(pytestconfig.getoption("--seed") or time.time_ns())
    processes = Processes(shared.url(), name, tmp_path, rng)
    observed = 0
    try:
        for role in ("producer", "producer", "administrator", "worker", "worker"):
            processes.start(role)
        for _ in range(3):
            # A process may take seconds to begin, so that its work is counted, not the time.
            before, until = len(processes.enqueued()), time.monotonic() + 60
            while len(processes.enqueued()) < before + 25:
                assert time.monotonic() < until, "nothing is enqueued"
                observed += len(check_twins(engine, job, unique.states))
                time.sleep(0.02)
                processes.replace_dead()
            processes.kill_one()
    finally:
        processes.kill_all()
    assert observed > 20
    drain(engine, job)
    check_nothing_is_lost(engine, job, processes.enqueued())


def check_twins(engine: sa.Engine, job: Any, states: tuple[str, ...]) -> dict[str, int]:
    """Return the number of jobs that count by key, which must be one each."""
    table = job.__table__
    counts = sa.true() if "status" not in table.c else table.c.status.in_(states)
    with engine.connect() as connection:
        rows = connection.execute(sa.select(table.c.key, sa.func.count()).where(counts).group_by(table.c.key)).all()
    numbers = {row[0]: row[1] for row in rows}
    assert set(numbers.values()) <= {1}, numbers
    return numbers


def drain(engine: sa.Engine, job: Any) -> None:
    """Run what is left, also the jobs of killed workers."""
    consumer = Consumer(job, lambda session, each: None, sessionmaker(engine), poll_interval=0.1)
    with consumer, Session(engine) as session:
        until = time.monotonic() + 30
        active = admin.JobFilter(states=("pending", "processing"))
        while admin.count(session, job, active):
            session.rollback()
            assert time.monotonic() < until, "jobs are left"
            time.sleep(0.1)


def check_nothing_is_lost(engine: sa.Engine, job: Any, enqueued: set[int]) -> None:
    """Each job that was committed has an end; a cancelled one names a twin that existed."""
    with Session(engine) as session:
        found = {info.key[0]: info for info in admin.jobs(session, job, limit=10**6)}
        # Of rows that a claim deletes, only the dead letters are left.
        assert len(found) > (10 if "status" in job.__table__.c else 0)
        assert found.keys() <= enqueued
        assert {info.state for info in found.values()} <= {"completed", "failed", "cancelled"}
        twins = [info.last_error for info in found.values() if str(info.last_error).startswith("twin: ")]
        if "waiting" in str(job.__queue__.unique.states):
            assert twins
        for error in twins:
            assert int(twin_in(error) or 0) in enqueued
