"""The recipes of the documentation as data, a database with the tables of one, and worker processes on it."""

import contextlib
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.docs.pages import ROOT
from tests.programs import Program, wait_until
from tests.servers import Database

Rows = list[tuple[Any, ...]]
BLOCK = re.compile(r"^```(python|sql)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
SIDE_TABLE = re.compile(r"^CREATE TABLE (\w+) \(.*?^\);$", re.MULTILINE | re.DOTALL)


def side_tables() -> dict[str, str]:
    """Return the SQL of each side table, which docs/existing-tables.md shows for all recipes."""
    _, text = (ROOT / "docs" / "existing-tables.md").read_text().split("### Side tables\n")
    return {found[1]: found[0] for found in SIDE_TABLE.finditer(text)}


@dataclass(frozen=True)
class Recipe:
    """A page of docs/recipes."""

    name: str

    @cached_property
    def _sections(self) -> dict[str, str]:
        text = COMMENT.sub("", (ROOT / "docs" / "recipes" / f"{self.name}.md").read_text())
        parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    def blocks(self, section: str, language: str) -> list[str]:
        """Return the blocks of one language in one section."""
        return [code for kind, code in BLOCK.findall(self._sections.get(section, "")) if kind == language]

    @property
    def existing(self) -> list[str]:
        """The SQL of the existing tables, and then of their rows."""
        return self.blocks("The existing table", "sql") + self.blocks("The existing tables", "sql")

    @property
    def tables(self) -> str:
        """The existing tables, before the library adds anything."""
        return "".join(self.existing[:1])

    @property
    def added(self) -> str:
        """What the library adds to the tables, and the side tables that the section names."""
        section = "What sqlaqueue adds"
        named = re.findall(r"`(sqlaqueue_\w+)`", self._sections[section])
        return "".join([*self.blocks(section, "sql"), *(side_tables()[name] for name in named)])

    def program(self, url: str) -> ModuleType:
        """Execute the definitions of the model and the Consumer, and return their names."""
        *_, consumer = (block for block in self.blocks("The Consumer", "python") if "consumer = " in block)
        code = "".join([*self.blocks("The model", "python"), consumer])
        code = code.replace('"postgresql+psycopg://localhost/app"', repr(url)).replace("\nconsumer.run()", "")
        module = ModuleType(f"recipe_{self.name.replace('-', '_')}")
        # SQLAlchemy looks up the names of annotations in the module of a class.
        sys.modules[module.__name__] = module
        exec(compile(code, f"{self.name}.md", "exec", dont_inherit=True), vars(module))  # noqa: S102 - the project's own
        return module


class Worker(Program):
    """A worker process that runs the Consumer of a recipe."""

    def __init__(self, recipe: Recipe, database: Database, hold: int, poison: int) -> None:
        super().__init__("tests.recipes.worker_process", recipe.name, database.url(), str(hold), str(poison))

    @property
    def held(self) -> list[int]:
        """The key of the job whose handler has stopped in the middle; empty before that."""
        return [int(line.split()[1]) for line in self.lines if line.startswith("holds ")]

    def end_by(self, number: signal.Signals) -> int:
        self.signal(number)
        return self.end()

    def clear(self) -> None:
        # It may have a child, which has the pipe as well.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        super().clear()


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
        self._stack.callback(worker.clear)
        return worker

    def effects(self) -> Counter[int]:
        """Return how many times each job has written its effect."""
        return Counter(job for (job,) in self.execute("SELECT job FROM effect"))

    def kill_one_of_two(self, done: Callable[[], Any], *, hold: int) -> int:
        """Run two workers, kill one in the middle of a job, and return that job's key when ``done()`` is true."""
        victim = self.worker(hold)
        wait_until(lambda: victim.held, "a job whose handler has stopped")
        before = sum(self.effects().values())
        survivor = self.worker()
        wait_until(lambda: sum(self.effects().values()) > before, "a job run by the other worker")
        victim.end_by(signal.SIGKILL)
        wait_until(done, "the last job")
        assert survivor.end_by(signal.SIGTERM) == 0
        return victim.held[0]

    def kill_by_job(self, poison: int, done: Callable[[], Any]) -> int:
        """Run a worker, replaced when it dies, until ``done()`` is true; return how many workers the job has killed."""
        worker = self.worker(poison=poison)
        wait_until(done, "the last job")
        worker.end_by(signal.SIGTERM)
        return worker.lines.count("died")

    def close(self) -> None:
        self._stack.close()


MakeSystem = Callable[..., ExistingSystem]


@pytest.fixture
def make_system(database: Database) -> Iterator[MakeSystem]:
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
