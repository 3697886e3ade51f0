"""The registry of jobs for which callers wait, without a database and with a clock of its own."""

from __future__ import annotations

import pytest

from sqlaqueue.consumer.notifications.polls import MAX_JOBS, RETENTION, PollSchedule, WaiterRegistry
from sqlaqueue.notify_payloads import Settled, WaitRequest

pytestmark = pytest.mark.once


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> WaiterRegistry:
    return WaiterRegistry(now=clock)


def test_it_begins_empty(registry: WaiterRegistry) -> None:
    assert not registry
    assert registry.take(["1", "2"]) == []


def test_a_job_is_taken_once(registry: WaiterRegistry) -> None:
    registry.add(["5"])
    assert registry
    assert registry.take(["x", "5"]) == ["5"]
    assert registry.take(["5"]) == []


def test_a_job_that_was_not_announced_for_long_is_forgotten(registry: WaiterRegistry, clock: Clock) -> None:
    registry.add(["5"])
    clock.now += RETENTION
    assert registry.take(["5"]) == []


def test_the_number_of_jobs_is_bounded(registry: WaiterRegistry) -> None:
    registry.add(["first"])
    registry.add(["second"])
    registry.add(["first"])
    for number in range(MAX_JOBS - 1):
        registry.add([str(number)])
    assert registry.take(["second"]) == [], "it was announced longest ago"
    assert registry.take(["first", "0", str(MAX_JOBS - 2)]) == ["first", "0", str(MAX_JOBS - 2)]


def test_a_consumer_fills_it_from_notifications(registry: WaiterRegistry, clock: Clock) -> None:
    polls = PollSchedule("me", lambda: 7.0, lambda: None, lambda: None, waiters=registry, now=clock)
    polls.receive(WaitRequest("waiter", ["5", "6"]))
    assert registry.take(["5"]) == ["5"]
    polls.receive(Settled(["6"]))
    assert registry.take(["6"]) == [], "another Consumer has notified the waiter"
