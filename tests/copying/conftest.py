"""A database with the tables of :mod:`tests.copying.models`, and each driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from sqlaqueue import async_copy_in, copy_in
from tests.copying.models import Base, Unmapped

if TYPE_CHECKING:
    from tests.servers import Database, Server

HERE = Path(__file__).parent
DRIVERS = ("psycopg", "psycopg2", "async psycopg", "asyncpg")
REDUNDANT = ("psycopg2", "async psycopg")
"""Each shares its protocol with one of the others, and sync or async code with the other."""
ON_ALL = ("test_copied_values_equal_inserted_values", "test_a_duplicate_key_", "test_a_rollback_undoes_the_copy")
Step = Callable[[Session], Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run redundant combinations only in the thorough session."""
    for item in items:
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        if HERE in item.path.parents and parameters.get("driver") in REDUNDANT and not item.name.startswith(ON_ALL):
            item.add_marker(pytest.mark.thorough)


def nothing(session: Session) -> None:
    pass


class Driver:
    """A driver with ``copy_in()`` or ``async_copy_in()``."""

    def __init__(self, name: str, database: Database) -> None:
        self.name = name
        self.driver_name: Any = name.removeprefix("async ")
        self.is_async = name in {"async psycopg", "asyncpg"}
        self.url = database.url(self.driver_name)

    def copy(
        self,
        model: Any,
        rows: Iterable[Any],
        *,
        before: Step = nothing,
        after: Step = Session.commit,
        options: dict[str, Any] | None = None,
    ) -> int:
        """Copy in a new session, in which ``before`` and ``after`` are called as well."""
        arguments: dict[str, Any] = {"poolclass": NullPool, "execution_options": options or {}}
        if self.is_async:
            return asyncio.run(self._copy(model, rows, before, after, arguments))
        engine = sa.create_engine(self.url, **arguments)
        with Session(engine) as session:
            before(session)
            try:
                return copy_in(session, model, rows)
            finally:
                after(session)

    async def _copy(self, model: Any, rows: Iterable[Any], before: Step, after: Step, arguments: dict[str, Any]) -> int:
        engine = create_async_engine(self.url, **arguments)
        async with AsyncSession(engine) as session:
            await session.run_sync(before)
            try:
                return await async_copy_in(session, model, rows)
            finally:
                await session.run_sync(after)


@pytest.fixture(scope="package")
def copy_database(server: Server) -> Iterator[Database]:
    with server.database() as database:
        engine = sa.create_engine(database.url())
        with engine.begin() as connection:
            connection.exec_driver_sql('CREATE SCHEMA "Post Office"')
            connection.exec_driver_sql("CREATE SCHEMA elsewhere")
        Base.metadata.create_all(engine)
        Unmapped.create_all(engine.execution_options(schema_translate_map={None: "elsewhere"}))
        engine.dispose()
        yield database


@pytest.fixture
def engine(copy_database: Database) -> Iterator[sa.Engine]:
    """An engine; all tables are empty."""
    engine = sa.create_engine(copy_database.url())
    with engine.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(sa.delete(table))
    yield engine
    engine.dispose()


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, copy_database: Database, engine: sa.Engine) -> Driver:
    return Driver(request.param, copy_database)


@pytest.fixture
def psycopg_driver(copy_database: Database, engine: sa.Engine) -> Driver:
    return Driver("psycopg", copy_database)
