"""Every Python snippet of the documentation runs, in the order of its page, on a real database.

The snippets of one page share their names, like one program. Those in HTML comments are run as well: they
hold what a reader need not see.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import close_all_sessions

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.testing import StrategyConformance
from tests.servers import Database

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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
        # As many lines as stand before it, so that an error names the right one of the page.
        code = "\n" * text.count("\n", 0, snippet.start(1)) + snippet[1]
        for driver in ("psycopg", "asyncpg"):
            code = code.replace(f'"postgresql+{driver}://localhost/app"', repr(database.url(driver)))
        exec(compile(code, page, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the project's own snippets


@pytest.mark.once
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.once
def test_the_index_lists_every_page() -> None:
    listed = LINK.findall((ROOT / "docs" / "index.md").read_text())
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= set(listed)


@pytest.mark.once
def test_the_tests_that_the_pages_name_are_in_the_conformance_suite() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named
    assert {name for name in named if not hasattr(StrategyConformance, name)} == set()
