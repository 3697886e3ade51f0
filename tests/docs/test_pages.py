"""Links, navigation, the names of tests and written signatures in the documentation are right."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import get_args

import pytest

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.core.events import EventName
from sqlaqueue.testing import StrategyConformance
from tests.docs.pages import DOCS, LINK, PAGES, ROOT, TEST_NAME, page_id


@pytest.mark.once
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.once
def test_the_index_lists_every_page() -> None:
    listed = LINK.findall((DOCS / "index.md").read_text())
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"index.md"}
    assert pages <= set(listed)
    # The navigation of the site: the same pages, in the same order.
    toctrees = re.findall(r"^```\{toctree\}\n(.*?)^```$", (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for toctree in toctrees for line in toctree.splitlines()]
    entries = [f"{line}.md" for line in lines if line and not line.startswith(":")]
    assert entries == [page for page in listed if page in pages]


@pytest.mark.once
def test_the_tests_that_pages_name_exist() -> None:
    """A test's name without a link is a test of the conformance suite; other names link to their files."""
    found = [(page, *named) for page in PAGES for named in TEST_NAME.findall(page.read_text())]
    assert found
    assert [(page.name, test, file) for page, test, file in found if not exists(page, test, file)] == []


def exists(page: Path, test: str, file: str) -> bool:
    if not file:
        return hasattr(StrategyConformance, test)
    module = ast.parse((page.parent / file).read_text())
    return any(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == test for one in ast.walk(module))


@pytest.mark.once
def test_every_promise_is_shown_by_a_test() -> None:
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (DOCS / "guarantees.md").read_text(), re.MULTILINE)
    promises = [row for row in rows if row not in {("promise", "shown by"), ("---", "---")}]
    assert promises
    assert [promise for promise, tests in promises if not TEST_NAME.search(tests)] == []


@pytest.mark.once
def test_a_wrong_name_of_a_test_is_found() -> None:
    here = Path(__file__)
    assert exists(here, "test_links_lead_to_files", here.name)
    assert not exists(here, "test_links_lead_nowhere", here.name)
    assert not exists(here, "test_links_lead_to_files", "")


@pytest.mark.once
def test_the_log_events_are_listed() -> None:
    table = re.search(r"^\| `event` \| level .*?\n\n", (DOCS / "logs.md").read_text(), re.MULTILINE | re.DOTALL)
    assert table
    listed = {name for row in table[0].split("\n")[2:-2] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    code = "".join(module.read_text() for module in (ROOT / "sqlaqueue").rglob("*.py"))
    assert listed == {*get_args(EventName), *re.findall(r'(?:fields\(\s*|log_error\(\s*|"event": )"(\w+)"', code)}


@pytest.mark.once
@pytest.mark.parametrize("consumer", [Consumer, AsyncConsumer])
def test_the_reference_knows_the_options_of_consumers(consumer: type[object]) -> None:
    signature = inspect.signature(ConsumerBase.__init__)
    options = [one.replace(annotation=one.empty) for name, one in signature.parameters.items() if name != "self"]
    written = str(inspect.Signature(options))
    assert f".. autoclass:: {consumer.__name__}{written}\n" in (DOCS / "reference.md").read_text()


def in_folder(row: re.Match[str]) -> str:
    return re.sub(r"`(\w+(?:\.py|/))`", rf"`{row[1]}\1`", row[0]).replace(row[1] * 2, row[1])


@pytest.mark.once
@pytest.mark.parametrize("page", [DOCS / "architecture.md", ROOT / "CONTRIBUTING.md"], ids=page_id)
def test_the_paths_that_a_page_names_exist(page: Path) -> None:
    # In the row of a folder, files are named without it.
    text = re.sub(r"^\| `(\w+/)` \|.*$", in_folder, page.read_text(), flags=re.MULTILINE)
    paths = set(re.findall(r"(?<![\w/.])(?:[\w-]+/)*[\w-]+\.(?:py|md|toml|json)\b", text))
    paths |= set(re.findall(r"`((?:[\w-]+/)+)`", text))
    folders = [ROOT, DOCS, ROOT / "sqlaqueue", ROOT / "sqlaqueue" / "consumer"]
    assert len(paths) > 5
    assert {path for path in paths if not any((folder / path).exists() for folder in folders)} == set()


@pytest.mark.once
def test_the_architecture_page_shows_every_folder() -> None:
    drawn = re.findall(r"^```text\n(.*?)^```$", (DOCS / "architecture.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    folders = {init.parent.name for init in (ROOT / "sqlaqueue").glob("*/__init__.py")}
    assert folders <= set(re.findall(r"\w+", drawn))


@pytest.mark.once
def test_the_functions_that_a_walk_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text()
    walks = text[text.index("## Ten walks") : text.index("## The life of a job")]
    steps = re.findall(r"^(\w[\w/]*\.py) +([\w.]+)\(\)", walks, re.MULTILINE)
    assert len(steps) > 50
    assert [(path, name) for path, name in steps if name not in defined(ROOT / "sqlaqueue" / path)] == []


def defined(path: Path) -> set[str]:
    """Return the functions, classes and methods that a file defines, such as ``Settler.settle``."""
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    tree = [*ast.walk(ast.parse(path.read_text()))]
    classes = [node for node in tree if isinstance(node, ast.ClassDef)]
    methods = {f"{each.name}.{node.name}" for each in classes for node in each.body if isinstance(node, functions)}
    return methods | {node.name for node in tree if isinstance(node, (*functions, ast.ClassDef))}
