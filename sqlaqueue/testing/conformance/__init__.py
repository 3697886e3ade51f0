"""The conformance suite: tests a claim strategy against its contract.

Name the strategy, provide a fixture ``engine`` of scope class or wider, and run the class with pytest. The engine needs
a pool of 12 connections, and a database in which tables named ``conformance_*`` can be created and dropped::

    import pytest
    from sqlalchemy import create_engine
    from sqlaqueue.testing import StrategyConformance

    @pytest.fixture(scope="session")
    def engine():
        engine = create_engine("postgresql+psycopg://localhost/test", pool_size=12)
        yield engine
        engine.dispose()

    class TestMine(StrategyConformance):
        strategy = "mine"

Tests use the public verbs and the listing for operators, on real sessions and connections. They wait for conditions
and never for a fixed time, so a slow machine makes them slow and not wrong.

Only this package and the pytest plug-in need pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

# Before their first import; otherwise failed assertions do not show their values.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module}" for module in ("claims", "engines", "jobs", "queue_under_test", "runs"))
)

from sqlaqueue.strategies import ClaimStrategy  # noqa: E402 - after their registration
from sqlaqueue.testing.conformance.claims import (  # noqa: E402 - after their registration
    ClaimConformance,
    ConcurrencyConformance,
    LockConformance,
    QueryPlanConformance,
)
from sqlaqueue.testing.conformance.engines import Exemption, Gate  # noqa: E402 - after their registration
from sqlaqueue.testing.conformance.jobs import (  # noqa: E402 - after their registration
    EnqueueConformance,
    ListingConformance,
    MaintenanceConformance,
)
from sqlaqueue.testing.conformance.queue_under_test import QueueUnderTest, concerns, traits_of  # noqa: E402 - after their registration
from sqlaqueue.testing.conformance.runs import LeaseConformance, SettlementConformance  # noqa: E402 - after their registration

__all__ = ["Gate", "QueueUnderTest", "StrategyConformance"]


class StrategyConformance(
    ClaimConformance,
    LockConformance,
    ConcurrencyConformance,
    SettlementConformance,
    LeaseConformance,
    MaintenanceConformance,
    ListingConformance,
    EnqueueConformance,
    QueryPlanConformance,
):
    """Subclass it and name the strategy; pytest tests it with a single-column key and with a composite key.

    ::

        class TestMyStrategy(StrategyConformance):
            strategy = "update_status"  # the name in your entry point
    """

    strategy: ClassVar[str | ClaimStrategy]
    """The strategy as ``QueueConfig(strategy=...)`` takes it."""

    columns: ClassVar[Mapping[str, str | None]] = {}
    """The value of ``QueueConfig(columns=...)``.

    ``{"status": None}`` is for a strategy that deletes rows; the suite then sets ``rows_are_messages=True``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Remove the tests of features that this kind of strategy does not have, such as leases."""
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "strategy"):
            traits = traits_of(cls.strategy, cls.columns)
            for name in dir(cls):
                if not concerns(getattr(cls, name), traits):
                    setattr(cls, name, None)

    @pytest.fixture(scope="class", params=["single-key", "composite-key"])
    @classmethod
    def tables(cls, engine: sa.Engine, request: pytest.FixtureRequest) -> Iterator[QueueUnderTest]:
        """Create the tables of a queue, and drop them after all tests."""
        composite = request.param == "composite-key"
        with QueueUnderTest(engine, cls.strategy, cls.columns, composite=composite) as queue:
            yield queue

    @pytest.fixture
    def queue(self, tables: QueueUnderTest, request: pytest.FixtureRequest) -> Iterator[QueueUnderTest]:
        """Return an empty queue, for a test that can hold on its engine."""
        reason = reason_of(request.node, tables)
        if reason is not None and not reason.tried:
            pytest.skip(reason.why)
        tables.clear()
        if reason is None:
            yield tables
            return
        # The item's function, as a mark would have pytest format the traceback of each such test.
        request.node.obj = _must_fail(request.node.obj, reason.why)
        patience, tables.lock_timeout = tables.lock_timeout, 0.1
        yield tables
        tables.lock_timeout = patience


def _must_fail(test: Callable[..., None], reason: str) -> Callable[..., None]:
    """Return a test that is skipped if it fails, and fails if it passes."""

    @wraps(test)
    def tried(**arguments: Any) -> None:
        try:
            test(**arguments)
        except (AssertionError, SQLAlchemyError):
            pytest.skip(reason)
        pytest.fail(f"it holds after all; remove the reason: {reason}")

    return tried


def reason_of(node: Any, queue: QueueUnderTest) -> Exemption | None:
    """Return why a test cannot hold on the engine of a queue; None for a test that has to."""
    parameters = getattr(getattr(node, "callspec", None), "params", {})
    return queue.under_test.reason(getattr(node, "originalname", node.name), parameters)
