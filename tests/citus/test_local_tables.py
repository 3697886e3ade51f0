"""Local tables on the coordinator: the conformance suite holds for every strategy, as on plain PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from sqlaqueue.testing import StrategyConformance
from tests.citus.cluster import CitusDatabase
from tests.citus.conftest import engine_of, schema_in

pytestmark = [pytest.mark.once, pytest.mark.thorough]


@pytest.fixture(scope="class")
def engine(citus_database: CitusDatabase) -> Iterator[sa.Engine]:
    with schema_in(citus_database, sharded=False) as own, engine_of(own) as engine:
        yield engine


class TestUpdateStatusOnTheCoordinator(StrategyConformance):
    strategy = "update_status"


class TestDeleteReturningOnTheCoordinator(StrategyConformance):
    strategy = "delete_returning"


class TestBatchSelectOnTheCoordinator(StrategyConformance):
    strategy = "batch_select"
