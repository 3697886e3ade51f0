"""An application for each strategy, sync and async, whose database must be empty after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.servers import Database, Server
from tests.testing.app import QUEUES, App, Base, async_app, sync_app


@pytest.fixture(scope="module")
def shared_database(server: Server) -> Iterator[Database]:
    with server.database() as database:
        yield database


@pytest.fixture(scope="module")
def engine(shared_database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(shared_database.url())
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    """A session of the test's own, rolled back at the end."""
    with Session(engine) as session:
        yield session


@pytest.fixture(autouse=True)
def database_is_left_empty(engine: sa.Engine) -> Iterator[None]:
    """No row survives a test, neither of a queue nor of the library's own tables."""
    yield
    with engine.connect() as connection:
        for table in Base.metadata.sorted_tables:
            assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 0, table


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def open_app(engine: sa.Engine, database: Database, strategy: str, kind: str) -> Iterator[App]:
    model = QUEUES[strategy]
    with sync_app(engine, model) if kind == "sync" else async_app(database.url("asyncpg"), model) as app:
        yield app


EACH_STRATEGY = [
    ("update_status", "sync"),
    ("update_status", "async"),
    ("delete", "sync"),
    ("batch_select", "async"),
    ("delete_returning", "sync"),
    ("own_message", "async"),
]


@pytest.fixture(params=EACH_STRATEGY, ids="-".join)
def app(request: pytest.FixtureRequest, engine: sa.Engine, shared_database: Database) -> Iterator[App]:
    """Each strategy, and each kind of code with strategies of both kinds."""
    yield from open_app(engine, shared_database, *request.param)


@pytest.fixture
def leased(engine: sa.Engine, shared_database: Database, kind: str) -> Iterator[App]:
    """A strategy with leases."""
    yield from open_app(engine, shared_database, "update_status", kind)


@pytest.fixture
def async_leased(engine: sa.Engine, shared_database: Database) -> Iterator[App]:
    """A strategy with leases, in async code."""
    yield from open_app(engine, shared_database, "update_status", "async")


@pytest.fixture(params=EACH_STRATEGY[3:], ids="-".join)
def held(request: pytest.FixtureRequest, engine: sa.Engine, shared_database: Database) -> Iterator[App]:
    """Each strategy that holds a transaction."""
    yield from open_app(engine, shared_database, *request.param)
