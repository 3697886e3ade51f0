"""The documentation is right: its links, names and signatures, and each of its snippets, which run on a database."""

import ast
import contextlib
import functools
import gc
import importlib
import inspect
import itertools
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import psycopg
import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import close_all_sessions

from sqlaqueue import AsyncConsumer, Consumer
from sqlaqueue.consumer.core.events import EventName
from sqlaqueue.testing import StrategyConformance
from tests.docs.pages import DOCS, LINK, PAGES, ROOT, SNIPPET, TEST_NAME, TITLE, page_id
from tests.programs import Program, run_program, wait_until
from tests.servers import Database, Server

REPOSITORY = re.compile(
    r"https://(?:github\.com/sqlaqueue/sqlaqueue/blob|raw\.githubusercontent\.com/sqlaqueue/sqlaqueue)/main/"
)


@pytest.mark.once
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        path, in_repository = REPOSITORY.subn(f"{ROOT}/", target)
        assert ("://" in target and not in_repository) or (page.parent / path).exists(), target


@pytest.mark.once
def test_the_index_and_the_navigation_of_the_site_list_every_page_once() -> None:
    entries = re.findall(r"^( *)- \[[^]]*\]\(([^)]+)\)", (DOCS / "index.md").read_text(), re.MULTILINE)
    listed: dict[str, list[str]] = {"index.md": []}
    for indentation, page in entries:
        # A page that stands below another one is in the navigation of that one.
        listed[[*listed][-1] if indentation else "index.md"].append(page)
        if not indentation:
            listed[page] = []
    assert {page: navigation(DOCS / page) for page in listed} == listed
    pages = {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)} - {"index.md"}
    assert sorted(page for _, page in entries) == sorted(pages)


def navigation(page: Path) -> list[str]:
    toctrees = re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for toctree in toctrees for line in toctree.splitlines() if line and not line.startswith(":")]
    return [str((page.parent / f"{line}.md").resolve().relative_to(DOCS)) for line in lines]


@pytest.mark.once
def test_the_tests_that_pages_name_exist() -> None:
    """A test's name without a link is a test of the conformance suite; other names link to their files."""
    found = [(page, *named) for page in PAGES for named in TEST_NAME.findall(page.read_text())]
    assert found
    titled = [(page, test, file) for page in PAGES for file, test in TITLE.findall(page.read_text())]
    assert titled
    found += titled
    assert [(page.name, test, file) for page, test, file in found if not exists(page, test, file)] == []


def exists(page: Path, test: str, file: str) -> bool:
    if not file:
        return hasattr(StrategyConformance, test)
    return test in defined((page.parent / file).resolve())


@pytest.mark.once
def test_every_promise_is_shown_by_a_test() -> None:
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (DOCS / "evidence" / "promises.md").read_text(), re.MULTILINE)
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
    tables = re.findall(r"^\| `event` \| level .*?\n\n", (DOCS / "log-events.md").read_text(), re.MULTILINE | re.DOTALL)
    rows = [row for table in tables for row in table.split("\n")[2:-2]]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    code = "".join(module.read_text() for module in (ROOT / "sqlaqueue").rglob("*.py"))
    assert listed == {*get_args(EventName), *re.findall(r'(?:fields\(\s*|log_error\(\s*|"event": )"(\w+)"', code)}


@pytest.mark.once
@pytest.mark.parametrize("consumer", [Consumer, AsyncConsumer])
def test_the_reference_knows_the_options_of_consumers(consumer: type[object]) -> None:
    options = [one.replace(annotation=one.empty) for one in inspect.signature(consumer).parameters.values()]
    written = str(inspect.Signature(options))
    assert f".. autoclass:: {consumer.__name__}{written}\n" in (DOCS / "_api" / "consumers.md").read_text()


@pytest.mark.once
@pytest.mark.parametrize("source", sorted(DOCS.glob("_api/*.md")), ids=page_id)
def test_the_reference_has_the_docstrings_of_today(source: Path) -> None:
    """If this fails, run ``python docs/_extensions/reference_pages.py``."""
    page = letters((DOCS / "reference" / source.name).read_text())
    module, names = "sqlaqueue", []
    for kind, name in re.findall(r"^\.\. (\w+):: ([\w.]+)", source.read_text(), re.MULTILINE):
        if kind in {"currentmodule", "module", "automodule"}:
            module = name
        if kind in {"autoclass", "autofunction", "autoexception"}:
            names.append(name if name.startswith("sqlaqueue.") else f"{module}.{name}")
    assert names
    # Up to the first role, which the page writes as a link.
    texts = {name: re.split(r":\w+:`", str(inspect.getdoc(documented(name))).split("\n\n")[0])[0] for name in names}
    assert [name for name, text in texts.items() if letters(text) not in page] == []


def documented(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def letters(text: str) -> str:
    """Return the words without what Markdown and docstrings write in different ways."""
    return re.sub(r"\W", "", re.sub(r"\]\([^)]*\)", "", text))


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
    walks = text[text.index("## Twelve walks") : text.index("## The life of a job")]
    steps = re.findall(r"^(\w[\w/]*\.py) +([\w.]+)\(\)", walks, re.MULTILINE)
    assert len(steps) > 50
    assert [(path, name) for path, name in steps if name not in defined(ROOT / "sqlaqueue" / path)] == []


@functools.cache
def defined(path: Path) -> set[str]:
    """Return the functions, classes and methods that a file defines, such as ``Settler.settle``."""
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    tree = [*ast.walk(ast.parse(path.read_text()))]
    classes = [node for node in tree if isinstance(node, ast.ClassDef)]
    methods = {f"{each.name}.{node.name}" for each in classes for node in each.body if isinstance(node, functions)}
    return methods | {node.name for node in tree if isinstance(node, (*functions, ast.ClassDef))}


# -- the snippets ------------------------------------------------------------------------------------------------


@pytest.fixture
def engines() -> Iterator[None]:
    """Dispose of the engines that the snippets created, and undo their settings; a reader's program would end here."""
    made: set[Engine] = set()
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()

    def remember(connection: Any) -> None:
        made.add(connection.engine)

    event.listen(Engine, "engine_connect", remember)
    yield
    event.remove(Engine, "engine_connect", remember)
    close_all_sessions()
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    for engine in made:
        engine.dispose()


TESTING = [DOCS / "testing.md", DOCS / "testing-setup.md"]
"""Pages whose snippets are the files of a test suite."""

NOT_A_PROGRAM = {*TESTING, DOCS / "fastapi.md", *DOCS.glob("reference/*.md")}
"""These, the files that tests/recipes/test_fastapi.py writes, and the examples of docstrings (test_docstrings.py)."""

ON_POSTGRESQL = [ROOT / "README.md", DOCS / "tutorial.md"]
"""Pages whose programs use files of SQLite, and run on PostgreSQL with another address."""


def with_addresses(code: str, database: Database, directory: Path, *, on_postgresql: bool) -> str:
    """Replace the addresses of a page by those of a test's databases."""
    code = re.sub(r'"postgresql\+(\w+)://localhost/app"', lambda found: repr(database.url(found[1])), code)
    if on_postgresql:
        drivers = {"sqlite": "psycopg", "sqlite+aiosqlite": "asyncpg"}
        return re.sub(
            r'"(sqlite(?:\+aiosqlite)?):///\w+\.db"', lambda found: repr(database.url(drivers[found[1]])), code
        )
    return re.sub(r'"(sqlite[+\w]*):///(\w+\.db)"', rf'"\1:///{directory}/\2"', code)


@pytest.mark.parametrize(
    ("page", "on_postgresql"),
    [
        *(pytest.param(page, False, id=page_id(page)) for page in PAGES if page not in NOT_A_PROGRAM),
        *(pytest.param(page, True, id=f"{page_id(page)} on PostgreSQL") for page in ON_POSTGRESQL),
    ],
)
@pytest.mark.usefixtures("engines")
def test_the_snippets_run(
    page: Path, database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, on_postgresql: bool
) -> None:
    # drain() does the same without waiting for SIGTERM.
    monkeypatch.setattr(Consumer, "run", Consumer.drain)
    monkeypatch.setattr(AsyncConsumer, "run", AsyncConsumer.drain)
    text = page.read_text()
    module = ModuleType("snippets")
    # SQLAlchemy looks up the names of annotations in the module of a class.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for snippet in SNIPPET.finditer(text):
        code = textwrap.dedent(snippet[3])
        if "\nclass Base(DeclarativeBase" in code and hasattr(module, "Base"):
            # The next program of the page, with other models: it finds an empty database.
            module = ModuleType("snippets")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            close_all_sessions()
            with database.connect() as connection:
                connection.execute("DROP SCHEMA public CASCADE")
                connection.execute("CREATE SCHEMA public")
        if snippet[2] == "sql":
            with database.connect() as connection:
                connection.execute(code.encode())
            continue
        # Padded by the lines before it, so that an error names the line of the page.
        code = "\n" * text.count("\n", 0, snippet.start(3)) + code
        code = with_addresses(code, database, tmp_path, on_postgresql=on_postgresql)
        exec(compile(code, page, "exec", dont_inherit=True), vars(module))  # noqa: S102 - the project's own snippets


@pytest.mark.once
def test_what_replaces_celery_is_in_the_program_of_the_page() -> None:
    text = (DOCS / "coming-from.md").read_text()
    table = text[text.index("| Celery |") : text.index("## RQ")]
    replacements = re.findall(r"^\| [^|]* \| `([^`]+)` \|", table, re.MULTILINE)
    program = "".join(found[3] for found in SNIPPET.finditer(text))
    assert len(replacements) > 10
    assert [each for each in replacements if each not in program] == []


_LOADED = """
import atexit, importlib.metadata, sys
packages = importlib.metadata.packages_distributions()
tops = lambda: {name.split(".")[0] for name in {*sys.modules}}
atexit.register(lambda: print(*sorted({one for top in tops() for one in packages.get(top, [])})))
"""


OF_THE_PACKAGE = {"SQLAlchemy", "sqlaqueue", "typing_extensions", "greenlet", "coverage"}
"""What `pip install sqlaqueue` installs, and what is there in the process of a test."""


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
    assert set(_run_until_a_job_is_done(program).split()) <= OF_THE_PACKAGE
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as file:
        assert file.execute("SELECT status FROM email").fetchall() == [("completed",)]


@pytest.mark.once
def test_the_sync_program_of_the_tutorial_needs_nothing_but_the_package(tmp_path: Path) -> None:
    """The program up to the first line for which the page asks for another package, or for PostgreSQL."""
    snippets = [found[3] for found in SNIPPET.finditer((DOCS / "tutorial.md").read_text())]
    sync = itertools.takewhile(lambda code: "asyncio" not in code, snippets)
    program = tmp_path / "program.py"
    program.write_text(_LOADED + "".join(sync).replace(".run()", ".drain()"))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert set(done.stdout.splitlines()[-1].split()) <= OF_THE_PACKAGE
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as file:
        assert file.execute("SELECT count(*) FROM sqlaqueue_consumer").fetchone() == (0,)


TUTORIAL = DOCS / "tutorial.md"


@pytest.mark.once
@pytest.mark.parametrize("on_postgresql", [False, True])
def test_the_tutorial_is_one_file_that_runs_twice(database: Database, tmp_path: Path, *, on_postgresql: bool) -> None:
    code = "".join(found[3] for found in SNIPPET.finditer(TUTORIAL.read_text()))
    program = tmp_path / "shop.py"
    program.write_text(with_addresses(code, database, tmp_path, on_postgresql=on_postgresql))
    shown = re.findall(r"^```text\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    first, second = (subprocess.check_output([sys.executable, program], text=True, cwd=tmp_path) for _ in range(2))
    assert [first] == shown
    assert re.sub(r"-\d+", "", second) == re.sub(r"-\d+", "", first)


@pytest.mark.once
@pytest.mark.parametrize("on_postgresql", [False, True])
def test_the_two_workers_of_the_tutorial_share_the_jobs(
    database: Database, tmp_path: Path, *, on_postgresql: bool
) -> None:
    text = TUTORIAL.read_text()
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    code = "".join(
        found[3]
        for section in ("Define a model", "Write a handler")
        for found in SNIPPET.finditer(sections[section] + "\n")
    )
    (tmp_path / "shop.py").write_text(with_addresses(code, database, tmp_path, on_postgresql=on_postgresql))
    (order,) = re.findall(r"^```py\n# order.py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "order.py").write_text(order)
    assert "\nsqlaqueue worker shop --verbose\n" in text
    run_program(str(tmp_path / "shop.py"), directory=tmp_path)
    workers = [Program("sqlaqueue", "worker", "shop", "--verbose", directory=tmp_path) for _ in range(2)]
    try:
        for worker in workers:
            worker.wait_for("started, update_status")
        assert run_program(str(tmp_path / "order.py"), directory=tmp_path).returncode == 0

        def done() -> list[int]:
            return [len(re.findall(r"\bcompleted\b", worker.output)) for worker in workers]

        wait_until(lambda: sum(done()) >= 100, lambda: "\n".join(worker.output for worker in workers))
        assert sum(done()) == 100
        assert min(done()) > 0
        for worker in workers:
            worker.signal(signal.SIGINT)
            assert worker.end() == 0, worker.output
    finally:
        for worker in workers:
            worker.clear()


@pytest.mark.once
def test_the_first_example_of_the_readme_runs_on_postgresql(database: Database, tmp_path: Path) -> None:
    """Only the address of the database is replaced, and the line that prepares a file is left out, as it says."""
    program = tmp_path / "example.py"
    code = _first_example().replace('"sqlite:///jobs.db"', repr(database.url())).replace("prepare(engine)\n", "")
    program.write_text(code)
    _run_until_a_job_is_done(program)
    with database.connect() as connection:
        assert connection.execute("SELECT status FROM email").fetchall() == [("completed",)]


# -- the pages about testing, whose snippets are the files of a test suite ----------------------------------------

NOT_RUN = {"test_strategy.py"}
"""The conformance suite of a built-in strategy: tests/conformance runs it."""
INI = """
[pytest]
addopts = -q -p no:faker -p no:cacheprovider
asyncio_default_fixture_loop_scope = function
filterwarnings = error
"""


def write_project(directory: Path, server: Server, database: Database) -> list[str]:
    """Write the files of the pages, and return the names of their tests."""
    names = []
    for snippet in itertools.chain.from_iterable(SNIPPET.finditer(page.read_text()) for page in TESTING):
        code = textwrap.dedent(snippet[3]).replace('"postgresql+psycopg://localhost/app"', repr(database.url()))
        name = re.match(r"# (\w+\.py)\n", code)
        assert name, f"a snippet has no name: {code[:50]}"
        (directory / name[1]).write_text(code)
        names.append(name[1])
    conftest = directory / "conftest.py"
    conftest.write_text(conftest.read_text() + (directory / "conftest_server.py").read_text())
    (directory / "pytest.ini").write_text(INI)
    return [name for name in names if name.startswith("test_") and name not in NOT_RUN]


@pytest.mark.everywhere
def test_the_suite_of_the_page_passes_and_leaves_nothing(server: Server, database: Database, tmp_path: Path) -> None:
    tests = write_project(tmp_path, server, database)
    done = run_pytest(tmp_path, server, *tests)
    assert re.search(r"^24 passed", done.stdout, re.MULTILINE), done.stdout
    with database.connect() as connection:
        assert connection.execute("SELECT count(*) FROM pg_class WHERE relname = 'email'").fetchone() == (0,)
    with psycopg.connect(server.dsn()) as connection:
        left = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'sqlaqueue_test%'").fetchall()
        assert left == []


def test_the_model_for_two_engines_runs_on_postgresql(server: Server, database: Database, tmp_path: Path) -> None:
    write_project(tmp_path, server, database)
    # The suite of the page has run it on SQLite.
    done = run_pytest(tmp_path, server, "test_calls.py", SHOP_DATABASE_URL=database.url())
    assert re.search(r"^1 passed", done.stdout, re.MULTILINE), done.stdout


MIGRATIONS = """
from alembic import context
from sqlalchemy import create_engine
from shop import Base

engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.begin() as connection:
    Base.metadata.create_all(connection)
engine.dispose()
"""


@pytest.mark.once
def test_the_fixtures_that_the_page_overrides(server: Server, database: Database, tmp_path: Path) -> None:
    """A database made by migrations, and sessions of SQLModel."""
    write_project(tmp_path, server, database)
    (tmp_path / "alembic.ini").write_text("[alembic]\nscript_location = migrations\n")
    (tmp_path / "migrations" / "versions").mkdir(parents=True)
    (tmp_path / "migrations" / "env.py").write_text(MIGRATIONS)
    conftest = tmp_path / "conftest.py"
    added = [(tmp_path / name).read_text() for name in ("conftest_migrations.py", "conftest_sqlmodel.py")]
    # Without the MetaData only the migrations create the tables.
    conftest.write_text("\n".join([(tmp_path / "conftest_server.py").read_text(), *added]))
    test = tmp_path / "test_sign_up.py"
    test.write_text(
        test.read_text() + "    assert type(sqlaqueue_session).__mro__[1].__module__.startswith('sqlmodel')\n"
    )
    done = run_pytest(tmp_path, server, "test_sign_up.py")
    assert re.search(r"^1 passed", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.once
def test_each_test_of_the_page_can_fail(server: Server, database: Database, tmp_path: Path) -> None:
    """Without the handler's effects the tests that look at them fail."""
    write_project(tmp_path, server, database)
    shop = tmp_path / "shop.py"
    shop.write_text(shop.read_text().replace("customer.welcomed = True", "pass"))
    done = run_pytest(tmp_path, server, "test_send.py", "test_flow.py")
    assert re.search(r"^2 failed, 2 passed", done.stdout, re.MULTILINE), done.stdout


def run_pytest(directory: Path, server: Server, *names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *names, f"--basetemp={directory / 'temporary'}"],
        cwd=directory,
        env={"TEST_DATABASE_URL": server.url(), "PATH": "", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
