"""A queue of each strategy, and Consumers of both colours on it."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from sqlaqueue.serving import pace
from tests.consumer.bench import Bench
from tests.consumer.models import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Database, Server

COLOURS = ("sync", "async")
POOLED = [("update_status", "psycopg"), ("delete_returning", "asyncpg"), ("batch_select", "psycopg2")]
"""The strategies behind a pooler, each with one of the drivers."""
MIXED = [("update_status", "sync"), ("delete_returning", "async"), ("batch_select", "sync")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave each second pair of a strategy and a colour to the session that runs everything.

    What depends on either of them shows in the others: the scripts of both Consumers are the same.
    """
    for item in items:
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        if {"strategy", "colour"} <= parameters.keys() and __package__ in item.nodeid.replace("/", "."):
            pair = (parameters["strategy"], parameters["colour"])
            if pair not in MIXED:
                item.add_marker(pytest.mark.thorough)
        if {"held", "driver"} <= parameters.keys() and (parameters["held"], parameters["driver"]) not in POOLED:
            item.add_marker(pytest.mark.thorough)


class Supply:
    """One database a strategy: creating it takes longer than most of these tests."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stack = contextlib.ExitStack()
        self._databases: dict[str, Database] = {}
        self._engines: dict[str, sa.Engine] = {}

    def take(self, strategy: str, colour: str) -> Bench:
        if strategy not in self._databases:
            database = self._stack.enter_context(self._server.database())
            Bench(database, strategy).create()
            # Tests look every few milliseconds what has become of their jobs. Some end all connections: these are
            # asked before they are used.
            engine = sa.create_engine(database.url(), pool_pre_ping=True)
            self._stack.callback(engine.dispose)
            self._databases[strategy], self._engines[strategy] = database, engine
        # Threads that a failed test has left behind would hold their locks in the next one.
        self._databases[strategy].kill_backends()
        bench = Bench(self._databases[strategy], strategy, colour, engine=self._engines[strategy])
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


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(supply: Supply, strategy: str, colour: str) -> Bench:
    """The empty queue of a strategy, with Consumers of a colour."""
    return supply.take(strategy, colour)


@pytest.fixture(params=MIXED, ids="-".join)
def mixed(request: pytest.FixtureRequest, supply: Supply) -> Bench:
    """Each strategy and each colour, but not each pair of them: where a test takes seconds."""
    return supply.take(*request.param)


@pytest.fixture
def leased(supply: Supply, colour: str) -> Bench:
    """The same for the strategy with leases alone."""
    return supply.take("update_status", colour)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of the library."""
    caplog.set_level(logging.DEBUG, "sqlaqueue")
    return caplog


@pytest.fixture
def frequent_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for expired leases and requests more often than usual: a test waits for little else."""
    monkeypatch.setattr(pace, "SWEEP", 0.2)
