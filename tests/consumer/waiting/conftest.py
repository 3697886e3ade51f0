"""Queues of which somebody waits for a job. Nobody polls here unless a test is about that."""

from __future__ import annotations

from typing import Any

import pytest

from sqlaqueue.consumer.claiming import batch_size
from sqlaqueue.waiting import wait_state
from tests.consumer.bench import Bench
from tests.consumer.conftest import MIXED
from tests.consumer.hearing import LATER

ALL = [*MIXED, ("own_message", "sync")]


@pytest.fixture(params=ALL, ids="-".join)
def mixed(request: pytest.FixtureRequest, supply: Any) -> Bench:
    """Each strategy, rows that are their own messages too, and each colour."""
    return supply.take(*request.param)


@pytest.fixture
def leased(supply: Any) -> Bench:
    return supply.take("update_status", "sync")


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits looks when it begins, and when it is told something; until it hears, as ever."""
    monkeypatch.setattr(batch_size, "SWEEP", LATER)
    monkeypatch.setattr(wait_state, "LONGEST_PAUSE", LATER)
    looked = wait_state.WaitState.looked

    def not_again(self: wait_state.WaitState) -> None:
        looked(self)
        if self.hears:
            self._look_at = self._now() + LATER

    monkeypatch.setattr(wait_state.WaitState, "looked", not_again)
