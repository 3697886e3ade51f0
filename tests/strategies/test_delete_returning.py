from __future__ import annotations

from sqlaqueue.testing import StrategyConformance


class TestDeleteReturning(StrategyConformance):
    strategy = "delete_returning"


class TestRowsThatAreTheirOwnMessage(StrategyConformance):
    strategy = "delete_returning"
    columns = {"status": None}  # noqa: RUF012 - declared by the base class
