"""Each test finds an empty database, or one with the queues of the pairs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from tests.flow_control.pairs import make_engine
from tests.servers import Server
from tests.shared_database import engine, shared

__all__ = ["engine", "shared"]


@pytest.fixture(scope="module")
def pair_engine(server: Server) -> Iterator[sa.Engine]:
    with server.database() as database, make_engine(database) as engine:
        yield engine


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool
