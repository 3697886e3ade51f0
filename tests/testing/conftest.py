"""An application for each strategy, sync and async, whose database must be empty after each test."""

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
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


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        yield runner


@pytest.fixture(scope="module")
def async_engine(shared_database: Database, runner: asyncio.Runner) -> Iterator[AsyncEngine]:
    engine = create_async_engine(shared_database.url("asyncpg"))
    yield engine
    runner.run(engine.dispose())


COUNTS = sa.select(
    *(
        sa.select(sa.func.count()).select_from(table).scalar_subquery().label(table.name)
        for table in Base.metadata.sorted_tables
    )
)


@pytest.fixture(autouse=True)
def database_is_left_empty(engine: sa.Engine) -> Iterator[None]:
    """No row survives a test, neither of a queue nor of the library's own tables."""
    yield
    with engine.connect() as connection:
        (counts,) = connection.execute(COUNTS)
    assert not any(counts), counts._mapping


@pytest.fixture(autouse=True)
def queues_of_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide those of other tests: travel() asks for the table of each queue of the process, which would be hundreds."""
    # The name of the module is that of a function as well.
    module = importlib.import_module("sqlaqueue.testing.enqueued")
    queues, folder = module._queues, __package__
    monkeypatch.setattr(
        module, "_queues", lambda: [each for each in queues() if each.mapper.class_.__module__.startswith(folder)]
    )


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_app(
    engine: sa.Engine, async_engine: AsyncEngine, runner: asyncio.Runner
) -> Iterator[Callable[[str, str], App]]:
    """A function: return the application with a strategy, in sync or in async code."""
    with contextlib.ExitStack() as stack:

        def open_app(strategy: str, kind: str) -> App:
            if kind == "sync":
                return stack.enter_context(sync_app(engine, QUEUES[strategy]))
            return stack.enter_context(async_app(async_engine, QUEUES[strategy], runner))

        yield open_app


EACH_STRATEGY = [
    ("update_status", "sync"),
    ("update_status", "async"),
    ("delete", "sync"),
    ("batch_select", "async"),
    ("delete_returning", "sync"),
    ("own_message", "async"),
]


@pytest.fixture(params=EACH_STRATEGY, ids="-".join)
def app(request: pytest.FixtureRequest, open_app: Callable[[str, str], App]) -> App:
    """Each strategy, and each kind of code with strategies of both kinds."""
    return open_app(*request.param)


@pytest.fixture
def leased(open_app: Callable[[str, str], App], kind: str) -> App:
    """A strategy with leases."""
    return open_app("update_status", kind)


@pytest.fixture
def async_leased(open_app: Callable[[str, str], App]) -> App:
    """A strategy with leases, in async code."""
    return open_app("update_status", "async")


@pytest.fixture(params=EACH_STRATEGY[3:], ids="-".join)
def held(request: pytest.FixtureRequest, open_app: Callable[[str, str], App]) -> App:
    """Each strategy that holds a transaction."""
    return open_app(*request.param)
