"""An empty database for tests of models, which must drop all that they create."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from tests.conftest import CONNECTIONS
from tests.mapping.tidy import TidyDatabase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Server


class DatabasePool:
    """Reuses one database while tests leave it empty, since creating a database takes longer than most tests."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stack = contextlib.ExitStack()
        self._current: TidyDatabase | None = None

    def acquire(self) -> TidyDatabase:
        if self._current is None:
            database = self._stack.enter_context(self._server.database())
            connection = self._stack.enter_context(database.connect())
            del CONNECTIONS.made[connection]  # the next tests use it as well
            self._current = TidyDatabase(database, connection)
        return self._current

    def release(self, database: TidyDatabase) -> None:
        if database.objects() != database.empty:
            self.close()

    def close(self) -> None:
        self._current = None
        self._stack.close()


@pytest.fixture(scope="session")
def supply(server: Server) -> Iterator[DatabasePool]:
    supply = DatabasePool(server)
    yield supply
    supply.close()


@pytest.fixture
def tidy(supply: DatabasePool) -> Iterator[TidyDatabase]:
    """An empty database, which the test must leave empty."""
    database = supply.acquire()
    yield database
    supply.release(database)


@pytest.fixture
def engine(tidy: TidyDatabase) -> Iterator[sa.Engine]:
    """An engine for the database ``tidy``."""
    engine = sa.create_engine(tidy.database.url())
    yield engine
    engine.dispose()
