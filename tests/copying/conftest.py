"""One database with the tables of :mod:`tests.copying.models`, and each way into it."""

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
WAYS = ("psycopg", "psycopg2", "async psycopg", "asyncpg")
ALIKE = ("psycopg2", "async psycopg")
"""Both are a half of each of the others: one has its colour, one its protocol."""
ON_ALL = ("test_each_type", "test_a_key_that_is_there_already", "test_it_is_rolled_back_with_its_transaction")
Step = Callable[[Session], Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what is alike to the session that runs everything."""
    for item in items:
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        if HERE in item.path.parents and parameters.get("way") in ALIKE and not item.name.startswith(ON_ALL):
            item.add_marker(pytest.mark.thorough)


def nothing(session: Session) -> None:
    pass


class Way:
    """A driver, and the function of its colour."""

    def __init__(self, name: str, database: Database) -> None:
        self.name = name
        self.driver: Any = name.removeprefix("async ")
        self.is_async = name in {"async psycopg", "asyncpg"}
        self.url = database.url(self.driver)

    def copy(
        self,
        model: Any,
        rows: Iterable[Any],
        *,
        before: Step = nothing,
        after: Step = Session.commit,
        options: dict[str, Any] | None = None,
    ) -> int:
        """Copy in a session of its own; ``before`` and ``after`` are run in the same one."""
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
    """An engine on empty tables."""
    engine = sa.create_engine(copy_database.url())
    with engine.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(sa.delete(table))
    yield engine
    engine.dispose()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, copy_database: Database, engine: sa.Engine) -> Way:
    return Way(request.param, copy_database)


@pytest.fixture
def one_way(copy_database: Database, engine: sa.Engine) -> Way:
    return Way("psycopg", copy_database)
