"""The tables of a shop, its jobs, and the command line in this process or in others; files for the demo."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy.orm import Session

from sqlaqueue.cli import main
from tests.cli.shop.models import Base, Done
from tests.programs import ROOT, Program, run_program
from tests.servers import Database, Server

MODELS, QUEUES = "tests.cli.shop.models", "tests.cli.shop.queues"
EMAIL, LETTER, NEWSLETTER, ROW, TASK, BARE = [
    f"{MODELS}:{name}" for name in ("Email", "Letter", "Newsletter", "Row", "Task", "Bare")
]
SEND = ("--handler", f"{MODELS}:send")
WORKER = ("worker", EMAIL, *SEND)
COMMAND = [sys.executable, "-P", "-m", "sqlaqueue"]


def environment(**changes: str | None) -> dict[str, str]:
    """Return this process's environment with changes; None removes a variable."""
    # The demo's workers import this source tree, even if it is not installed.
    merged = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **changes}
    return {name: value for name, value in merged.items() if value is not None}


def sqlaqueue(*arguments: str | Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Run the command line until it exits."""
    return run_program("sqlaqueue", *arguments, environment=environment(**changes))


def fill(directory: Path) -> int:
    """Create files of all kinds in ``directory``; return the number of regular ones."""
    (directory / "below" / "further").mkdir(parents=True)
    for number in range(60):
        (directory / "below" / f"file{number}").write_bytes(b"a line\n" * number + b"a rest")
    (directory / "empty").touch()
    (directory / "below" / "further" / "binary").write_bytes(bytes(range(256)) * 9000)
    Path(os.fsdecode(bytes(directory) + b"/no text: \xff\xfe [bold]\n\x1b[31m")).write_text("x")
    (directory / "link").symlink_to("empty")
    (directory / "link to a directory").symlink_to("below")
    os.mkfifo(directory / "pipe")
    return 63


class Shop:
    """A database with the tables of the shop, and commands that use it."""

    def __init__(self, database: Database, directory: Path) -> None:
        self.database, self.directory = database, directory
        # Tests ask for the states of jobs again and again; some end all connections.
        self.engine = sa.create_engine(database.url(), pool_pre_ping=True)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SQLAQUEUE")},
            "PYTHONPATH": str(ROOT),
            "SQLAQUEUE_URL": database.url(),
            "SHOP_URL": database.url(),
            "SHOP_AT_WORK": str(directory / "at_work"),
            "SHOP_GO_ON": str(directory / "go_on"),
            "SQLAQUEUE_WORKER_POLL_INTERVAL": "50ms",
        }
        self.processes: list[Program] = []

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

    def start(self, *arguments: str, **environment: str | None) -> Program:
        """Start a command in a process of its own."""
        merged = {name: value for name, value in {**self.environment, **environment}.items() if value is not None}
        process = Program("sqlaqueue", *arguments, environment=merged, directory=self.directory)
        self.processes.append(process)
        return process

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


@pytest.fixture(scope="session")
def shop_template(server: Server) -> Iterator[Database]:
    """A database with the tables of the shop, of which each test gets a copy."""
    with server.database() as template:
        engine = sa.create_engine(template.url(), poolclass=sa.NullPool)
        Base.metadata.create_all(engine)
        yield template


@pytest.fixture
def shop(server: Server, shop_template: Database, tmp_path: Path) -> Iterator[Shop]:
    with server.database(shop_template.name) as database:
        shop = Shop(database, tmp_path)
        yield shop
        for process in shop.processes:
            process.clear()
        shop.engine.dispose()
