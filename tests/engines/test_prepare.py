"""One call prepares the engine of each database, and SQLAlchemy's hook for plug-ins makes the same call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sqlaqueue import claim, prepare
from sqlaqueue.exc import ConfigurationError
from tests.engines.test_programs import Base, Percent
from tests.servers import Database

pytestmark = pytest.mark.once


@pytest.fixture
def make() -> Iterator[Callable[..., sa.Engine]]:
    """``create_engine()``; what it returns is disposed of after the test."""
    made: list[sa.Engine] = []

    def create(*args: Any, **options: Any) -> sa.Engine:
        made.append(sa.create_engine(*args, **options))
        return made[-1]

    yield create
    for engine in made:
        engine.dispose()


def claimed(session: Session) -> list[str]:
    Base.metadata.create_all(session.connection())
    session.add(Percent(customer="ada"))
    session.flush()
    return [job.customer for job in session.execute(claim(Percent, 1)).scalars()]


def busy_timeout(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()


def test_the_engine_comes_back(make: Callable[..., sa.Engine], place: str) -> None:
    engine = make(place)
    assert prepare(prepare(engine)) is engine
    with Session(engine) as session:
        assert claimed(session) == ["ada"]


@pytest.mark.parametrize("order", ["made first", "prepared first"])
def test_engines_that_share_connections_are_prepared_together(
    make: Callable[..., sa.Engine], place: str, order: str
) -> None:
    whole = make(place)
    if order == "prepared first":
        prepare(whole)
    tenant = whole.execution_options(tenant=1)
    deeper = tenant.execution_options(tenant=2)
    assert prepare(deeper) is deeper
    for engine in (whole, tenant, deeper):
        with Session(engine) as session:
            assert claimed(session) == ["ada"]


def test_an_engine_of_postgresql_needs_nothing(make: Callable[..., sa.Engine], database: Database) -> None:
    engine = make(database.url())
    before = dict(vars(engine.dialect))
    assert prepare(engine, busy_timeout=5) is engine
    assert vars(engine.dialect) == before
    with Session(engine) as session:
        assert claimed(session) == ["ada"]
        session.rollback()
    # Not even after it has connected.
    assert prepare(engine) is engine


def test_a_program_on_postgresql_imports_no_other_engine() -> None:
    code = (
        "import sys, sqlaqueue, sqlalchemy as sa\n"
        "sqlaqueue.prepare(sa.create_engine('postgresql+psycopg://'))\n"
        "print([name for name in sys.modules if name.startswith(('sqlaqueue.sqlite', 'sqlaqueue.mariadb'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


# -- the plug-in -------------------------------------------------------------------------------------------------------


def test_the_plug_in_prepares(make: Callable[..., sa.Engine], place: str) -> None:
    engine = make(place, plugins=["sqlaqueue"])
    with Session(engine) as session:
        assert claimed(session) == ["ada"]


@pytest.mark.parametrize("in_url", [False, True])
async def test_the_plug_in_prepares_async_engines(tmp_path: Path, *, in_url: bool) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/jobs.db"
    engine = (
        create_async_engine(url + "?plugin=sqlaqueue") if in_url else create_async_engine(url, plugins=["sqlaqueue"])
    )
    async with AsyncSession(engine) as session:
        assert await session.run_sync(claimed) == ["ada"]
    await engine.dispose()


def test_the_plug_in_does_nothing_on_postgresql(make: Callable[..., sa.Engine], database: Database) -> None:
    engine = make(database.url(), plugins=["sqlaqueue"], busy_timeout=2)
    with Session(engine) as session:
        assert claimed(session) == ["ada"]


@pytest.mark.parametrize(("query", "options"), [("&busy_timeout=1.5", {}), ("", {"busy_timeout": 1.5})])
def test_the_plug_in_takes_the_timeout(
    make: Callable[..., sa.Engine], tmp_path: Path, query: str, options: dict[str, Any]
) -> None:
    engine = make(f"sqlite:///{tmp_path}/jobs.db?plugin=sqlaqueue{query}", **options)
    assert busy_timeout(engine) == 1500
    assert "busy_timeout" not in str(engine.url)


def test_an_option_is_stronger_than_the_url(make: Callable[..., sa.Engine], tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db?plugin=sqlaqueue&busy_timeout=7"
    assert busy_timeout(make(url, busy_timeout=3)) == 3000


def test_a_timeout_in_a_url_must_be_a_number(make: Callable[..., sa.Engine]) -> None:
    with pytest.raises(ConfigurationError, match=r"busy_timeout='soon' must be a number of seconds.*busy_timeout=30"):
        make("sqlite:///jobs.db?plugin=sqlaqueue&busy_timeout=soon")


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["30", -1, object(), float("inf"), float("nan"), 2_147_484])
def test_a_timeout_must_be_a_number_that_sqlite_can_hold(make: Callable[..., sa.Engine], value: Any) -> None:
    said = "busy_timeout=.* must be a number of seconds from 0 to 2147483, for example 30"
    with pytest.raises(ConfigurationError, match=said):
        prepare(make("sqlite:///jobs.db"), busy_timeout=value)


@pytest.mark.parametrize("value", [0, 2_147_483])
def test_the_shortest_and_the_longest_timeout(make: Callable[..., sa.Engine], value: int) -> None:
    assert busy_timeout(prepare(make("sqlite://"), busy_timeout=value)) == value * 1000


@pytest.mark.parametrize("wrong", ["sqlite:///jobs.db", None, Session])
def test_what_is_no_engine_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"needs an engine; use prepare\(create_engine\(url\)\)"):
        prepare(wrong)


def test_another_database_is_refused(make: Callable[..., sa.Engine]) -> None:
    engine = make("mssql+pyodbc://", module=SimpleNamespace(paramstyle="named", version="5.0", Cursor=object))
    with pytest.raises(ConfigurationError, match="is for mssql; queues work on PostgreSQL, SQLite and MariaDB"):
        prepare(engine)
