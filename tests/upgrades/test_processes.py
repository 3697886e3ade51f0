"""Workers and enqueuers of 0.1.0 beside those of this version, while the database is migrated under load."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

import sqlaqueue.alembic  # noqa: F401 - autogenerate compares queues
from sqlaqueue._version import __version__
from sqlaqueue.queue.names import CONTROL
from tests.alembic.conftest import Project, disconnect
from tests.programs import ROOT, wait_until
from tests.servers import Database
from tests.upgrades import program

pytestmark = pytest.mark.once

HERE = Path(__file__).parent
NUMBER = len(program.PLAIN) + len(program.FULL) + 1
"""The number of queues."""
FAST = (("enqueuer", "worker", "migrate"), True, "stop")
"""What the default suite runs: a deployment that comes before its migration."""

_LONGEST = 300.0
"""Seconds. A dozen queues in each of four processes take their time on a machine that has other work."""


class Deployment:
    """A database of 0.1.0, and the processes of both versions that use it.

    :param needs_migration: whether the new version needs a migrated table.
    """

    def __init__(
        self,
        database: Database,
        wheel: Path,
        directory: Path,
        *,
        needs_migration: bool = False,
        queues: str = "plain full",
    ) -> None:
        self.database, self.wheel, self.directory = database, wheel, directory
        self.needs_migration, self.queues = needs_migration, queues
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, old: bool) -> subprocess.Popen[bytes]:
        library = self.wheel if old else ROOT
        environment = {**os.environ, "PYTHONPATH": f"{library}:{HERE}", "QUEUES": self.queues}
        environment["SQLAQUEUE_URL"] = self.database.url()
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if self.needs_migration and not old:
            environment["NEXT_VERSION"] = "1"
        with (self.directory / f"output-{len(self.processes)}").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", *arguments], env=environment, cwd=self.directory, stdout=output, stderr=output
            )
        self.processes.append(process)
        return process

    def output(self, process: subprocess.Popen[bytes]) -> str:
        return (self.directory / f"output-{self.processes.index(process)}").read_text()

    def worker(self, *options: str, old: bool) -> subprocess.Popen[bytes]:
        command = ("-m", "sqlaqueue", "worker", "program:consumers", "--log-level", "info")
        return self.start(*command, *options, old=old)

    def program(self, *arguments: str, old: bool) -> subprocess.Popen[bytes]:
        return self.start("-c", "import program; program.main()", *arguments, old=old)

    def await_line(self, process: subprocess.Popen[bytes], text: str, number: int = 1) -> None:
        def has_come() -> bool:
            assert process.poll() is None or self.output(process).count(text) >= number, self.output(process)
            return self.output(process).count(text) >= number

        wait_until(has_come, lambda: f"{text!r} in\n{self.output(process)}", _LONGEST)

    def await_working(self, process: subprocess.Popen[bytes]) -> None:
        self.await_line(process, ": started", NUMBER)

    def end(self, process: subprocess.Popen[bytes], code: int) -> str:
        assert process.wait(_LONGEST) == code, self.output(process)
        return self.output(process)

    def stop(self, process: subprocess.Popen[bytes], how: str = "stop") -> None:
        """Stop a worker beside which another one was stopped or killed; nothing else may have gone wrong."""
        process.send_signal(signal.SIGTERM)
        output = self.end(process, 0)
        bad = [line for line in output.splitlines() if " WARNING " in line or " ERROR " in line]
        # On a busy machine a process may stand still for seconds, and the server ends its transaction of maintenance.
        expected = ["retry requested by the handler", "maintenance: InternalError: (psycopg.errors.IdleInTransaction"]
        expected += ["lease expired"] if how == "kill" else []
        assert [line for line in bad if not any(text in line for text in expected)] == []

    def replace(self, worker: subprocess.Popen[bytes], how: str) -> subprocess.Popen[bytes]:
        """Start a worker of the new version, let both run jobs, and stop or kill the older one."""
        newer = self.worker(old=False)
        self.await_working(newer)
        self.await_effects(__version__)
        if how == "kill":
            worker.kill()
            worker.wait()
        else:
            self.stop(worker)
        return newer

    def await_effects(self, version: str) -> None:
        """Wait until workers of a version have run a job of each queue."""
        counted = f"SELECT count(DISTINCT queue) FROM effect WHERE version = '{version}'"
        wait_until(lambda: self.query(counted)[0][0] == NUMBER, f"each queue by {version}", _LONGEST)

    def query(self, text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database.dsn) as connection:
            return connection.execute(text.encode()).fetchall()

    def migrate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let autogenerate write what the new version changes, and execute it."""
        metadata = program.Base.metadata
        if self.needs_migration:
            monkeypatch.setattr(metadata.tables[CONTROL], "comment", "sqlaqueue, as of 0.2, for 0.1 and newer")
        project = Project(directory=self.directory / "migrations", database=self.database, metadata=metadata)
        project.revise("sqlaqueue")
        project.upgrade()
        project.check()

    def missing(self) -> list[tuple[Any, ...]]:
        """Return the jobs without an effect."""
        return self.query("SELECT queue, key FROM sent EXCEPT SELECT queue, key FROM effect ORDER BY 1, 2 LIMIT 5")

    def check(self) -> None:
        """Check that each job had its effect, that nothing else had one, and that no job has failed."""
        assert self.missing() == []
        unknown = "SELECT queue, key FROM effect EXCEPT SELECT queue, key FROM sent"
        ticks = "SELECT 'ticked', 'tick-' || id FROM ticked"
        assert self.query(f"{unknown} EXCEPT {ticks}") == []
        # A tick is fired once.
        (jobs, fired), *_ = self.query("SELECT (SELECT count(*) FROM ticked), (SELECT count(*) FROM sqlaqueue_tick)")
        assert jobs == fired > 0
        # The last tick may come while the worker stops.
        assert {*self.query("SELECT DISTINCT status::text FROM ticked")} <= {("completed",), ("pending",)}
        kept = [model.__tablename__ for model in (*program.KEPT, program.Import, program.Line)]
        states = [self.query(f"SELECT DISTINCT status::text FROM {table}") for table in (*kept, "call")]
        assert states == [[("completed",)]] * len(states)
        assert self.query("SELECT count(*) FROM message") == [(0,)]
        # Both versions ran jobs of each queue.
        versions = "SELECT queue FROM effect GROUP BY queue HAVING count(DISTINCT version) < 2"
        assert self.query(versions) == []

    def clear(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        disconnect()


@pytest.fixture
def deployments(database: Database, wheel: Path, tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def make(**options: Any) -> Deployment:
        made.append(Deployment(database, wheel, tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.clear()


def cases() -> Iterator[Any]:
    for order in itertools.permutations(("migrate", "worker", "enqueuer")):
        for needs_migration, how in itertools.product((False, True), ("stop", "kill")):
            name = f"{'-'.join(order)}{'-needed' if needs_migration else ''}-{how}"
            marks = [] if (order, needs_migration, how) == FAST else [pytest.mark.thorough]
            yield pytest.param(order, needs_migration, how, id=name, marks=marks)


@pytest.mark.parametrize(("order", "needs_migration", "how"), [*cases()])
def test_an_upgrade_in_any_order(
    deployments: Callable[..., Deployment],
    monkeypatch: pytest.MonkeyPatch,
    order: Sequence[str],
    needs_migration: bool,  # noqa: FBT001 - a parameter of the test
    how: str,
) -> None:
    """Each job has its effect once, whether the older worker is stopped or killed."""
    deployment = deployments(needs_migration=needs_migration)
    deployment.end(deployment.program("create", old=True), 0)
    worker, enqueuers = deployment.worker(old=True), [deployment.program("enqueue", "old", old=True)]
    deployment.await_working(worker)
    deployment.await_effects("0.1.0")
    migrated = False
    for step in order:
        if step == "migrate":
            deployment.migrate(monkeypatch)
            migrated = True
        elif step == "enqueuer":
            # The older one goes on, beside the newer worker as well.
            enqueuers.append(deployment.program("enqueue", "new", old=False))
            deployment.await_line(enqueuers[-1], "sent 3\n")
        elif needs_migration and not migrated:
            output = deployment.end(deployment.worker(old=False), 3)
            assert output.startswith("Error: ")
            assert f"{CONTROL} is as of sqlaqueue 0.1, and this process, which has sqlaqueue {__version__}," in output
        else:
            worker = deployment.replace(worker, how)
    if needs_migration and order.index("worker") < order.index("migrate"):
        worker = deployment.replace(worker, how)
    for enqueuer in enqueuers:
        enqueuer.terminate()
        enqueuer.wait()
    wait_until(lambda: not deployment.missing(), lambda: f"{deployment.missing()}", _LONGEST)
    deployment.stop(worker, how)
    deployment.check()


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_worker_beside_a_database_that_it_must_not_use(
    deployments: Callable[..., Deployment], processes: int
) -> None:
    """Its supervisor, if it has one, does not start it again."""
    options = () if processes == 1 else ("--processes", "2")
    deployment = deployments(queues="plain")
    deployment.end(deployment.program("create", old=False), 0)
    worker = deployment.worker(*options, old=False)
    deployment.await_line(worker, ": started", len(program.PLAIN) * processes)
    enqueuer = deployment.program("enqueue", "new", old=False)
    wait_until(lambda: deployment.query("SELECT 1 FROM effect LIMIT 1"))
    with psycopg.connect(deployment.database.dsn) as connection:
        connection.execute("COMMENT ON TABLE sqlaqueue_control IS 'sqlaqueue, as of 9.1, for 9.0 and newer'")
    output = deployment.end(worker, 3)
    errors = [line for line in output.splitlines() if line.startswith("Error: ")]
    told = f"this process has sqlaqueue {__version__}: start the version of the program that has sqlaqueue 9.1"
    if processes == 1:
        # Another queue may have noticed at the same moment, and has a line in the log.
        assert errors == output.splitlines()[-1:]
    # Each of several processes names the queue that has noticed, and equal lines are printed once.
    assert 1 <= len(errors) <= processes
    assert all(line.endswith(told) for line in errors)
    assert output.count(" is process ") == (0 if processes == 1 else processes)
    # What is enqueued from now on waits for a newer worker.
    waiting = "SELECT 1 FROM plain_update WHERE status::text = 'pending'"
    wait_until(lambda: deployment.query(waiting))
    enqueuer.kill()
    enqueuer.wait()
    # What it had claimed has ended or was released, and it does not start again.
    states = set(deployment.query("SELECT status::text FROM plain_update"))
    assert states == {("completed",), ("pending",)}
    before = deployment.query("SELECT queue, key FROM effect ORDER BY queue, key")
    again = deployment.end(deployment.worker(*options, old=False), 3)
    errors = [line for line in again.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert processes > 1 or again.splitlines() == errors
    assert deployment.query("SELECT queue, key FROM effect ORDER BY queue, key") == before
