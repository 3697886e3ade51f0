"""Runs Alembic's command line as a user does: in processes, in the directory of a project."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.servers import Database

ROOT = Path(__file__).parent.parent.parent
RUN_ALL = """
import runpy, shlex, sys
from alembic.config import main

for command in sys.argv[1:]:
    if command.endswith(".py"):
        runpy.run_path(command, run_name="__main__")
    else:
        main(argv=shlex.split(command)[1:], prog="alembic")
"""
PROGRAMS = {"alembic": "alembic", "sqlaqueue": "sqlaqueue", "python": ""}


@dataclass
class Shell:
    """A directory, and programs that import this source tree even if it is not installed."""

    directory: Path
    database: Database

    def __post_init__(self) -> None:
        self.programs = self.directory.parent / f"{self.directory.name} programs"
        self.programs.mkdir()
        self.directory.mkdir(exist_ok=True)
        for name, module in PROGRAMS.items():
            program = self.programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {f"-P -m {module}" if module else ""} "$@"\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run(self, command: str) -> str:
        """Run a command, then point ``alembic.ini`` at the test's database."""
        environment = {
            **os.environ,
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONWARNINGS": "error",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            ["/bin/sh", "-ec", command],
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        self._use_database()
        return done.stdout

    def run_all(self, *commands: str) -> str:
        """Run Alembic commands and Python files in one process: starting processes takes longer than they do."""
        return self.run(shlex.join(["python", "-c", RUN_ALL, *commands]))

    def _use_database(self) -> None:
        ini = self.directory / "alembic.ini"
        if ini.exists():
            text = ini.read_text()
            for driver in ("psycopg", "asyncpg"):
                text = text.replace(f"postgresql+{driver}://localhost/app", self.database.url(driver))
            ini.write_text(text)

    def write(self, name: str, text: str) -> None:
        for driver in ("psycopg", "asyncpg"):
            text = text.replace(f"postgresql+{driver}://localhost/app", self.database.url(driver))
        (self.directory / name).write_text(text)

    def newest_migration(self) -> Path:
        """Return the file of the head revision."""
        versions = {}
        for path in (self.directory / "migrations" / "versions").glob("*.py"):
            revision, down = re.findall(r"^(?:down_)?revision: .*? = (.*)$", path.read_text(), re.MULTILINE)
            versions[revision] = (down, path)
        parents = {down for down, _ in versions.values()}
        (head,) = (path for revision, (_, path) in versions.items() if revision not in parents)
        return head

    def patch(self, diff: str) -> None:
        """Apply a diff to ``app.py``, or to the newest migration if it does not fit there."""
        old = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith("-"))
        new = "".join(line[1:] + "\n" for line in diff.splitlines() if line.startswith("+"))
        app = self.directory / "app.py"
        for path in (app, self.newest_migration()):
            if not old:
                path.write_text(f"{path.read_text()}\n\n{new}")
                return
            if old in path.read_text():
                path.write_text(path.read_text().replace(old, new, 1))
                return
        message = f"{old!r} is neither in app.py nor in the newest migration"
        raise AssertionError(message)
