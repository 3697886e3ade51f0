"""Queues with a caller that waits for a job. Nothing polls unless a test is about that."""

from __future__ import annotations

from typing import Any

import pytest

from sqlaqueue.consumer import pace
from sqlaqueue.waiting import wait
from tests.consumer.bench import LATER, Bench
from tests.consumer.conftest import MIXED

ALL = [*MIXED, ("own_message", "sync")]


@pytest.fixture(params=ALL, ids="-".join)
def mixed(request: pytest.FixtureRequest, supply: Any) -> Bench:
    """Each strategy, also with rows that are messages, sync and async."""
    return supply.take(*request.param)


@pytest.fixture
def leased(supply: Any) -> Bench:
    return supply.take("update_status", "sync")


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is listening, a waiting caller polls only after notifications."""
    monkeypatch.setattr(pace, "RESCUE", LATER)
    monkeypatch.setattr(wait, "MAX_DELAY", LATER)
    not_settled = wait.WaitState.not_settled

    def no_next_poll(self: wait.WaitState) -> None:
        not_settled(self)
        if self.listening:
            self._poll_at = self._now() + LATER

    monkeypatch.setattr(wait.WaitState, "not_settled", no_next_poll)
