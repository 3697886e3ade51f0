"""What waiters and Consumers say to each other, without a database and with a clock of their own."""

from __future__ import annotations

import json

import pytest

from sqlaqueue.consumer.notifications.poll_schedule import Calls
from sqlaqueue.consumer.notifications.waiter_registry import LONGEST_WORDS, MOST, REMEMBERED, Awaited, ended
from sqlaqueue.waiting.wait_state import WaitState

pytestmark = pytest.mark.once


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memory(clock: Clock) -> Awaited:
    return Awaited(now=clock)


def waiting(clock: Clock, name: str = "5", timeout: float | None = None) -> WaitState:
    return WaitState(name, lambda: None, timeout, now=clock, draw=lambda: 0.5)


# -- the memory of a Consumer -----------------------------------------------------------------------------------------


def test_nobody_waits(memory: Awaited) -> None:
    assert not memory
    assert memory.take(["1", "2"]) == []


@pytest.mark.parametrize("name", ["5", "two words", '["1", "a b"]', "ä\n\"'\\ \U0001f600", ""])
def test_for_whom_somebody_waits_is_told_once(memory: Awaited, clock: Clock, name: str) -> None:
    assert memory.hear(waiting(clock, name).words)
    assert memory
    assert memory.take(["x", name]) == [name]
    assert memory.take([name]) == []


def test_what_another_one_has_told_is_not_told_again(memory: Awaited, clock: Clock) -> None:
    memory.hear(waiting(clock).words)
    (words,) = ended(["5"])
    assert memory.hear(words)
    assert memory.take(["5"]) == []


def test_who_has_not_announced_for_long_is_forgotten(memory: Awaited, clock: Clock) -> None:
    memory.hear(waiting(clock).words)
    clock.now += REMEMBERED
    assert memory.take(["5"]) == []


def test_the_memory_has_an_end(memory: Awaited, clock: Clock) -> None:
    memory.hear(waiting(clock, "first").words)
    memory.hear(waiting(clock, "second").words)
    memory.hear(waiting(clock, "first").words)
    for number in range(MOST - 1):
        memory.hear(waiting(clock, str(number)).words)
    assert memory.take(["second"]) == [], "it was announced longest ago"
    assert memory.take(["first", "0", str(MOST - 2)]) == ["first", "0", str(MOST - 2)]


@pytest.mark.parametrize(
    "words", ["await", "await x", "await x {", "await x 5", "await x [5]", "ended", "ended [", "", "\0"]
)
def test_what_it_does_not_understand_is_let_pass(memory: Awaited, words: str) -> None:
    memory.hear(words)
    assert not memory


def test_consumers_hear_it_among_their_calls(memory: Awaited, clock: Clock) -> None:
    calls = Calls("me", lambda: 7.0, lambda: None, lambda: None, awaited=memory, now=clock)
    calls.hear(waiting(clock).words)
    assert memory.take(["5"]) == ["5"]


def test_many_ends_take_several_notifications() -> None:
    names = [str(number) * 20 for number in range(3000)]
    said = [*ended(names)]
    assert len(said) > 1
    assert all(len(words) <= LONGEST_WORDS + 10 for words in said)
    assert [name for words in said for name in json.loads(words.removeprefix("ended "))] == names
    assert [*ended([])] == []
