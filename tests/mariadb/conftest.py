"""A database with all tables for each module of tests."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

import sqlaqueue
from tests.mariadb.models import Base, UniqueBase
from tests.mariadb.server import MariaDBServer

Prepared = Callable[..., sa.Engine]


def created(mariadb: MariaDBServer, base: type[DeclarativeBase]) -> Iterator[str]:
    """Create a database with the tables of some models, which the tests of a module share."""
    with mariadb.database() as name:
        engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(name)))
        base.metadata.create_all(engine)
        engine.dispose()
        yield name


@pytest.fixture(scope="module")
def tables(mariadb: MariaDBServer) -> Iterator[str]:
    yield from created(mariadb, Base)


@pytest.fixture
def url(mariadb: MariaDBServer, tables: str) -> Callable[[str], str]:
    """The URL of the database by a driver."""
    return lambda driver: mariadb.url(tables, driver)


@pytest.fixture
def prepared(url: Callable[[str], str]) -> Iterator[Prepared]:
    """A function: return another engine on the database, with these options."""
    engines: list[sa.Engine] = []

    def make(**options: Any) -> sa.Engine:
        engines.append(sa.create_engine(url("mariadb+pymysql"), **options))
        sqlaqueue.prepare(engines[-1])
        return engines[-1]

    yield make
    for engine in engines:
        engine.dispose()


@pytest.fixture
async def async_engine(url: Callable[[str], str]) -> AsyncIterator[AsyncEngine]:
    engine = sqlaqueue.prepare(create_async_engine(url("mariadb+asyncmy")))
    yield engine
    await engine.dispose()


@pytest.fixture
def engine(mariadb: MariaDBServer, tables: str) -> Iterator[sa.Engine]:
    engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(tables), pool_size=20))
    yield engine
    with engine.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(sa.delete(table))
    engine.dispose()


@pytest.fixture
def sessions(engine: sa.Engine) -> sessionmaker[Session]:
    return sessionmaker(engine)


@pytest.fixture(scope="module")
def unique_tables(mariadb: MariaDBServer) -> Iterator[str]:
    yield from created(mariadb, UniqueBase)


@pytest.fixture
def unique_engine(mariadb: MariaDBServer, unique_tables: str) -> Iterator[sa.Engine]:
    engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(unique_tables), pool_size=20))
    yield engine
    with engine.begin() as connection:
        # DELETE marks the entries of an index, and an INSERT of the same key locks the gap beside such an entry.
        connection.execute(sa.text("SET foreign_key_checks = 0"))
        for table in UniqueBase.metadata.sorted_tables:
            connection.execute(sa.text(f"TRUNCATE TABLE `{table.name}`"))
    engine.dispose()
