"""The engine that the conformance suite asks for."""

from __future__ import annotations

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
    """Prove composite keys once; elsewhere only that their statements are right under every plan.

    Those of rows that are their own message differ from the others by what a single key shows as well.
    """
    for item in items:
        if HERE in item.path.parents and "composite-key" in item.name and "a_claim_is_right" not in item.name:
            own = "TestRowsThatAreTheirOwnMessage" in item.nodeid
            item.add_marker(pytest.mark.thorough if own else pytest.mark.once)


@pytest.fixture(scope="class")
def engine(server: Server) -> Iterator[sa.Engine]:
    """An engine on a database that the tests of one class share."""
    with server.database() as database:
        engine = sa.create_engine(database.url(), pool_size=12)
        yield engine
        engine.dispose()
