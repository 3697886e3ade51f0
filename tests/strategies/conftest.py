"""The engine for the tests of strategies, and for the conformance suite on PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Server


@pytest.fixture(scope="class")
def engine(server: Server) -> Iterator[sa.Engine]:
    """Return an engine on a database that the tests of one class share."""
    with server.database() as database:
        engine = sa.create_engine(database.url(), pool_size=12)
        yield engine
        engine.dispose()
