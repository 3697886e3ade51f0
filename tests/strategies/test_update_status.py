from __future__ import annotations

from sqlaqueue.testing import StrategyConformance


class TestUpdateStatus(StrategyConformance):
    strategy = "update_status"
