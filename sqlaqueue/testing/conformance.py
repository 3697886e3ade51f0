"""The suite as one class, put together from its topics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest
import sqlalchemy as sa

from sqlaqueue.strategies import ClaimStrategy
from sqlaqueue.testing.claiming import ClaimingConformance
from sqlaqueue.testing.enqueueing import EnqueueingConformance
from sqlaqueue.testing.leasing import LeasingConformance
from sqlaqueue.testing.locking import LockingConformance
from sqlaqueue.testing.planning import PlanningConformance
from sqlaqueue.testing.queue import QueueUnderTest
from sqlaqueue.testing.racing import RacingConformance
from sqlaqueue.testing.settling import SettlingConformance
from sqlaqueue.testing.tending import TendingConformance


class StrategyConformance(
    ClaimingConformance,
    LockingConformance,
    RacingConformance,
    SettlingConformance,
    LeasingConformance,
    TendingConformance,
    EnqueueingConformance,
    PlanningConformance,
):
    """Subclass it, name the strategy, and pytest proves it, with a single and with a composite key."""

    strategy: ClassVar[str | ClaimStrategy]
    """The strategy as ``QueueConfig(strategy=...)`` takes it."""

    columns: ClassVar[Mapping[str, str | None]] = {}
    """What ``QueueConfig(columns=...)`` must say for this strategy, such as ``{"status": None}``."""

    @pytest.fixture(params=["single-key", "composite-key"])
    def queue(
        self, engine: sa.Engine, request: pytest.FixtureRequest
    ) -> Iterator[QueueUnderTest]:
        """Create the tables of an empty queue, and drop them in the end."""
        composite = request.param == "composite-key"
        with QueueUnderTest(engine, self.strategy, self.columns, composite=composite) as queue:
            yield queue
