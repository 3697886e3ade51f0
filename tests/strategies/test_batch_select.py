from __future__ import annotations

from sqlaqueue.testing import StrategyConformance


class TestBatchSelect(StrategyConformance):
    strategy = "batch_select"
