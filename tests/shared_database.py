"""The fixtures of a database that the tests of a module share, and of an engine on it; each test finds it empty."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import prepare
from tests.servers import Database, Server, end_others


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Database]:
    with server.database() as database:
        yield database


@pytest.fixture
def database(shared: Database) -> Iterator[Database]:
    yield shared
    with shared.connect() as connection:
        # What a failed test has left would hold its locks.
        end_others(connection, shared.name)
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


@pytest.fixture
def engine(shared: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(shared.url(), pool_size=10)
    yield engine
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    engine.dispose()


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


@pytest.fixture(params=["postgresql", "sqlite", "mariadb"])
def each_engine(request: pytest.FixtureRequest, shared: Database, tmp_path: Path) -> Iterator[sa.Engine]:
    """An engine of each database, with an empty database; PostgreSQL's is shared by the tests of a module."""
    if request.param == "mariadb":
        server = request.getfixturevalue("mariadb")
        with server.database() as name:
            engine = prepare(sa.create_engine(server.url(name)))
            yield engine
            engine.dispose()
        return
    if request.param == "sqlite":
        engine = prepare(sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}"))
    else:
        engine = sa.create_engine(shared.url())
    yield engine
    if request.param == "postgresql":
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    engine.dispose()
