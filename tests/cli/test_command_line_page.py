"""The commands of docs/command-line.md print what the page shows."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlaqueue.cli import main
from tests.programs import ROOT, run_program
from tests.servers import Database

pytestmark = pytest.mark.once

PAGE = (ROOT / "docs" / "command-line.md").read_text()
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[tuple[list[str], str]]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield shlex.split(command), output


def plain(output: str) -> list[list[str]]:
    """Return the words of an output, without widths of columns and ages."""
    return [re.sub(r"\d+ s ago", "N s ago", line).split() for line in output.splitlines()]


def test_the_commands_of_the_page(database: Database, tmp_path: Path) -> None:
    environment = {**os.environ, "SQLAQUEUE_URL": database.url()}

    def run(program: str | Path, *arguments: str) -> str:
        done = run_program(program, *arguments, environment=environment, directory=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ran = 0
    for kind, block in BLOCK.findall(PAGE):
        code = block.replace("postgresql+psycopg://localhost/app", database.url())
        if kind == "console":
            for command, output in commands(block):
                assert command[0] == "sqlaqueue"
                assert plain(run("sqlaqueue", *command[1:])) == plain(output)
                ran += 1
        elif code.startswith("# app.py\n"):
            with (tmp_path / "app.py").open("a") as app:
                app.write(code)
        else:
            if "engine = create_engine" not in code:
                code = f"engine = create_engine({database.url()!r})\n{code}"
            (tmp_path / "script.py").write_text(f"from app import *\n{code}")
            run(tmp_path / "script.py")
    assert ran == 12


def test_the_page_documents_every_command_and_option() -> None:
    for name, command in main.commands.items():
        assert f"`{name}`" in PAGE or f"sqlaqueue {name}" in PAGE, name
        if name in {"bench", "demo", "alembic-template"}:  # documented on other pages
            continue
        for option in command.params:
            for flag in option.opts:
                assert not flag.startswith("--") or flag in PAGE, (name, flag)
