"""Queues with an attempt history, for each strategy and API."""

import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Cancel, Constant, Fail, Snooze
from sqlaqueue.exc import HandlerNotStopped
from sqlaqueue.queue.names import ATTEMPT
from tests.consumer.bench import Server
from tests.consumer.models import Handler
from tests.models import KINDS, add_messages, execute, insert, make_job
from tests.models import shared as one_class
from tests.servers import Database
from tests.shared_database import database, shared

__all__ = ["database", "shared"]

INSERT = "INSERT INTO sqlaqueue_attempt"


@one_class
def make_model(kind: str, **config: Any) -> Any:
    options = {"attempt_history": timedelta(days=14), "max_attempts": 2, "retry": Constant(delay=0)}
    model = make_job(kind, **options | config)
    if kind == "existing_messages":
        add_messages(model)
    return model


async def obey(io: Any, job: Any) -> None:
    """Do what the payload of a job says."""
    match job.payload:
        case "write":
            await io.execute(sa.text("SELECT 1"))
        case "raise":
            raise ValueError("no address")
        case "fail":
            raise Fail("no stock", kind="no_stock")
        case "cancel":
            raise Cancel("not wanted")
        case "snooze":
            raise Snooze(3600)


class HistoryQueue:
    """A database with a queue that has an attempt history, worked on by a Consumer of either API."""

    def __init__(self, database: Database, kind: str, api: str = "sync", **config: Any) -> None:
        self.database, self.kind, self.api = database, kind, api
        self.Job = make_model(kind, **config)
        self.attempt: sa.Table = self.Job.metadata.tables[ATTEMPT]
        self.engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
        self.sessions = sessionmaker(self.engine)
        self.Job.metadata.create_all(self.engine)

    def enqueue(self, *payloads: str | None, **values: Any) -> list[int]:
        return insert(self.engine, self.Job, [{"payload": payload, **values} for payload in payloads])

    def execute(self, statement: str, **parameters: Any) -> Any:
        return execute(self.engine, statement, **parameters)

    def history(self) -> list[Any]:
        """Return the rows of the history, in the order in which they were written."""
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(self.attempt).order_by(self.attempt.c.id)))

    def outcomes(self, key: int | None = None) -> list[tuple[int, str]]:
        """Return the number and the outcome of each attempt, of one job or of all."""
        return [(row.attempt, row.outcome) for row in self.history() if key is None or row.key == [key]]

    def server(self, handler: Handler = obey, **options: Any) -> Server:
        return Server(self.database, self.api, self.Job, handler, **options)

    def drain(self, handler: Handler = obey, **options: Any) -> None:
        """Run all due jobs."""
        self.server(handler, **options).drain()

    @contextmanager
    def running(self, handler: Handler = obey, **options: Any) -> Iterator[Server]:
        """Run a Consumer in a thread, and stop it in the end."""
        # Some tests have a handler that still runs after the grace period.
        with suppress(HandlerNotStopped), self.server(handler, **options).running() as server:
            yield server


PAIRS = [(kind, api) for kind in KINDS for api in ("sync", "async")]
TURNS = [
    [("update_status", "sync"), ("delete_returning", "async"), ("rows_are_messages", "sync")],
    [("update_status", "async"), ("batch_select", "sync"), ("existing_messages", "async")],
]
"""The pairs that one test meets, except in the session that runs everything; which ones changes from test to test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other pairs to the session that runs everything."""
    for item in items:
        if not item.nodeid.startswith("tests/history/"):
            continue
        pair = getattr(getattr(item, "callspec", None), "params", {}).get("queue")
        test = item.nodeid.partition("[")[0]
        turn = TURNS[zlib.crc32(test.encode()) % len(TURNS)]
        # In the transaction of a test there is no API, and each kind has its turn.
        if pair in PAIRS and pair not in turn:
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "sqlaqueue")
    return caplog


@pytest.fixture(params=PAIRS, ids="-".join)
def queue(database: Database, request: pytest.FixtureRequest) -> HistoryQueue:
    return HistoryQueue(database, *request.param)


@pytest.fixture(params=["sync", "async"])
def leased(database: Database, request: pytest.FixtureRequest) -> HistoryQueue:
    """The strategy with leases, with each API."""
    return HistoryQueue(database, "update_status", request.param)


@pytest.fixture(params=KINDS[1:])
def held(database: Database, request: pytest.FixtureRequest) -> HistoryQueue:
    return HistoryQueue(database, request.param)


@pytest.fixture(params=[("update_status", "sync"), ("batch_select", "async")], ids="-".join)
def mixed(database: Database, request: pytest.FixtureRequest) -> HistoryQueue:
    """A strategy with leases and one that holds a transaction, where both share the code."""
    return HistoryQueue(database, *request.param)
