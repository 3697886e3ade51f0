"""Every Python and SQL snippet of the documentation runs on a real database, in the order of its page.

The Python snippets of a page share their names, like one program. Snippets in HTML comments run too: they contain what
a reader need not see. The page about testing consists of tests, which :mod:`tests.docs.test_testing_page` runs.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import close_all_sessions

from sqlaqueue import AsyncConsumer, Consumer
from tests.docs.pages import PAGES, ROOT, SNIPPET, page_id
from tests.servers import Database


@pytest.fixture
def engines() -> Iterator[None]:
    """Dispose of the engines that the snippets created; a reader's program would end here."""
    made: set[Engine] = set()

    def remember(connection: Any) -> None:
        made.add(connection.engine)

    event.listen(Engine, "engine_connect", remember)
    yield
    event.remove(Engine, "engine_connect", remember)
    close_all_sessions()
    for engine in made:
        engine.dispose()


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "testing.md"], ids=page_id)
@pytest.mark.usefixtures("engines")
def test_the_snippets_run(page: Path, database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # drain() does the same without waiting for SIGTERM.
    monkeypatch.setattr(Consumer, "run", Consumer.drain)
    monkeypatch.setattr(AsyncConsumer, "run", AsyncConsumer.drain)
    text = page.read_text()
    module = ModuleType("snippets")
    # SQLAlchemy looks up the names of annotations in the module of a class.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for snippet in SNIPPET.finditer(text):
        code = textwrap.dedent(snippet[3])
        if snippet[2] == "sql":
            with database.connect() as connection:
                connection.execute(code.encode())
            continue
        # Padded by the lines before it, so that an error names the line of the page.
        code = "\n" * text.count("\n", 0, snippet.start(3)) + code
        for driver in ("psycopg", "asyncpg"):
            code = code.replace(f'"postgresql+{driver}://localhost/app"', repr(database.url(driver)))
        code = code.replace('"sqlite:///jobs.db"', repr(f"sqlite:///{tmp_path}/jobs.db"))
        exec(compile(code, page, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the project's own snippets


_LOADED = """
import atexit, importlib.metadata, sys
packages = importlib.metadata.packages_distributions()
tops = lambda: {name.split(".")[0] for name in {*sys.modules}}
atexit.register(lambda: print(*sorted({one for top in tops() for one in packages.get(top, [])})))
"""


def _first_example() -> str:
    seen = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return next(SNIPPET.finditer(seen))[3]


def _run_until_a_job_is_done(program: Path) -> str:
    """Run a program until it has handled the job, stop it by SIGINT, and return the rest of its output."""
    command = [sys.executable, "-u", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=program.parent) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "to ada@example.com\n"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(30) == 0
    return rest


@pytest.mark.once
def test_the_first_example_of_the_readme_needs_nothing_but_the_package(tmp_path: Path) -> None:
    """The first example is a complete program, as it stands, and imports no other package than SQLAlchemy."""
    program = tmp_path / "example.py"
    program.write_text(_LOADED + _first_example())
    allowed = {"SQLAlchemy", "sqlaqueue", "typing_extensions", "greenlet", "coverage"}
    assert set(_run_until_a_job_is_done(program).split()) <= allowed
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as file:
        assert file.execute("SELECT status FROM email").fetchall() == [("completed",)]


@pytest.mark.once
def test_the_first_example_of_the_readme_runs_on_postgresql(database: Database, tmp_path: Path) -> None:
    """Only the address of the database is replaced, and the line that prepares a file is left out, as it says."""
    program = tmp_path / "example.py"
    code = _first_example().replace('"sqlite:///jobs.db"', repr(database.url())).replace("prepare(engine)\n", "")
    program.write_text(code)
    _run_until_a_job_is_done(program)
    with database.connect() as connection:
        assert connection.execute("SELECT status FROM email").fetchall() == [("completed",)]
