"""When a waiter announces itself and reads the job's row, with a clock of its own and without a database."""

from __future__ import annotations

import itertools

import pytest

from sqlaqueue.payloads import Payload, Pending, Settled, Wait
from sqlaqueue.waiting.wait_state import FIRST_PAUSE, LONGEST_DEAF_PAUSE, LONGEST_PAUSE, REPEAT, WaitState

pytestmark = pytest.mark.once


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def waiting(clock: Clock, name: str = "5", timeout: float | None = None) -> WaitState:
    return WaitState(name, lambda: None, timeout, now=clock, draw=lambda: 0.5)


def hearing(clock: Clock, timeout: float | None = None) -> WaitState:
    """Return one that has announced, been heard, and looked."""
    one = waiting(clock, timeout=timeout)
    assert one.wants_announcement()
    one.receive(one.announcement)
    assert one.wants_look()
    one.looked()
    return one


def test_it_announces_at_once_and_then_now_and_then(clock: Clock) -> None:
    one = waiting(clock)
    assert one.pause() == 0
    assert one.wants_announcement()
    assert not one.wants_announcement()
    one.receive(one.announcement)
    clock.now += REPEAT - 1
    one.wants_announcement()
    announced = 0
    for _ in range(100):
        clock.now += 1
        announced += one.wants_announcement()
    assert announced == 100 // REPEAT


def test_until_it_is_heard_it_announces_again_at_growing_distances(clock: Clock) -> None:
    one, times = waiting(clock), []
    for _ in range(10_000):
        if one.wants_announcement():
            times.append(clock.now)
        clock.now += 0.01
    between = [second - first for first, second in itertools.pairwise(times)]
    assert between == sorted(between)
    assert between[0] <= 3 * FIRST_PAUSE
    assert max(between) <= REPEAT + 0.02


def test_it_looks_when_it_is_heard_and_when_its_job_has_ended(clock: Clock) -> None:
    one = waiting(clock)
    assert not one.wants_look()
    one.receive(one.announcement)
    assert one.pause() == 0
    assert one.wants_look()
    one.looked()
    assert not one.wants_look()
    one.receive(Settled(["4", "5"]))
    assert one.wants_look()
    assert not one.wants_look()


def test_what_it_hears_while_it_looks_asks_for_another_look(clock: Clock) -> None:
    one = hearing(clock)
    clock.now += LONGEST_PAUSE
    assert one.wants_look()
    one.receive(Settled(["5"]))
    one.looked()
    assert one.pause() == 0
    assert one.wants_look()


@pytest.mark.parametrize(
    "payload", [Settled(["55"]), Settled(["4"]), Settled([]), Wait("x", ["5"]), Pending("5", 1)], ids=str
)
def test_what_others_wait_for_does_not_concern_it(clock: Clock, payload: Payload) -> None:
    one = hearing(clock)
    one.receive(payload)
    assert one.pause() > 0


@pytest.mark.parametrize(("hears", "longest"), [(True, LONGEST_PAUSE), (False, LONGEST_DEAF_PAUSE)])
def test_its_pauses_grow_with_the_time_that_it_waits(clock: Clock, hears: bool, longest: float) -> None:  # noqa: FBT001 - a parameter
    one = hearing(clock) if hears else waiting(clock)
    one.announces = False
    pauses = []
    for _ in range(100):
        pauses.append(one.pause())
        clock.now += pauses[-1]
        assert one.wants_look()
        one.looked()
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(FIRST_PAUSE)
    assert pauses[-1] == pytest.approx(longest)
    assert len([pause for pause in pauses if pause < longest]) < 20


def test_what_has_just_been_said_is_looked_for_more_often(clock: Clock) -> None:
    one = hearing(clock)
    one.announces = False
    clock.now += 1000
    one.looked()
    one.receive(Settled(["5"]))
    assert one.wants_look()
    one.looked()
    assert one.pause() == pytest.approx(FIRST_PAUSE)


def test_its_time_comes_to_an_end(clock: Clock) -> None:
    one = hearing(clock, timeout=3)
    clock.now += 2.9
    one.looked()
    assert one.pause() == pytest.approx(0.1)
    assert not one.is_over
    clock.now += 0.1
    assert one.is_over
    assert one.wants_look(), "once more"


def test_one_who_goes_deaf_announces_again(clock: Clock) -> None:
    one = hearing(clock)
    assert one.hears
    one.listening_lost()
    assert not one.hears
    assert one.wants_announcement()


def test_a_key_too_long_for_a_notification_is_only_looked_for(clock: Clock) -> None:
    one = waiting(clock, "x" * 8000)
    assert not one.announces
    assert not one.wants_announcement()
    assert one.pause() > 0
