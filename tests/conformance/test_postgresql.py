"""PostgreSQL carries all strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from sqlaqueue.testing import StrategyConformance

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


class TestUpdateStatus(StrategyConformance):
    strategy = "update_status"


class TestBatchSelect(StrategyConformance):
    strategy = "batch_select"


class TestDeleteReturning(StrategyConformance):
    strategy = "delete_returning"


class TestRowsThatAreTheirOwnMessage(StrategyConformance):
    strategy = "delete_returning"
    columns = {"status": None}  # noqa: RUF012 - declared by the base class
