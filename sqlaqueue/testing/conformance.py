"""The suite as one class, put together from its topics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa

from sqlaqueue.strategies import ClaimStrategy
from sqlaqueue.testing.claiming import ClaimingConformance
from sqlaqueue.testing.enqueueing import EnqueueingConformance
from sqlaqueue.testing.leasing import LeasingConformance
from sqlaqueue.testing.locking import LockingConformance
from sqlaqueue.testing.planning import PlanningConformance
from sqlaqueue.testing.queue import QueueUnderTest, concerns, traits_of
from sqlaqueue.testing.racing import RacingConformance
from sqlaqueue.testing.settling import SettlingConformance
from sqlaqueue.testing.surveying import SurveyingConformance
from sqlaqueue.testing.tending import TendingConformance


class StrategyConformance(
    ClaimingConformance,
    LockingConformance,
    RacingConformance,
    SettlingConformance,
    LeasingConformance,
    TendingConformance,
    SurveyingConformance,
    EnqueueingConformance,
    PlanningConformance,
):
    """Subclass it, name the strategy, and pytest proves it, with a single and with a composite key."""

    strategy: ClassVar[str | ClaimStrategy]
    """The strategy as ``QueueConfig(strategy=...)`` takes it."""

    columns: ClassVar[Mapping[str, str | None]] = {}
    """What ``QueueConfig(columns=...)`` must say for this strategy.

    ``{"status": None}`` is for one that deletes the rows which it claims: ``rows_are_messages=True`` then goes with it.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leave out the tests of what this kind of strategy does not have, such as leases."""
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "strategy"):
            traits = traits_of(cls.strategy, cls.columns)
            for name in dir(cls):
                if not concerns(getattr(cls, name), traits):
                    setattr(cls, name, None)

    @pytest.fixture(scope="class", params=["single-key", "composite-key"])
    @classmethod
    def tables(cls, engine: sa.Engine, request: pytest.FixtureRequest) -> Iterator[QueueUnderTest]:
        """Create the tables of a queue, and drop them when all tests have run."""
        composite = request.param == "composite-key"
        with QueueUnderTest(engine, cls.strategy, cls.columns, composite=composite) as queue:
            yield queue

    @pytest.fixture
    def queue(self, tables: QueueUnderTest) -> QueueUnderTest:
        """Return an empty queue."""
        tables.clear()
        return tables
