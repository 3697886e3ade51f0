"""The page about testing is the test suite of an application: its snippets are files, whose names they begin with."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import psycopg
import pytest

from tests.docs.pages import DOCS, SNIPPET
from tests.servers import Database, Server

PAGE = DOCS / "testing.md"

NOT_RUN = {"test_strategy.py"}
"""The conformance suite of a built-in strategy: tests/conformance runs it."""

INI = """
[pytest]
addopts = -q -p no:faker -p no:cacheprovider
asyncio_default_fixture_loop_scope = function
filterwarnings = error
"""


def write_project(directory: Path, server: Server, database: Database) -> list[str]:
    """Write the files of the page, and return the names of its tests."""
    names = []
    for snippet in SNIPPET.finditer(PAGE.read_text()):
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
    assert re.search(r"^23 passed", done.stdout, re.MULTILINE), done.stdout
    with database.connect() as connection:
        assert connection.execute("SELECT count(*) FROM pg_class WHERE relname = 'email'").fetchone() == (0,)
    with psycopg.connect(server.dsn()) as connection:
        left = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'sqlaqueue_test%'").fetchall()
        assert left == []


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


def run_pytest(directory: Path, server: Server, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *names, f"--basetemp={directory / 'temporary'}"],
        cwd=directory,
        env={"TEST_DATABASE_URL": server.url(), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
