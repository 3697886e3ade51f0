"""A database with all tables for each module of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue.mariadb
from tests.mariadb.models import Base, UniqueBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.mariadb.server import MariaDBServer


@pytest.fixture(scope="module")
def tables(mariadb: MariaDBServer) -> Iterator[str]:
    """A database with the tables of all models, which the tests of a module share."""
    with mariadb.database() as name:
        engine = sa.create_engine(mariadb.url(name))
        sqlaqueue.mariadb.prepare(engine)
        Base.metadata.create_all(engine)
        engine.dispose()
        yield name


@pytest.fixture
def url(mariadb: MariaDBServer, tables: str) -> Callable[[str], str]:
    """The URL of the database by a driver."""
    return lambda driver: mariadb.url(tables, driver)


@pytest.fixture
def engine(mariadb: MariaDBServer, tables: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(mariadb.url(tables), pool_size=20)
    sqlaqueue.mariadb.prepare(engine)
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
    with mariadb.database() as name:
        engine = sa.create_engine(mariadb.url(name))
        sqlaqueue.mariadb.prepare(engine)
        UniqueBase.metadata.create_all(engine)
        engine.dispose()
        yield name


@pytest.fixture
def unique_engine(mariadb: MariaDBServer, unique_tables: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(mariadb.url(unique_tables), pool_size=20)
    sqlaqueue.mariadb.prepare(engine)
    yield engine
    with engine.begin() as connection:
        # DELETE marks the entries of an index, and an INSERT of the same key locks the gap beside such an entry.
        connection.execute(sa.text("SET foreign_key_checks = 0"))
        for table in UniqueBase.metadata.sorted_tables:
            connection.execute(sa.text(f"TRUNCATE TABLE `{table.name}`"))
    engine.dispose()
