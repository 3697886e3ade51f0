"""SQLite carries the strategy with leases only; ``tests/sqlite`` tests that it refuses the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

import sqlaqueue.sqlite
from sqlaqueue.testing import StrategyConformance

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.once


@pytest.fixture(scope="class")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sa.Engine]:
    """Return an engine on a file that the tests of one class share."""
    engine = sa.create_engine(f"sqlite:///{tmp_path_factory.mktemp('conformance') / 'jobs.db'}", pool_size=12)
    sqlaqueue.sqlite.prepare(engine)
    event.listen(engine, "connect", _do_not_sync)
    yield engine
    engine.dispose()


def _do_not_sync(connection: Any, _: object) -> None:
    # No test of the suite ends the machine.
    connection.execute("PRAGMA synchronous = OFF")


class TestUpdateStatus(StrategyConformance):
    strategy = "update_status"
