"""MariaDB carries the strategy with leases only; ``tests/mariadb`` tests that it refuses the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

import sqlaqueue.mariadb
from sqlaqueue.testing import StrategyConformance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.mariadb.server import MariaDBServer

pytestmark = pytest.mark.once


@pytest.fixture(scope="class")
def engine(mariadb: MariaDBServer) -> Iterator[sa.Engine]:
    """Return an engine on a database that the tests of one class share."""
    with mariadb.database() as name:
        engine = sa.create_engine(mariadb.url(name), pool_size=12)
        sqlaqueue.mariadb.prepare(engine)
        yield engine
        engine.dispose()


class TestUpdateStatus(StrategyConformance):
    strategy = "update_status"
