"""When a waiter notifies Consumers and reads the job's row, with a clock of its own and without a database."""

from __future__ import annotations

import itertools

import pytest

from sqlaqueue.notify_payloads import Payload, Pending, Settled, WaitRequest
from sqlaqueue.waiting.wait import FIRST_DELAY, MAX_DELAY, MAX_DELAY_NOT_LISTENING, NOTIFY_INTERVAL, WaitState

pytestmark = pytest.mark.once


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def new_state(clock: Clock, name: str = "5", timeout: float | None = None) -> WaitState:
    return WaitState(name, lambda: None, timeout, now=clock, draw=lambda: 0.5)


def listening(clock: Clock, timeout: float | None = None) -> WaitState:
    """Return a state that has received its notification, and polled."""
    state = new_state(clock, timeout=timeout)
    assert state.take_notification()
    state.receive(state.notification)
    assert state.take_poll()
    state.not_settled()
    return state


def test_it_announces_immediately_and_then_at_intervals(clock: Clock) -> None:
    state = new_state(clock)
    assert state.seconds_until_due() == 0
    assert state.take_notification()
    assert not state.take_notification()
    state.receive(state.notification)
    clock.now += NOTIFY_INTERVAL - 1
    state.take_notification()
    notified = 0
    for _ in range(100):
        clock.now += 1
        notified += state.take_notification()
    assert notified == 100 // NOTIFY_INTERVAL


def test_the_delay_between_unanswered_announcements_grows(clock: Clock) -> None:
    state, times = new_state(clock), []
    for _ in range(10_000):
        if state.take_notification():
            times.append(clock.now)
        clock.now += 0.01
    between = [second - first for first, second in itertools.pairwise(times)]
    assert between == sorted(between)
    assert between[0] <= 3 * FIRST_DELAY
    assert max(between) <= NOTIFY_INTERVAL + 0.02


def test_it_polls_after_its_own_notification_and_when_the_job_is_settled(clock: Clock) -> None:
    state = new_state(clock)
    assert not state.take_poll()
    state.receive(state.notification)
    assert state.seconds_until_due() == 0
    assert state.take_poll()
    state.not_settled()
    assert not state.take_poll()
    state.receive(Settled(["4", "5"]))
    assert state.take_poll()
    assert not state.take_poll()


def test_a_notification_during_a_poll_makes_another_one_due(clock: Clock) -> None:
    state = listening(clock)
    clock.now += MAX_DELAY
    assert state.take_poll()
    state.receive(Settled(["5"]))
    state.not_settled()
    assert state.seconds_until_due() == 0
    assert state.take_poll()


@pytest.mark.parametrize(
    "payload", [Settled(["55"]), Settled(["4"]), Settled([]), WaitRequest("x", ["5"]), Pending("5", 1)], ids=str
)
def test_notifications_about_other_jobs_are_ignored(clock: Clock, payload: Payload) -> None:
    state = listening(clock)
    state.receive(payload)
    assert state.seconds_until_due() > 0


@pytest.mark.parametrize(("is_listening", "longest"), [(True, MAX_DELAY), (False, MAX_DELAY_NOT_LISTENING)])
def test_the_delay_between_polls_grows_up_to_a_limit(clock: Clock, is_listening: bool, longest: float) -> None:  # noqa: FBT001 - a parameter
    state = listening(clock) if is_listening else new_state(clock)
    state.notifies = False
    pauses = []
    for _ in range(100):
        pauses.append(state.seconds_until_due())
        clock.now += pauses[-1]
        assert state.take_poll()
        state.not_settled()
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(FIRST_DELAY)
    assert pauses[-1] == pytest.approx(longest)
    assert len([pause for pause in pauses if pause < longest]) < 20


def test_the_delay_between_polls_is_short_after_a_notification(clock: Clock) -> None:
    state = listening(clock)
    state.notifies = False
    clock.now += 1000
    state.not_settled()
    state.receive(Settled(["5"]))
    assert state.take_poll()
    state.not_settled()
    assert state.seconds_until_due() == pytest.approx(FIRST_DELAY)


def test_the_timeout_ends_the_wait_after_a_last_poll(clock: Clock) -> None:
    state = listening(clock, timeout=3)
    clock.now += 2.9
    state.not_settled()
    assert state.seconds_until_due() == pytest.approx(0.1)
    assert not state.timed_out
    clock.now += 0.1
    assert state.timed_out
    assert state.take_poll(), "once more"


def test_it_announces_again_when_the_listener_is_lost(clock: Clock) -> None:
    state = listening(clock)
    assert state.listening
    state.listening_lost()
    assert not state.listening
    assert state.take_notification()


def test_a_key_too_long_for_a_notification_is_only_polled(clock: Clock) -> None:
    state = new_state(clock, "x" * 8000)
    assert not state.notifies
    assert not state.take_notification()
    assert state.seconds_until_due() > 0
