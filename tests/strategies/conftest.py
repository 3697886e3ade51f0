"""The engine for the conformance suite."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Server

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run composite keys for one strategy only; for the others, only the tests of query plans.

    Strategies share the code for composite keys, and the thorough session tests all of them. The same holds for rows
    that are their own message, which share most statements with other strategies.
    """
    for item in items:
        if HERE not in item.path.parents or "under_every_plan" in item.name:
            continue
        composite, own = "composite-key" in item.name, "TestRowsThatAreTheirOwnMessage" in item.nodeid
        if (composite and "TestUpdateStatus" not in item.nodeid) or (own and zlib.crc32(item.nodeid.encode()) % 3):
            item.add_marker(pytest.mark.thorough)
        elif composite:
            item.add_marker(pytest.mark.once)


@pytest.fixture(scope="class")
def engine(server: Server) -> Iterator[sa.Engine]:
    """Return an engine on a database that the tests of one class share."""
    with server.database() as database:
        engine = sa.create_engine(database.url(), pool_size=12)
        yield engine
        engine.dispose()
