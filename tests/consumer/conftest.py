"""A queue of each strategy, and Consumers of both APIs on it."""

import contextlib
import itertools
import logging
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance import handlers_running
from tests.conftest import CONNECTIONS
from tests.consumer.bench import Bench
from tests.consumer.models import STRATEGIES
from tests.servers import Database, Server, end_others
from tests.shared_database import database, engine, shared

__all__ = ["database", "engine", "shared"]

APIS = ("sync", "async")
POOLED = [("update_status", "psycopg"), ("delete_returning", "asyncpg"), ("batch_select", "psycopg2")]
"""The strategies behind a pooler, each with one of the drivers."""
TURNS = [
    [("update_status", "sync"), ("delete_returning", "async")],
    [("update_status", "async"), ("batch_select", "sync")],
]
"""The strategies and Consumers that one test meets: a strategy with leases and one that holds a transaction.

These show what depends on either: the routines of both Consumers are the same, and so is most of the code of the two
strategies that hold a transaction.
"""
MIXED = [pair for turn in TURNS for pair in turn]
EACH = list(itertools.product(STRATEGIES, APIS))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave all but one of `TURNS` to the session that runs everything; which one changes from test to test."""
    for item in items:
        if __package__ not in item.nodeid.replace("/", "."):
            continue
        parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        pair = parameters.get("mixed") or (parameters.get("strategy"), parameters.get("api"))
        test = item.nodeid.partition("[")[0]
        if pair in EACH and pair not in TURNS[zlib.crc32(test.encode()) % len(TURNS)]:
            item.add_marker(pytest.mark.thorough)
        if {"held", "driver"} <= parameters.keys() and (parameters["held"], parameters["driver"]) not in POOLED:
            item.add_marker(pytest.mark.thorough)


class Supply:
    """One database per strategy: creating it takes longer than most of these tests."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stack = contextlib.ExitStack()
        self._databases: dict[str, Database] = {}
        self._engines: dict[str, sa.Engine] = {}

    def take(self, strategy: str, api: str) -> Bench:
        if strategy not in self._databases:
            database = self._stack.enter_context(self._server.database())
            Bench(database, strategy).create()
            # Tests query the states of their jobs every few milliseconds. Some tests end all connections, so these
            # are checked before use.
            engine = sa.create_engine(database.url(), pool_pre_ping=True)
            self._stack.callback(engine.dispose)
            CONNECTIONS.dialects.discard(engine.dialect)  # the next tests use it as well
            self._databases[strategy], self._engines[strategy] = database, engine
        bench = Bench(self._databases[strategy], strategy, api, engine=self._engines[strategy])
        # Threads that a failed test has left behind would hold their locks in the next one.
        with bench.engine.connect() as connection:
            end_others(connection.connection.driver_connection, bench.database.name)
        bench.clear()
        return bench

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def supply(server: Server) -> Iterator[Supply]:
    supply = Supply(server)
    yield supply
    supply.close()


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(supply: Supply, strategy: str, api: str) -> Bench:
    """The empty queue of a strategy, with Consumers of one API, sync or async."""
    return supply.take(strategy, api)


@pytest.fixture(params=MIXED, ids="-".join)
def mixed(request: pytest.FixtureRequest, supply: Supply) -> Bench:
    """Each strategy with one API or both, but not each pair of them: where a test takes seconds."""
    return supply.take(*request.param)


@pytest.fixture
def leased(supply: Supply, api: str) -> Bench:
    """The same for the strategy with leases alone."""
    return supply.take("update_status", api)


@pytest.fixture
def sync_bench(supply: Supply, strategy: str) -> Bench:
    """The queue of a strategy, with sync Consumers alone."""
    return supply.take(strategy, "sync")


@pytest.fixture
def async_bench(supply: Supply, strategy: str) -> Bench:
    return supply.take(strategy, "async")


@pytest.fixture
def sync_leased(supply: Supply) -> Bench:
    return supply.take("update_status", "sync")


@pytest.fixture
def async_leased(supply: Supply) -> Bench:
    return supply.take("update_status", "async")


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "sqlaqueue")
    return caplog


@pytest.fixture
def frequent_rescues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rescue expired leases and query requests to cancel more often than usual."""
    monkeypatch.setattr(pace, "RESCUE", 0.2)


@pytest.fixture
def no_job_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no job go back because it waits for its handler, as those of a slow machine do."""
    for name in ("LATE", "LONGEST_IN_BUFFER"):
        monkeypatch.setattr(handlers_running, name, 600.0)
