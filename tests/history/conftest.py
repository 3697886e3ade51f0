"""Queues with an attempt history, for each strategy and API."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.history.queues import HELD, KINDS, LEASED, HistoryQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Database


PAIRS = [(kind, api) for kind in KINDS for api in ("sync", "async")]
TURNS = [
    [("update_status", "sync"), ("delete_returning", "async"), ("own_message", "sync")],
    [("update_status", "async"), ("batch_select", "sync"), ("existing_messages", "async")],
]
"""The pairs that one test meets, except in the session that runs everything; which ones changes from test to test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the other pairs to the session that runs everything."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        pair = getattr(getattr(item, "callspec", None), "params", {}).get("queue")
        test = item.nodeid.partition("[")[0]
        if pair is not None and pair not in TURNS[zlib.crc32(test.encode()) % len(TURNS)]:
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of the library."""
    caplog.set_level(logging.DEBUG, "sqlaqueue")
    return caplog


def _queue(database: Database, kind: str, api: str) -> Iterator[HistoryQueue]:
    queue = HistoryQueue(database, kind, api)
    yield queue
    queue.engine.dispose()


@pytest.fixture(params=PAIRS, ids="-".join)
def queue(database: Database, request: pytest.FixtureRequest) -> Iterator[HistoryQueue]:
    """Each strategy with each API."""
    yield from _queue(database, *request.param)


@pytest.fixture(params=["sync", "async"])
def leased(database: Database, request: pytest.FixtureRequest) -> Iterator[HistoryQueue]:
    """The strategy with leases, with each API."""
    yield from _queue(database, LEASED, request.param)


@pytest.fixture(params=HELD)
def held(database: Database, request: pytest.FixtureRequest) -> Iterator[HistoryQueue]:
    """Each strategy that holds a transaction."""
    yield from _queue(database, request.param, "sync")


@pytest.fixture(params=[("update_status", "sync"), ("batch_select", "async")], ids="-".join)
def mixed(database: Database, request: pytest.FixtureRequest) -> Iterator[HistoryQueue]:
    """A strategy with leases and one that holds a transaction, where both share the code."""
    yield from _queue(database, *request.param)
