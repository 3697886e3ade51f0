"""When a Consumer rescues, without a database and with a clock of its own."""

from __future__ import annotations

import pytest

from sqlaqueue.consumer.notifications.polls import PollSchedule
from sqlaqueue.notify_payloads import Heartbeat, Signal

pytestmark = pytest.mark.once

NEVER = float("inf")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def woken(clock: Clock) -> list[float]:
    """When the maintenance loop was woken."""
    return []


@pytest.fixture
def polls(clock: Clock, woken: list[float]) -> PollSchedule:
    """The schedule of the second of three Consumers, which rescue after 3, 4 and 5 seconds."""
    polls = PollSchedule(
        "b",
        lambda: 7.0,
        lambda: None,
        lambda: woken.append(clock.now),
        rescue=lambda rank: 3.0 + rank,
        now=clock,
    )
    polls.rescues.begin(rank=0)
    polls.peers.subscribed = True
    polls.peers.begin_heartbeat(news=True)
    polls.heartbeat_sent(["a", "b", "c"], 0.0)
    polls.receive(Heartbeat("b"))
    woken.clear()
    return polls


def test_a_consumer_rescues_when_it_starts(clock: Clock) -> None:
    polls = PollSchedule("me", lambda: 7.0, lambda: None, lambda: None, rescue=lambda _rank: 3.0, now=clock)
    assert polls.rescues.is_due, "no other one may be there"
    polls.rescues.begin(rank=0)
    assert not polls.rescues.is_due
    assert polls.rescues.until_due(listening=False) == 3


def test_a_rescue_of_another_consumer_postpones_the_next_one(polls: PollSchedule, clock: Clock) -> None:
    polls.receive(Signal.RESCUED)
    clock.now += 3
    assert polls.until_overdue() == 1, "the second of three"
    polls.receive(Signal.RESCUED)
    assert polls.until_overdue() == 4


def test_the_maintenance_loop_sleeps_while_notifications_arrive(
    polls: PollSchedule, clock: Clock, woken: list[float]
) -> None:
    polls.receive(Signal.RESCUED)
    assert polls.rescues.until_due(listening=True) == NEVER, "the listener watches the timer"
    clock.now += 4
    assert polls.until_overdue() == 0
    assert not woken
    polls.notification_overdue()
    assert woken == [clock.now]
    assert polls.rescues.until_due(listening=True) == 0
    assert polls.until_overdue() == NEVER, "it is woken once"


def test_a_rescue_whose_notification_does_not_arrive_is_repeated(polls: PollSchedule) -> None:
    polls.receive(Signal.RESCUED)
    polls.notification_overdue()
    polls.rescues.begin(rank=1)
    assert polls.rescues.until_due(listening=True) == 4, "the rescue may have failed"
    polls.receive(Signal.RESCUED)
    assert polls.rescues.until_due(listening=True) == NEVER
    assert polls.until_overdue() == 4


def test_without_leases_no_consumer_rescues(clock: Clock) -> None:
    polls = PollSchedule("me", lambda: 7.0, lambda: None, lambda: None, now=clock)
    polls.receive(Signal.RESCUED)
    assert not polls.rescues.is_due
    assert polls.until_overdue() == NEVER


def test_notifications_postpone_a_rescue_for_a_minute_at_most(polls: PollSchedule, clock: Clock) -> None:
    """Every role of the database can send them."""
    polls.rescues.begin(1)
    began = clock.now
    while not polls.rescues.is_due:
        clock.now += 1
        polls.receive(Signal.RESCUED)
        assert clock.now <= began + 60
    assert clock.now > began + 30
