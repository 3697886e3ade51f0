"""The conformance suite: proves that a claim strategy keeps its contract.

Name the strategy, provide a fixture ``engine``, and let pytest run the class. The fixture must live for a
class or longer; the engine needs a pool of a dozen connections, and a database in which tables named
``conformance_*`` may come and go::

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

Every test goes through the public verbs, or asks for the survey that an operator is shown, on real sessions and
connections. The suite waits for conditions, never for a span of time to prove something, so a slow machine makes it
slow and not wrong.

This package needs pytest; nothing else of sqlaqueue does.
"""

from __future__ import annotations

import pytest

_TOPICS = (
    "claiming",
    "enqueueing",
    "leasing",
    "locking",
    "planning",
    "queue",
    "racing",
    "settling",
    "surveying",
    "tending",
)
# Before any of them is imported, or their assertions fail without showing the values.
pytest.register_assert_rewrite(*(f"{__name__}.{topic}" for topic in _TOPICS))

from sqlaqueue.testing.conformance import StrategyConformance  # noqa: E402 - see above
from sqlaqueue.testing.gate import Gate  # noqa: E402 - see above
from sqlaqueue.testing.queue import QueueUnderTest  # noqa: E402 - see above

__all__ = ["Gate", "QueueUnderTest", "StrategyConformance"]
