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

import pytest

# Before their first import; otherwise failed assertions do not show their values.
pytest.register_assert_rewrite(f"{__name__}.suite", f"{__name__}.queue_under_test", f"{__name__}.gate")

from sqlaqueue.testing.conformance.gate import Gate  # noqa: E402 - see above
from sqlaqueue.testing.conformance.queue_under_test import QueueUnderTest  # noqa: E402 - see above
from sqlaqueue.testing.conformance.strategy_conformance import StrategyConformance  # noqa: E402 - see above

__all__ = ["Gate", "QueueUnderTest", "StrategyConformance"]
