"""A database for tests of models that clean up after themselves, as they have to show they can."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from tests.models.tidy import TidyDatabase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Server


class Supply:
    """Hands out the same database again and again, and a new one when something was left behind.

    Creating a database takes longer than most of these tests.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stack = contextlib.ExitStack()
        self._current: TidyDatabase | None = None

    def take(self) -> TidyDatabase:
        if self._current is None:
            database = self._stack.enter_context(self._server.database())
            connection = self._stack.enter_context(database.connect())
            self._current = TidyDatabase(database, connection)
        return self._current

    def give_back(self, database: TidyDatabase) -> None:
        if database.objects() != database.empty:
            self.close()

    def close(self) -> None:
        self._current = None
        self._stack.close()


@pytest.fixture(scope="session")
def supply(server: Server) -> Iterator[Supply]:
    supply = Supply(server)
    yield supply
    supply.close()


@pytest.fixture
def tidy(supply: Supply) -> Iterator[TidyDatabase]:
    """An empty database, which the test leaves as empty as it was."""
    database = supply.take()
    yield database
    supply.give_back(database)


@pytest.fixture
def engine(tidy: TidyDatabase) -> Iterator[sa.Engine]:
    """An engine of the database ``tidy``."""
    engine = sa.create_engine(tidy.database.url())
    yield engine
    engine.dispose()
