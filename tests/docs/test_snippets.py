"""Every snippet of the documentation runs, in the order of its page, on a real database: Python and SQL.

The Python snippets of one page share their names, like one program. Those in HTML comments are run as well: they
hold what a reader need not see.
"""

from __future__ import annotations

import ast
import inspect
import re
import signal
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
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.testing import StrategyConformance
from tests.servers import Database

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCED = re.compile(r"^( *)```(python|sql)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")
NAMED = re.compile(r"`(test_\w+)`(?:\]\(([^)]+)\))?")


def key_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def engines() -> Iterator[None]:
    """Dispose of the engines that the snippets made: a reader's program would simply end."""
    made: set[Engine] = set()

    def remember(connection: Any) -> None:
        made.add(connection.engine)

    event.listen(Engine, "engine_connect", remember)
    yield
    event.remove(Engine, "engine_connect", remember)
    close_all_sessions()
    for engine in made:
        engine.dispose()


@pytest.mark.parametrize("page", PAGES, ids=key_name)
@pytest.mark.usefixtures("engines")
def test_the_snippets_run(page: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same without waiting for SIGTERM.
    monkeypatch.setattr(Consumer, "run", Consumer.drain)
    monkeypatch.setattr(AsyncConsumer, "run", AsyncConsumer.drain)
    text = page.read_text()
    module = ModuleType("snippets")
    # SQLAlchemy looks the names of annotations up in the module of a class.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for snippet in FENCED.finditer(text):
        code = textwrap.dedent(snippet[3])
        if snippet[2] == "sql":
            with database.connect() as connection:
                connection.execute(code.encode())
            continue
        # As many lines as stand before it, so that an error names the right one of the page.
        code = "\n" * text.count("\n", 0, snippet.start(3)) + code
        for driver in ("psycopg", "asyncpg"):
            code = code.replace(f'"postgresql+{driver}://localhost/app"', repr(database.url(driver)))
        exec(compile(code, page, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the project's own snippets


@pytest.mark.once
def test_the_first_example_of_the_readme_can_be_pasted(database: Database, tmp_path: Path) -> None:
    """What a reader sees of it, with the address of a database, is a whole program."""
    seen = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    first = next(FENCED.finditer(seen))[3]
    program = tmp_path / "example.py"
    program.write_text(first.replace('"postgresql+psycopg://localhost/app"', repr(database.url())))
    with subprocess.Popen([sys.executable, "-u", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "to ada@example.com\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    with database.connect() as connection:
        assert connection.execute("SELECT status FROM email").fetchall() == [("completed",)]


@pytest.mark.once
@pytest.mark.parametrize("page", PAGES, ids=key_name)
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.once
def test_the_index_lists_every_page() -> None:
    docs = ROOT / "docs"
    listed = LINK.findall((docs / "index.md").read_text())
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"index.md"}
    assert pages <= set(listed)
    # The navigation of the site: the same pages, in the same order.
    toctrees = re.findall(r"^```\{toctree\}\n(.*?)^```$", (docs / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for toctree in toctrees for line in toctree.splitlines()]
    entries = [f"{line}.md" for line in lines if line and not line.startswith(":")]
    assert entries == [page for page in listed if page in pages]


@pytest.mark.once
def test_the_tests_that_the_pages_name_are_there() -> None:
    """A test's name alone is one of the conformance suite; others are links to their files."""
    found = [(page, *named) for page in PAGES for named in NAMED.findall(page.read_text())]
    assert found
    assert [(page.name, test, file) for page, test, file in found if not is_there(page, test, file)] == []


def is_there(page: Path, test: str, file: str) -> bool:
    if not file:
        return hasattr(StrategyConformance, test)
    module = ast.parse((page.parent / file).read_text())
    return any(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == test for one in ast.walk(module))


@pytest.mark.once
def test_every_promise_is_shown_by_a_test() -> None:
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE)
    promises = [row for row in rows if row not in {("promise", "shown by"), ("---", "---")}]
    assert promises
    assert [promise for promise, tests in promises if not NAMED.search(tests)] == []


@pytest.mark.once
def test_what_is_named_wrongly_is_found() -> None:
    here = Path(__file__)
    assert is_there(here, "test_the_snippets_run", here.name)
    assert not is_there(here, "test_the_snippets_walk", here.name)
    assert not is_there(here, "test_the_snippets_run", "")


@pytest.mark.once
@pytest.mark.parametrize("consumer", [Consumer, AsyncConsumer])
def test_the_reference_knows_the_options_of_consumers(consumer: type[object]) -> None:
    signature = inspect.signature(ConsumerBase.__init__)
    options = [one.replace(annotation=one.empty) for name, one in signature.parameters.items() if name != "self"]
    written = str(inspect.Signature(options))
    assert f".. autoclass:: {consumer.__name__}{written}\n" in (ROOT / "docs" / "reference.md").read_text()
