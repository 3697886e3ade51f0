"""The tables of a shop, its jobs, and the command line in this process or in others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy.orm import Session

from sqlaqueue.cli import main
from tests.cli.shop.models import Base, Done
from tests.servers import Database

ROOT = Path(__file__).parents[2]
MODELS, TASKS, QUEUES = "tests.cli.shop.models", "tests.cli.shop.tasks", "tests.cli.shop.queues"
DEADLINE = 60


def wait_until(condition: Callable[[], Any], what: Callable[[], str] = lambda: "a condition") -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"timeout: {what()}"
        time.sleep(0.02)


class Process:
    """A command in a process of its own, whose output is read while it runs."""

    def __init__(self, *arguments: str, environment: dict[str, str], directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sqlaqueue", *arguments],
            env=environment,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output, lambda: f"{text!r} in\n{self.output}")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Wait until it and its child processes have ended; return the exit code."""
        try:
            code = self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the process does not end:\n{self.output}")
        self._reader.join(DEADLINE)
        assert not self._reader.is_alive(), "a child process is left"
        return code

    def clear(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        # A child process that is left keeps the pipe open; to close it while it is read would wait for ever.
        assert not self._reader.is_alive(), "a child process is left"
        assert self.process.stdout is not None
        self.process.stdout.close()


class Shop:
    """A database with the tables of the shop, and commands that use it."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database, self.directory = database, directory
        self.engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SQLAQUEUE")},
            "PYTHONPATH": str(ROOT),
            "SQLAQUEUE_URL": database.url(),
            "SHOP_URL": database.url(),
            "SHOP_AT_WORK": str(directory / "at_work"),
            "SHOP_GO_ON": str(directory / "go_on"),
            "SQLAQUEUE_WORKER_POLL_INTERVAL": "50ms",
        }
        self.processes: list[Process] = []

    # -- commands ----------------------------------------------------------------------------------------------

    def invoke(self, *arguments: str, answer: str | None = None, **environment: str | None) -> Result:
        """Run a command in this process."""
        settings: dict[str, str | None] = {"SQLAQUEUE_URL": self.database.url(), **environment}
        return CliRunner().invoke(main, arguments, input=answer, env=settings, prog_name="sqlaqueue")

    def ok(self, *arguments: str, **options: Any) -> str:
        """Run a command that must succeed, and return its output."""
        result = self.invoke(*arguments, **options)
        assert result.exception is None, result.output
        return result.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--json"))

    def start(self, *arguments: str, **environment: str | None) -> Process:
        """Start a command in a process of its own."""
        merged = {name: value for name, value in {**self.environment, **environment}.items() if value is not None}
        process = Process(*arguments, environment=merged, directory=self.directory)
        self.processes.append(process)
        return process

    # -- its tables --------------------------------------------------------------------------------------------

    def add(self, *jobs: Any) -> None:
        with Session(self.engine) as session:
            session.add_all(jobs)
            session.commit()

    def execute(self, statement: str, **parameters: Any) -> Any:
        with self.engine.begin() as connection:
            result = connection.execute(sa.text(statement), parameters)
            return result.all() if result.returns_rows else result.rowcount

    def states(self, table: str) -> dict[str, int]:
        return dict(self.execute(f"SELECT status, count(*) FROM {table} GROUP BY 1"))

    def done(self) -> Counter[tuple[str, str]]:
        """Return the number of runs of each job."""
        with Session(self.engine) as session:
            return Counter((one.queue, one.job) for one in session.scalars(sa.select(Done)))

    def pids(self) -> set[int]:
        with Session(self.engine) as session:
            return set(session.scalars(sa.select(Done.pid)))


@pytest.fixture
def shop(database: Database, tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(database, tmp_path)
    Base.metadata.create_all(shop.engine)
    yield shop
    for process in shop.processes:
        process.clear()
    shop.engine.dispose()
