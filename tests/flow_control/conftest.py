"""Each test finds an empty database, or one with the queues of the pairs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from tests.flow_control.pairs import make_engine
from tests.servers import Database, Server
from tests.shared_database import engine, shared

__all__ = ["engine", "shared"]


@pytest.fixture
def pool(shared: Database, engine: sa.Engine) -> Iterator[sa.Engine]:
    """An engine with connections for many Consumers, on the database of ``engine``."""
    many = sa.create_engine(shared.url(), pool_size=60)
    yield many
    many.dispose()


@pytest.fixture(scope="module")
def pair_engine(server: Server) -> Iterator[sa.Engine]:
    with server.database() as database, make_engine(database) as engine:
        yield engine


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool
