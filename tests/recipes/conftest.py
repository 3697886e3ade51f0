"""A database with the tables of a recipe, and worker processes on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.consumer.models import DEADLINE
from tests.programs import wait_until
from tests.recipes.recipe_page import ROOT, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    import psycopg

    from tests.servers import Database

Rows = list[tuple[Any, ...]]


class Worker:
    """A worker process that runs the Consumer of a recipe."""

    def __init__(self, recipe: Recipe, database: Database, hold: int, poison: int) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.recipes.worker_process", recipe.name, database.url(), str(hold), str(poison)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)

    @property
    def held(self) -> list[int]:
        """The key of the job whose handler has stopped in the middle; empty before that."""
        return [int(line.split()[1]) for line in list(self.lines) if line.startswith("holds ")]

    def end(self, number: int) -> None:
        """Send a signal, and wait until the process has ended."""
        self.process.send_signal(number)
        self.process.wait(DEADLINE)
        self._reader.join()

    def close(self) -> None:
        # A worker may have a child, which has the pipe as well.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class ExistingSystem:
    """A database with the tables of a recipe, and worker processes that run its jobs."""

    def __init__(self, recipe: Recipe, database: Database, connection: psycopg.Connection[Any]) -> None:
        self.recipe, self.database, self._connection = recipe, database, connection
        self._stack = contextlib.ExitStack()

    def execute(self, statement: str) -> Rows:
        """Execute plain SQL and commit; return the rows of a query."""
        cursor = self._connection.execute(statement.encode())
        return [] if cursor.description is None else cursor.fetchall()

    def program(self) -> ModuleType:
        """Return the names of the recipe's program, in this process."""
        program = self.recipe.program(self.database.url())
        self._stack.callback(program.engine.dispose)
        return program

    def worker(self, hold: int = 0, poison: int = 0) -> Worker:
        """Start a worker process. It stops for ever in its ``hold``-th job; the job ``poison`` kills it each time."""
        worker = Worker(self.recipe, self.database, hold, poison)
        self._stack.callback(worker.close)
        return worker

    def effects(self) -> Counter[int]:
        """Return how many times each job has written its effect."""
        return Counter(job for (job,) in self.execute("SELECT job FROM effect"))

    def kill_one_of_two(
        self, done: Callable[[], Any], *, hold: int, then: Callable[[int], Any] = lambda dead: None
    ) -> int:
        """Run two worker processes, kill one in the middle of a job, and return that job's key when ``done()`` is true.

        :param then: called after the kill, with the id of the killed process.
        """
        victim = self.worker(hold)
        wait_until(lambda: victim.held, "a job whose handler has stopped")
        before = sum(self.effects().values())
        survivor = self.worker()
        wait_until(lambda: sum(self.effects().values()) > before, "a job run by the other worker")
        victim.end(signal.SIGKILL)
        then(victim.process.pid)
        wait_until(done, "the last job")
        survivor.end(signal.SIGTERM)
        assert survivor.process.returncode == 0
        return victim.held[0]

    def kill_by_job(self, poison: int, done: Callable[[], Any]) -> int:
        """Run a worker, replaced when it dies, until ``done()`` is true; return how many workers the job has killed."""
        worker = self.worker(poison=poison)
        wait_until(done, "the last job")
        worker.end(signal.SIGTERM)
        return worker.lines.count("died")

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def make_system(database: Database) -> Iterator[Callable[..., ExistingSystem]]:
    """Create the existing tables of a recipe, and then what the library adds."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(database.connect())

        def make(name: str, *, time_zone: str = "UTC") -> ExistingSystem:
            # For all later sessions, like a setting of the server.
            connection.execute(f"ALTER DATABASE {database.name} SET timezone = '{time_zone}'".encode())
            system = ExistingSystem(Recipe(name), database, connection)
            stack.callback(system.close)
            system.execute("CREATE TABLE effect (job bigint NOT NULL, worker integer NOT NULL)")
            system.execute(f"SET timezone = '{time_zone}'")
            system.execute(system.recipe.tables)
            system.execute(system.recipe.added)
            return system

        yield make
