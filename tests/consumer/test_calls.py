"""Who looks for a job when: the ear of a Consumer, without a database and with a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from sqlaqueue.consumer.notifications.poll_schedule import (
    MOST,
    MOST_OPEN,
    MOST_TICKETS,
    PATIENCE,
    STAGGER,
    Calls,
)
from sqlaqueue.payloads import ALL_JOBS, Claimed, parse

pytestmark = pytest.mark.once

POLL = 7.0
NET = 5 * POLL
"""Seconds until each of five looks by itself."""


def taken(jobs: int, ids: Sequence[str]) -> str:
    return str(Claimed(jobs, ids))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def hearing(clock: Clock, me: str, *others: str, share: int = 1) -> Calls:
    """Return an ear that has heard itself, and looked."""
    calls = Calls(me, lambda: POLL, lambda: None, lambda: None, share=lambda: share, now=clock)
    calls.listens = True
    calls.checks_in(news=True)
    calls.checked_in([me, *others], 0.0)
    send(calls, f"heartbeat {me}")
    calls.see_ahead([], all_of_them=True)
    calls.begin_look()
    calls.looked(more=False)
    return calls


@pytest.fixture
def crowd(clock: Clock) -> list[Calls]:
    names = [f"c{number}" for number in range(5)]
    return [hearing(clock, name, *names) for name in names]


def waits(crowd: list[Calls], clock: Clock) -> list[float]:
    """Return after how many seconds each will look, the first one first."""
    return sorted(round(calls.next_look() - clock.now, 6) for calls in crowd)


def send(calls: Calls, text: str) -> None:
    payload = parse(text)
    assert payload is not None
    calls.receive(payload)


def tell(crowd: list[Calls], text: str) -> None:
    for calls in crowd:
        send(calls, text)


def turns(first: int, last: int) -> Iterator[float]:
    return (round(turn * STAGGER, 6) for turn in range(first, last))


def test_one_after_the_other_looks_for_a_job(crowd: list[Calls], clock: Clock) -> None:
    tell(crowd, "pending 4711 1 0")
    assert waits(crowd, clock) == [*turns(0, 5)]


def test_as_many_look_at_once_as_there_are_jobs(crowd: list[Calls], clock: Clock) -> None:
    tell(crowd, "pending 4711 2 0")
    assert waits(crowd, clock) == [0, 0, STAGGER, STAGGER, 2 * STAGGER]


def test_one_looks_for_as_many_as_it_takes_at_once(clock: Clock) -> None:
    names = [f"c{number}" for number in range(5)]
    crowd = [hearing(clock, name, *names, share=10) for name in names]
    tell(crowd, "pending 1 10 0")
    assert waits(crowd, clock) == [*turns(0, 5)]
    tell(crowd, "claimed 10 1")
    tell(crowd, "pending 2 11 0")
    assert waits(crowd, clock) == [0, 0, STAGGER, STAGGER, 2 * STAGGER]


def test_it_is_another_one_s_turn_with_another_ticket(crowd: list[Calls], clock: Clock) -> None:
    first = set()
    for ticket in range(50):
        tell(crowd, f"pending {ticket} 1 0")
        first.add(min(range(5), key=lambda number: crowd[number].next_look()))
        for calls in crowd:
            calls.begin_look()
    assert first == {0, 1, 2, 3, 4}


def test_nobody_looks_for_what_is_taken(crowd: list[Calls], clock: Clock) -> None:
    tell(crowd, "pending 4711 1 0")
    tell(crowd, taken(1, ["4711"]))
    assert waits(crowd, clock) == [NET] * 5


def test_others_look_for_the_rest(crowd: list[Calls], clock: Clock) -> None:
    tell(crowd, "pending 4711 10 0")
    tell(crowd, taken(4, ["4711"]))
    assert waits(crowd, clock) == [0] * 5
    tell(crowd, taken(6, ["4711"]))
    assert waits(crowd, clock) == [NET] * 5


def test_what_is_taken_is_counted_over_the_calls(crowd: list[Calls], clock: Clock) -> None:
    calls = crowd[0]
    for ticket in ("1", "2", "3"):
        send(calls, f"pending {ticket} 2 0")
    send(calls, taken(5, ["1", "2", "3"]))
    assert calls.begin_look().tickets == ["3"]


def test_several_statements_of_a_transaction_are_added_up(crowd: list[Calls]) -> None:
    calls = crowd[0]
    send(calls, "pending 4711 2 0")
    send(calls, "pending 4711 3 0")
    send(calls, taken(4, ["4711"]))
    assert calls.wants_look() or calls.begin_look().tickets == ["4711"]


def test_one_who_finds_nothing_spares_the_others(crowd: list[Calls], clock: Clock) -> None:
    tell(crowd, "pending 4711 3 0")
    look = crowd[0].begin_look()
    assert look.spares_others
    tell(crowd, taken(ALL_JOBS, look.tickets))
    assert waits(crowd[1:], clock) == [NET] * 4


def test_two_look_themselves(clock: Clock) -> None:
    calls = hearing(clock, "a", "b")
    send(calls, "pending 4711 1 0")
    assert not calls.begin_look().spares_others


def test_a_look_answers_all_calls(crowd: list[Calls], clock: Clock) -> None:
    tell(crowd, "pending 1 1 0")
    tell(crowd, "pending 2 1 0")
    assert sorted(crowd[3].begin_look().tickets) == ["1", "2"]
    crowd[3].looked(more=False)
    assert crowd[3].next_look() == clock.now + NET


def test_a_full_hand_looks_again(crowd: list[Calls], clock: Clock) -> None:
    crowd[0].looked(more=True)
    assert crowd[0].wants_look()
    crowd[0].begin_look()
    crowd[0].looked(more=False)
    assert crowd[0].next_look() == clock.now + NET


def test_the_deaf_poll_alone(clock: Clock) -> None:
    calls = Calls("me", lambda: POLL, lambda: None, lambda: None, now=clock)
    assert calls.wants_look(), "it looks at once"
    calls.checked_in(["a", "b"], 0.0)
    calls.looked(more=False)
    assert calls.next_look() == clock.now + POLL
    assert not calls.wants_outlook()
    assert calls.rank == 0, "it tends the queue by itself"


def test_a_job_for_later_is_looked_for_when_it_is_due(crowd: list[Calls], clock: Clock) -> None:
    tell(crowd, f"pending 4711 1 {clock.now + 3}")
    assert waits(crowd, clock) == [3] * 5, "until then nobody knows that it is not taken"
    clock.now += 3
    assert waits(crowd, clock) == [*turns(0, 5)]
    tell(crowd, taken(1, [f"4711@{clock.now}"]))
    assert waits(crowd, clock) == [NET - 3] * 5


def test_the_clock_of_the_database_counts(clock: Clock) -> None:
    calls = hearing(clock, "me")
    calls.checked_in(["me"], 500.0)
    send(calls, f"pending 4711 1 {clock.now + 500 + 3}")
    assert calls.next_look() == clock.now + 3


def test_one_whose_clock_is_late_hears_that_it_is_taken(crowd: list[Calls], clock: Clock) -> None:
    due = clock.now + 3
    tell(crowd, f"pending 4711 1 {due}")
    clock.now += 2.9
    tell(crowd, taken(1, [f"4711@{due}"]))
    assert waits(crowd, clock) == [round(NET - 2.9, 6)] * 5


def test_what_others_say_brings_no_look_forward(clock: Clock) -> None:
    calls = hearing(clock, "me")
    send(calls, f"pending 4711 1 {clock.now + 0.3}")
    send(calls, taken(1, ["another"]))
    assert calls.begin_look().tickets == []
    calls.looked(more=False)
    assert calls.next_look() == clock.now + 0.3


def test_more_of_a_statement_are_asked_for(clock: Clock) -> None:
    calls = hearing(clock, "me")
    send(calls, f"pending 4711 2 {clock.now + 3} more")
    assert not calls.wants_outlook()
    clock.now += 3
    assert calls.wants_look()
    assert calls.wants_outlook()
    calls.see_ahead([clock.now + 1, clock.now + 2], all_of_them=False)
    assert calls.wants_look(), "for what has come due before it was asked"
    calls.begin_look()
    calls.looked(more=False)
    assert calls.next_look() == clock.now + 1
    assert not calls.wants_outlook()
    clock.now += 2
    assert calls.wants_outlook()
    calls.see_ahead([], all_of_them=True)
    assert calls.until_outlook() == float("inf")


def test_too_many_for_later_are_asked_for(clock: Clock) -> None:
    calls = hearing(clock, "me")
    for number in range(MOST + 1):
        send(calls, f"pending {number} 1 {clock.now + 1 + number}")
    assert calls.next_look() == clock.now + 1
    assert 0 < calls.until_outlook() <= MOST


def test_too_many_at_once_are_one(clock: Clock) -> None:
    calls = hearing(clock, "a", "b", "c")
    for number in range(MOST_OPEN + 1):
        send(calls, f"pending {number} 1 0")
    assert calls.wants_look()
    send(calls, "pending x 1 0")
    assert len(calls.begin_look().tickets) <= MOST_TICKETS


def test_consumers_come_and_go(crowd: list[Calls], clock: Clock) -> None:
    assert sorted(calls.rank for calls in crowd) == [0, 1, 2, 3, 4]
    tell(crowd, "deregistered c0")
    assert [calls.crowd for calls in crowd[1:]] == [4] * 4
    assert sorted(calls.rank for calls in crowd[1:]) == [0, 1, 2, 3]
    tell(crowd, "heartbeat c9")
    assert [calls.crowd for calls in crowd[1:]] == [5] * 4


def test_whoever_comes_or_goes_during_a_check_in_is_not_mistaken(clock: Clock) -> None:
    calls = hearing(clock, "a", "b", "c")
    calls.checks_in(news=True)
    send(calls, "heartbeat d")
    send(calls, "deregistered c")
    calls.checked_in(["a", "b", "c"], 0.0)
    assert calls.crowd == 3
    send(calls, "deregistered d")
    send(calls, "deregistered b")
    assert calls.crowd == 1


def test_whoever_does_not_hear_itself_is_deaf(clock: Clock) -> None:
    calls = Calls("me", lambda: POLL, lambda: None, lambda: None, now=clock)
    calls.checks_in(news=True)
    assert calls.until_proof() == float("inf"), "nobody listens for it"
    calls.listens = True
    calls.checks_in(news=True)
    clock.now += 4
    calls.checks_in(news=True)
    assert calls.until_proof() == PATIENCE - 4, "since the first of them"
    send(calls, "heartbeat me")
    assert calls.hears
    assert calls.until_proof() == float("inf")
    clock.now += 1
    calls.checks_in(news=True)
    clock.now += 6
    assert calls.until_proof() == PATIENCE - 6
    calls.listening_lost()
    assert not calls.hears
    assert calls.wants_look(), "something may have been missed"


def test_whoever_has_heard_something_checks_in_quietly(clock: Clock) -> None:
    calls = Calls("me", lambda: POLL, lambda: None, lambda: None, now=clock)
    calls.listens = True
    assert calls.checks_in(news=True)
    clock.now += 1
    assert calls.checks_in(news=False), "it does not know whether it hears"
    send(calls, "heartbeat me")
    clock.now += 1
    assert calls.checks_in(news=True), "the others do not know that it does"
    send(calls, "heartbeat me")
    clock.now += 10
    assert not calls.checks_in(news=False)
    send(calls, "heartbeat you")
    clock.now += 10
    assert not calls.checks_in(news=False), "by the same way its own word would have come"
    assert calls.until_proof() == float("inf")
    clock.now += 10
    assert calls.checks_in(news=False), "it may have been deaf for as long"
    assert calls.until_proof() == PATIENCE


def test_the_keeper_is_told_what_concerns_it(clock: Clock) -> None:
    told: list[str] = []
    calls = Calls("me", lambda: POLL, lambda: None, lambda: told.append(said), now=clock)
    for said in (
        "heartbeat you",
        "heartbeat me",
        "rescued",
        "claimed 1 x",
        "pending x 1 0",
        "pending y 9 0 more",
        "cancel_requested",
        "poll",
    ):
        send(calls, said)
    assert told == ["heartbeat me", "pending y 9 0 more", "cancel_requested"]


def test_after_a_pause_all_look(crowd: list[Calls], clock: Clock) -> None:
    tell(crowd, "poll")
    assert waits(crowd, clock) == [0] * 5


def test_what_is_said_during_a_look_is_looked_at_after_it(crowd: list[Calls], clock: Clock) -> None:
    """The statement of that look may not have seen it."""
    first = crowd[0]
    first.begin_look()
    send(first, "poll")
    first.looked(more=False)
    assert first.wants_look()
    first.begin_look()
    first.looked(more=False)
    assert not first.wants_look()


def test_requests_to_stop_are_noted(crowd: list[Calls]) -> None:
    assert not crowd[0].asked_to_stop
    send(crowd[0], "cancel_requested")
    assert crowd[0].asked_to_stop


def test_a_sweep_of_another_is_as_good_as_ones_own(clock: Clock) -> None:
    told: list[float] = []
    pause: Callable[[int], float] = lambda rank: 3.0 + rank  # noqa: E731 - as the others here
    calls = Calls("b", lambda: POLL, lambda: None, lambda: told.append(clock.now), sweep=pause, now=clock)
    sweeps = calls.sweeps
    assert sweeps.is_due, "nobody may have looked for a while"
    sweeps.begin(calls.rank)
    assert not sweeps.is_due
    assert sweeps.until_due(hears=False) == 3
    calls.checked_in(["a", "b", "c"], 0.0)
    send(calls, "heartbeat b")
    told.clear()
    send(calls, "rescued")
    assert sweeps.until_due(hears=True) == float("inf"), "its ear is awake, and its keeper need not be"
    clock.now += 3
    assert calls.until_overdue() == 1, "the second of three"
    send(calls, "rescued")
    assert calls.until_overdue() == 4
    clock.now += 4
    assert calls.until_overdue() == 0
    assert not told
    calls.notification_overdue()
    assert told == [clock.now]
    assert sweeps.until_due(hears=True) == 0
    assert calls.until_overdue() == float("inf"), "it is not told again of the same"
    sweeps.begin(calls.rank)
    assert sweeps.until_due(hears=True) == 4, "it has not been heard: the keeper counts on itself"
    send(calls, "rescued")
    assert sweeps.until_due(hears=True) == float("inf")
    assert calls.until_overdue() == 4


def test_where_nothing_is_leased_nobody_sweeps(clock: Clock) -> None:
    calls = hearing(clock, "me")
    send(calls, "rescued")
    assert not calls.sweeps.is_due
    assert calls.until_overdue() == float("inf")
