"""The command line without a command, and without its dependencies."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sqlaqueue
from tests.demo.commandline import environment
from tests.demo.commandline import sqlaqueue as run

pytestmark = pytest.mark.once


def test_version() -> None:
    assert run("--version").stdout == f"sqlaqueue, version {sqlaqueue.__version__}\n"


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "demo" in result.stdout


@pytest.mark.parametrize(("missing", "extra"), [("click", "cli"), ("rich", "cli"), ("psycopg", "demo")])
def test_the_error_for_a_missing_package_names_the_extra(missing: str, extra: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from sqlaqueue.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program, "demo"], capture_output=True, text=True, env=environment(), check=False
    )
    assert result.returncode != 0
    assert f"pip install 'sqlaqueue[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("missing", ["click", "rich", "psycopg", "greenlet"])
def test_the_library_can_be_imported_without(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from sqlaqueue import *; Consumer"
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True)


@pytest.mark.once
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
    program = f"import sys; sys.modules['greenlet'] = None; {program}"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=False
    )
    *_, last = result.stderr.splitlines()
    assert said in last
    assert last.endswith("pip install 'sqlaqueue[async]'")
