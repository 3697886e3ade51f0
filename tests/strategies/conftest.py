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
    """Prove composite keys for one strategy; for the others that their statements are right under every plan.

    What a composite key changes is in the parts that strategies share, and the session that runs everything looks at
    all of them.
    """
    for item in items:
        if HERE in item.path.parents and "composite-key" in item.name and "under_every_plan" not in item.name:
            item.add_marker(pytest.mark.once if "TestUpdateStatus" in item.nodeid else pytest.mark.thorough)


@pytest.fixture(scope="class")
def engine(server: Server) -> Iterator[sa.Engine]:
    """An engine on a database that the tests of one class share."""
    with server.database() as database:
        engine = sa.create_engine(database.url(), pool_size=12)
        yield engine
        engine.dispose()
