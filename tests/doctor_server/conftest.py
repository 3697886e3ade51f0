"""Fixtures: an engine on the database of the test, and one on a server of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.doctor_server.examine import plain_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

    from tests.servers import Database, Server


@pytest.fixture
def engine(database: Database) -> Iterator[sa.Engine]:
    engine = plain_engine(database.url())
    yield engine
    engine.dispose()


@pytest.fixture
def own(postgres_server: Server) -> Iterator[Database]:
    """A database on a server of the test's own."""
    with postgres_server.database() as database:
        yield database


@pytest.fixture
def own_engine(own: Database) -> Iterator[sa.Engine]:
    engine = plain_engine(own.url())
    yield engine
    engine.dispose()
