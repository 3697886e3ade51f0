"""The program as such: without a command, as a module, without what it needs, and as its page shows it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import sqlaqueue
from sqlaqueue import __version__
from sqlaqueue.cli import main
from tests.cli.conftest import environment
from tests.cli.conftest import sqlaqueue as run
from tests.programs import ROOT, run_program
from tests.servers import Database

pytestmark = pytest.mark.once


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, in which nothing is imported yet."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment(), check=False)


def test_version() -> None:
    assert run("--version").stdout == f"sqlaqueue, version {sqlaqueue.__version__}\n"


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "demo" in result.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize(("missing", "extra"), [("click", "cli"), ("rich", "cli"), ("psycopg", "demo")])
def test_the_error_for_a_missing_package_names_the_extra(missing: str, extra: str) -> None:
    result = python(
        "-c", f"import sys; sys.modules[{missing!r}] = None; from sqlaqueue.cli import main; main()", "demo"
    )
    assert result.returncode != 0
    assert f"pip install 'sqlaqueue[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_extras_that_texts_name_exist() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert extras["standard"] == ["sqlaqueue[alembic,async,cli,cron,psycopg,reload]"]
    files = [ROOT / "README.md", *(ROOT / "sqlaqueue").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    found = [names for file in files for names in re.findall(r"sqlaqueue\[([\w,]+)\]", file.read_text())]
    named = {name for names in found for name in names.split(",")}
    assert named >= {"standard", "reload", "cli"}
    assert named <= set(extras)


def test_the_library_can_be_imported_without_what_the_extras_install() -> None:
    program = "from sqlaqueue import *; from sqlaqueue.admin import *; Consumer"
    missing = dict.fromkeys(["click", "rich", "psycopg", "greenlet"])
    result = python("-c", f"import sys; sys.modules.update({missing!r}); {program}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("from sqlaqueue import AsyncConsumer", "ImportError: sqlaqueue.AsyncConsumer needs greenlet, as all async "),
        (
            "from sqlaqueue.cli.database import *; engine_for(parse_url('postgresql://'), needs_async=True)",
            "InputError: --url: async handlers need greenlet",
        ),
    ],
)
def test_async_code_without_greenlet_names_the_extra(program: str, said: str) -> None:
    *_, last = python("-c", f"import sys; sys.modules['greenlet'] = None; {program}").stderr.splitlines()
    assert said in last
    assert last.endswith("pip install 'sqlaqueue[async]'")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, f"sqlaqueue, version {__version__}\n"),
        (["stats", "--help"], 0, "Usage: sqlaqueue stats [OPTIONS] "),
        (["nothing"], 2, "Usage: sqlaqueue [OPTIONS] COMMAND [ARGS]..."),
    ],
)
def test_the_package_runs_as_a_module(arguments: list[str], code: int, said: str) -> None:
    result = python("-m", "sqlaqueue", *arguments)
    assert result.returncode == code
    assert (result.stdout + result.stderr).startswith(said)


# -- what commands import --------------------------------------------------------------------------------------------

HEAVY = {
    "http.client",
    "http.server",
    "jinja2",
    "multiprocessing",
    "prometheus_client",
    "rich.live",
    "rich.progress",
    "sqlaqueue.benchmark",
    "sqlaqueue.cli.http",
    "sqlaqueue.cli.processes",
    "sqlaqueue.consumer.base",
    "sqlaqueue.demo",
    "sqlaqueue.embedded_server",
    "sqlaqueue.scheduler",
    "sqlaqueue.telemetry",
    "sqlaqueue.web",
    "starlette",
    "tomllib",
    "urllib.request",
    "watchfiles",
}
"""Modules that take long to import, and that no command needs which shows something and ends."""

MODEL = """
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlaqueue import QueueMixin, prepare

class Base(DeclarativeBase):
    pass

class Email(QueueMixin, Base):
    __tablename__ = "email"
    id: Mapped[int] = mapped_column(primary_key=True)
"""
AND_MODULES = """
import atexit, sys
from sqlaqueue.cli import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
main()
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("command", ["stats", "why", "failed", "jobs", "requeue"])
def test_a_command_imports_what_it_needs(tmp_path: Path, command: str) -> None:
    (tmp_path / "app.py").write_text(MODEL)
    create = f"from app import *; Base.metadata.create_all(prepare(sa.create_engine('sqlite:///{tmp_path}/app.db')))"
    subprocess.run([sys.executable, "-c", create], cwd=tmp_path, env=environment(), check=True)
    url = f"sqlite:///{tmp_path}/app.db"
    done = subprocess.run(
        [sys.executable, "-c", AND_MODULES, command, "app:Email"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(SQLAQUEUE_URL=url),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "email" in done.stdout or "no such jobs" in done.stdout
    modules = {*done.stderr.split()}
    assert {"rich.table", "sqlaqueue.cli.database"} <= modules
    # What Python loads by itself, and what measures coverage.
    alone = "import atexit, sys; atexit.register(lambda: print(*sys.modules))"
    command_line = [sys.executable, "-c", alone]
    python = subprocess.run(command_line, capture_output=True, text=True, env=environment(), check=True)
    assert (modules - {*python.stdout.split()}) & HEAVY == set()
    assert ("sqlaqueue.cli.doctor" in modules) == (command == "stats")


# -- completion by the shell -----------------------------------------------------------------------------------------

COMPLETE = """
eval "$(_SQLAQUEUE_COMPLETE=bash_source sqlaqueue)"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_sqlaqueue_completion sqlaqueue
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["re"], ["reconcile", "requeue", "rescue", "resume"]),
        (["requeue", "--ki"], ["--kind"]),
        (["requeue", "app", "--state", ""], ["completed", "failed", "cancelled"]),
        (["schedules", "ru"], ["run"]),
        (["stats", "a"], ["app"]),
        (["stats", "app"], ["app", "Email", "Letter"]),
        # A colon is a word of its own in bash, which replaces only what is behind it.
        (["stats", "app", ":"], ["Email", "Letter"]),
        (["stats", "app", ":", "E"], ["Email"]),
        (["job", "app", ":", "L"], ["Letter"]),
        (["stats", "app", ":", "Email", "app", ":", "L"], ["Letter"]),
        (["stats", "nothing", ":", "E"], [""]),
        (["stats", "mail.que"], ["mail.queues"]),
        (["stats", "broken", ":", "E"], [""]),
    ],
)
def test_bash_completes(tmp_path: Path, words: list[str], expected: list[str]) -> None:
    (tmp_path / "app.py").write_text(f"print('hello')\n{MODEL}\nclass Letter(QueueMixin, Base):\n{LETTER}")
    (tmp_path / "broken.py").write_text("raise RuntimeError")
    (tmp_path / "mail").mkdir()
    (tmp_path / "mail" / "queues.py").touch()
    (tmp_path / "mail" / "__init__.py").touch()
    program = tmp_path / "bin" / "sqlaqueue"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m sqlaqueue "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        [str(shutil.which("bash")), "--norc", "-c", COMPLETE, "bash", "sqlaqueue", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(PATH=f"{program.parent}:{os.environ['PATH']}"),
        check=False,
    )
    # The shell itself complains that nobody completes in it.
    assert done.stdout.splitlines() == expected, done.stderr


LETTER = """
    __tablename__ = "letter"
    id: Mapped[int] = mapped_column(primary_key=True)
"""


# -- the commands of docs/command-line.md print what the page shows ------------------------------------------------

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
    run_commands_of_the_page(database.url(), tmp_path)


@pytest.mark.thorough
def test_the_commands_of_the_page_on_sqlite(tmp_path: Path) -> None:
    run_commands_of_the_page(f"sqlite:///{tmp_path}/app.db", tmp_path)


def run_commands_of_the_page(url: str, directory: Path) -> None:
    environment = {**os.environ, "SQLAQUEUE_URL": url}

    def run(program: str | Path, *arguments: str) -> str:
        done = run_program(program, *arguments, environment=environment, directory=directory)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ran = 0
    for kind, block in BLOCK.findall(PAGE):
        code = block.replace("postgresql+psycopg://localhost/app", url)
        if kind == "console":
            for command, output in commands(block):
                assert command[0] == "sqlaqueue"
                assert plain(run("sqlaqueue", *command[1:])) == plain(output)
                ran += 1
        elif code.startswith("# app.py\n"):
            with (directory / "app.py").open("a") as app:
                app.write(code)
        else:
            (directory / "script.py").write_text(f"from app import *\n{code}")
            run(directory / "script.py")
    assert ran == 13


def test_the_page_documents_every_command_and_option() -> None:
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        assert f"`{name}`" in PAGE or f"sqlaqueue {name}" in PAGE, name
        if name in {"bench", "demo", "alembic-template"}:  # documented on other pages
            continue
        for option in command.params:
            for flag in option.opts:
                assert not flag.startswith("--") or flag in PAGE, (name, flag)
