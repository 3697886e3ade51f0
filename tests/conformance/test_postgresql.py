"""PostgreSQL carries all strategies."""

from __future__ import annotations

from sqlaqueue.testing import StrategyConformance
from tests.strategies.conftest import class_engine as engine

__all__ = ["engine"]


class TestUpdateStatus(StrategyConformance):
    strategy = "update_status"


class TestBatchSelect(StrategyConformance):
    strategy = "batch_select"


class TestDeleteReturning(StrategyConformance):
    strategy = "delete_returning"


class TestRowsThatAreTheirOwnMessage(StrategyConformance):
    strategy = "delete_returning"
    columns = {"status": None}  # noqa: RUF012 - declared by the base class
