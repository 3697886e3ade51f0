"""When Consumers poll and rescue, and which jobs callers wait for, without a database and with a clock of their own."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from sqlaqueue.consumer.notifications.polls import (
    FEW_NEIGHBOURS,
    JOIN_AFTER,
    MAX_JOBS,
    MOST_IDS,
    MOST_LATER,
    MOST_OPEN,
    PROOF_TIMEOUT,
    RETENTION,
    STAGGER,
    PollSchedule,
    WaiterRegistry,
)
from sqlaqueue.consumer.notifications.watch import FLOOD, HAND_OVER_AFTER, Watch
from sqlaqueue.notify_payloads import ALL_JOBS, Claimed, Heartbeat, Pending, Settled, Signal, WaitRequest, parse

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def rare_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlaqueue.consumer.notifications.polls.LONGEST_POLL", 60.0)


INTERVAL = 7.0
SHARED_INTERVAL = 5 * INTERVAL
"""Seconds until each of five Consumers polls without an announcement."""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_schedule(clock: Clock, me: str = "me") -> PollSchedule:
    return PollSchedule(me, lambda: INTERVAL, lambda: None, lambda: None, now=clock)


def listening(clock: Clock, me: str, *others: str, share: int = 1) -> PollSchedule:
    """Return the schedule of a Consumer that has received its own heartbeat, and polled."""
    polls = PollSchedule(me, lambda: INTERVAL, lambda: None, lambda: None, share=lambda: share, now=clock)
    polls.peers.subscribed = True
    polls.peers.begin_heartbeat(news=True)
    polls.heartbeat_sent([me, *others], 0.0)
    send(polls, f"heartbeat {me}")
    polls.add_upcoming([], complete=True, version=polls.version)
    polls.begin_poll()
    polls.polled(more=False)
    return polls


@pytest.fixture
def group(clock: Clock) -> list[PollSchedule]:
    """The schedules of five Consumers of one queue."""
    names = [f"c{number}" for number in range(5)]
    return [listening(clock, name, *names) for name in names]


def waits(group: list[PollSchedule], clock: Clock) -> list[float]:
    """Return after how many seconds each Consumer polls, the first one first."""
    return sorted(round(polls.next_poll() - clock.now, 6) for polls in group)


def send(polls: PollSchedule, text: str) -> None:
    payload = parse(text)
    assert payload is not None
    polls.receive(payload)


def send_all(group: list[PollSchedule], text: str) -> None:
    for polls in group:
        send(polls, text)


def claimed(jobs: int, ids: Sequence[str]) -> str:
    return str(Claimed(jobs, ids))


def staggered(first: int, last: int) -> Iterator[float]:
    return (round(place * STAGGER, 6) for place in range(first, last))


def test_one_consumer_after_the_other_polls_for_a_job(group: list[PollSchedule], clock: Clock) -> None:
    send_all(group, "pending 4711 1 0")
    assert waits(group, clock) == [*staggered(0, 5)]


def test_as_many_consumers_poll_at_once_as_there_are_jobs(group: list[PollSchedule], clock: Clock) -> None:
    send_all(group, "pending 4711 2 0")
    assert waits(group, clock) == [0, 0, STAGGER, STAGGER, 2 * STAGGER]


def test_one_consumer_polls_for_as_many_jobs_as_it_claims_at_once(clock: Clock) -> None:
    names = [f"c{number}" for number in range(5)]
    group = [listening(clock, name, *names, share=10) for name in names]
    send_all(group, "pending 1 10 0")
    assert waits(group, clock) == [*staggered(0, 5)]
    send_all(group, "claimed 10 1")
    send_all(group, "pending 2 11 0")
    assert waits(group, clock) == [0, 0, STAGGER, STAGGER, 2 * STAGGER]


def test_each_announcement_has_an_order_of_its_own(group: list[PollSchedule], clock: Clock) -> None:
    first = set()
    for announcement in range(50):
        send_all(group, f"pending {announcement} 1 0")
        first.add(min(range(5), key=lambda number: group[number].next_poll()))
        for polls in group:
            polls.begin_poll()
    assert first == {0, 1, 2, 3, 4}


def test_no_consumer_polls_for_claimed_jobs(group: list[PollSchedule], clock: Clock) -> None:
    send_all(group, "pending 4711 1 0")
    send_all(group, claimed(1, ["4711"]))
    assert waits(group, clock) == [SHARED_INTERVAL] * 5


def test_other_consumers_poll_for_the_rest(group: list[PollSchedule], clock: Clock) -> None:
    send_all(group, "pending 4711 10 0")
    send_all(group, claimed(4, ["4711"]))
    assert waits(group, clock) == [0] * 5
    send_all(group, claimed(6, ["4711"]))
    assert waits(group, clock) == [SHARED_INTERVAL] * 5


def process_of(number: int, clock: Clock) -> list[PollSchedule]:
    """Return the schedules of Consumers in one process, all of which wait."""
    names = [f"c{each}" for each in range(number)]
    process = [listening(clock, name, *names) for name in names]
    for polls in process:
        polls.neighbours, polls.waits = (lambda: process), 1
    return process


def test_few_consumers_of_a_process_poll_at_once(clock: Clock) -> None:
    process = process_of(10, clock)
    send_all(process, "pending 4711 5000 0")
    joins = [round(step * JOIN_AFTER, 6) for step in (1, 1, 2, 2, 2, 2, 3, 3)]
    assert waits(process, clock) == [0, 0, *joins]


def test_neighbours_wait_while_others_claim(clock: Clock) -> None:
    process = process_of(4, clock)
    send_all(process, "pending 4711 5000 0")
    process.sort(key=PollSchedule.next_poll)
    claiming, idle = process[:FEW_NEIGHBOURS], process[FEW_NEIGHBOURS:]
    for polls in claiming:
        polls.begin_poll()
        polls.waits = 0
    for moment in range(8):
        assert not any(polls.is_due() for polls in idle) or moment > 5
        clock.now += 0.05
        for polls in claiming:
            polls.polled(polls.begin_poll(), more=True, found=True)
    assert all(polls.is_due() for polls in idle), "the others may be too busy to claim all"


def test_a_claim_that_takes_long_counts_no_more(clock: Clock) -> None:
    process = process_of(4, clock)
    send_all(process, "pending 1 5000 0")
    process.sort(key=PollSchedule.next_poll)
    for polls in process[:FEW_NEIGHBOURS]:
        polls.begin_poll()
        polls.waits = 0
    clock.now += 0.6
    send_all(process, "pending 2 5000 0")
    assert all(polls.is_due() for polls in process[FEW_NEIGHBOURS:])


def test_who_has_just_claimed_polls_again(clock: Clock) -> None:
    process = process_of(4, clock)
    for polls in process:
        polls.polled(polls.begin_poll(), more=False, found=True)
    send_all(process, "pending 1 5000 0")
    assert waits(process, clock) == [0, 0, JOIN_AFTER, JOIN_AFTER]


def test_overlapping_polls_of_one_consumer(clock: Clock) -> None:
    polls, neighbour = process_of(2, clock)
    first = polls.begin_poll()
    clock.now += 0.1
    send(neighbour, "pending 1 5000 0")
    second = polls.begin_poll()
    clock.now += 0.1
    polls.polled(first, more=False, drained=True)
    assert neighbour.begin_poll().announcements == ["1"], "it came after that poll had begun"
    polls.polled(second, more=False, drained=True)


def test_a_due_time_that_precedes_the_commit(clock: Clock) -> None:
    polls, neighbour = process_of(2, clock)
    began = polls.begin_poll()
    clock.now += 0.05
    send(neighbour, f"pending 1 5000 {clock.now - 10}")
    neighbour.next_poll()
    polls.polled(began, more=False, drained=True)
    assert neighbour.begin_poll().announcements, "the poll may not have seen the job"


def test_one_poll_that_finds_no_more_serves_a_process(clock: Clock) -> None:
    process = process_of(3, clock)
    send_all(process, "pending 4711 5000 0")
    clock.now += 0.05
    began = process[0].begin_poll()
    clock.now += 0.01
    send_all(process, "pending 4712 5000 0")
    process[0].polled(began, more=False, found=True, drained=True)
    assert [polls.begin_poll().announcements for polls in process] == [["4712"]] * 3


def test_neighbours_poll_though_polls_are_asked_for_again_and_again(clock: Clock) -> None:
    process = process_of(4, clock)
    for _ in range(15):
        for polls in process:
            polls.poll_with_neighbours()
        clock.now += 0.01
    assert all(polls.is_due() for polls in process)


def test_a_poll_that_began_before_it_was_asked_for_does_not_answer(clock: Clock) -> None:
    process = process_of(3, clock)
    polls = process[0]
    polls.begin_poll()
    clock.now += 0.01
    for each in process:
        each.is_notified()
    polls.polled(more=False, drained=True)
    assert not any(each.has_answered() for each in process)
    clock.now += 0.1
    polls.polled(polls.begin_poll(), more=False, drained=True)
    assert all(each.has_answered() for each in process)


def test_claimed_jobs_are_counted_over_announcements(group: list[PollSchedule], clock: Clock) -> None:
    polls = group[0]
    for announcement in ("1", "2", "3"):
        send(polls, f"pending {announcement} 2 0")
    send(polls, claimed(5, ["1", "2", "3"]))
    assert polls.begin_poll().announcements == ["3"]


def test_the_announcements_of_one_transaction_are_added_up(group: list[PollSchedule]) -> None:
    polls = group[0]
    send(polls, "pending 4711 2 0")
    send(polls, "pending 4711 3 0")
    send(polls, claimed(4, ["4711"]))
    assert polls.is_due() or polls.begin_poll().announcements == ["4711"]


def test_a_poll_that_finds_nothing_spares_the_others(group: list[PollSchedule], clock: Clock) -> None:
    send_all(group, "pending 4711 3 0")
    poll = group[0].begin_poll()
    assert poll.spares_others
    send_all(group, claimed(ALL_JOBS, poll.announcements))
    assert waits(group[1:], clock) == [SHARED_INTERVAL] * 4


def test_of_two_consumers_each_polls(clock: Clock) -> None:
    polls = listening(clock, "a", "b")
    send(polls, "pending 4711 1 0")
    assert not polls.begin_poll().spares_others


def test_a_poll_answers_all_announcements(group: list[PollSchedule], clock: Clock) -> None:
    send_all(group, "pending 1 1 0")
    send_all(group, "pending 2 1 0")
    assert sorted(group[3].begin_poll().announcements) == ["1", "2"]
    group[3].polled(more=False)
    assert group[3].next_poll() == clock.now + SHARED_INTERVAL


def test_a_full_claim_is_followed_by_another_poll(group: list[PollSchedule], clock: Clock) -> None:
    group[0].polled(more=True)
    assert group[0].is_due()
    group[0].begin_poll()
    group[0].polled(more=False)
    assert group[0].next_poll() == clock.now + SHARED_INTERVAL


def test_a_consumer_that_is_not_listening_polls_by_itself(clock: Clock) -> None:
    polls = make_schedule(clock)
    assert polls.is_due(), "it polls at once"
    polls.heartbeat_sent(["a", "b"], 0.0)
    polls.polled(more=False)
    assert polls.next_poll() == clock.now + INTERVAL
    assert not polls.wants_upcoming()
    assert polls.peers.rank == 0, "it does the maintenance by itself"


def test_a_job_for_later_is_polled_for_when_it_is_due(group: list[PollSchedule], clock: Clock) -> None:
    send_all(group, f"pending 4711 1 {clock.now + 3}")
    assert waits(group, clock) == [3] * 5, "until then it may be claimed"
    clock.now += 3
    assert waits(group, clock) == [*staggered(0, 5)]
    send_all(group, claimed(1, [f"4711@{clock.now}"]))
    assert waits(group, clock) == [SHARED_INTERVAL - 3] * 5


def test_due_times_are_by_the_clock_of_the_database(clock: Clock) -> None:
    polls = listening(clock, "me")
    polls.heartbeat_sent(["me"], 500.0)
    send(polls, f"pending 4711 1 {clock.now + 500 + 3}")
    assert polls.next_poll() == clock.now + 3


def test_a_job_may_be_claimed_before_it_is_due_by_a_late_clock(group: list[PollSchedule], clock: Clock) -> None:
    due = clock.now + 3
    send_all(group, f"pending 4711 1 {due}")
    clock.now += 2.9
    send_all(group, claimed(1, [f"4711@{due}"]))
    assert waits(group, clock) == [round(SHARED_INTERVAL - 2.9, 6)] * 5


def test_claims_of_other_jobs_bring_no_poll_forward(clock: Clock) -> None:
    polls = listening(clock, "me")
    send(polls, f"pending 4711 1 {clock.now + 0.3}")
    send(polls, claimed(1, ["another"]))
    assert polls.begin_poll().announcements == []
    polls.polled(more=False)
    assert polls.next_poll() == clock.now + 0.3


def test_due_times_that_were_not_announced_are_queried(clock: Clock) -> None:
    polls = listening(clock, "me")
    send(polls, f"pending 4711 2 {clock.now + 3} more")
    assert not polls.wants_upcoming()
    clock.now += 3
    assert polls.is_due()
    assert polls.wants_upcoming()
    polls.add_upcoming([clock.now + 1, clock.now + 2], complete=False, version=polls.version)
    assert polls.is_due(), "for jobs that became due before the query"
    polls.begin_poll()
    polls.polled(more=False)
    assert polls.next_poll() == clock.now + 1
    assert not polls.wants_upcoming()
    clock.now += 2
    assert polls.wants_upcoming()
    polls.add_upcoming([], complete=True, version=polls.version)
    assert polls.until_upcoming() == float("inf")


@pytest.mark.parametrize(
    "report",
    [PollSchedule.is_notified, PollSchedule.listening_lost, lambda polls: send(polls, "pending 4711 2 0 more")],
)
def test_due_times_that_may_be_missing_from_a_query_are_queried_again(
    clock: Clock, report: Callable[[PollSchedule], object]
) -> None:
    polls = listening(clock, "me")
    asked = polls.version
    report(polls)
    polls.peers.received_heartbeat("me")
    polls.add_upcoming([], complete=True, version=asked)
    assert polls.wants_upcoming()


def test_due_times_that_do_not_fit_are_queried_later(clock: Clock) -> None:
    polls = listening(clock, "me")
    for number in range(MOST_LATER + 1):
        send(polls, f"pending {number} 1 {clock.now + 1 + number}")
    assert polls.next_poll() == clock.now + 1
    assert 0 < polls.until_upcoming() <= MOST_LATER


def test_one_poll_answers_too_many_open_announcements(clock: Clock) -> None:
    polls = listening(clock, "a", "b", "c")
    for number in range(MOST_OPEN + 1):
        send(polls, f"pending {number} 1 0")
    assert polls.is_due()
    send(polls, "pending x 1 0")
    assert len(polls.begin_poll().announcements) <= MOST_IDS


def test_consumers_come_and_go(group: list[PollSchedule], clock: Clock) -> None:
    assert sorted(polls.peers.rank for polls in group) == [0, 1, 2, 3, 4]
    send_all(group, "deregistered c0")
    assert [polls.peers.count for polls in group[1:]] == [4] * 4
    assert sorted(polls.peers.rank for polls in group[1:]) == [0, 1, 2, 3]
    send_all(group, "heartbeat c0")
    assert [polls.peers.count for polls in group[1:]] == [5] * 4, "it was a mistake, or a forgery"
    send_all(group, "heartbeat c9")
    assert [polls.peers.count for polls in group[1:]] == [5] * 4, "it is not in the table"


def test_consumers_that_come_or_go_during_a_heartbeat_are_counted(clock: Clock) -> None:
    polls = listening(clock, "a", "b", "c")
    polls.peers.begin_heartbeat(news=True)
    send(polls, "heartbeat d")
    send(polls, "deregistered c")
    polls.heartbeat_sent(["a", "b", "c"], 0.0)
    assert polls.peers.count == 2
    polls.peers.begin_heartbeat(news=True)
    polls.heartbeat_sent(["a", "b", "d"], 0.0)
    assert polls.peers.count == 3
    send(polls, "deregistered d")
    send(polls, "deregistered b")
    assert polls.peers.count == 1


def test_forged_notifications_delay_no_poll(clock: Clock) -> None:
    """Every role of the database can send them."""
    polls = listening(clock, "me")
    for number in range(100):
        send(polls, f"heartbeat forged-{number}")
    assert (polls.peers.count, polls.peers.rank) == (1, 0)
    send(polls, "pending x 1 0")
    assert polls.is_due()
    send(polls, "claimed 1000000000 x")
    polls.polled(more=False)
    assert polls.next_poll() <= clock.now + INTERVAL
    for number in range(5_000):
        send(polls, f"deregistered forged-{number}")
    assert len(polls.peers._gone) <= 1_000


def test_a_consumer_that_misses_its_own_heartbeat_is_not_listening(clock: Clock) -> None:
    polls = make_schedule(clock)
    peers = polls.peers
    peers.begin_heartbeat(news=True)
    assert peers.until_proof() == float("inf"), "no listener is subscribed"
    peers.subscribed = True
    peers.begin_heartbeat(news=True)
    clock.now += 4
    peers.begin_heartbeat(news=True)
    assert peers.until_proof() == PROOF_TIMEOUT - 4, "since the first of them"
    send(polls, "heartbeat me")
    assert peers.listening
    assert peers.until_proof() == float("inf")
    clock.now += 1
    peers.begin_heartbeat(news=True)
    clock.now += 6
    assert peers.until_proof() == PROOF_TIMEOUT - 6
    polls.listening_lost()
    assert not peers.listening
    assert polls.is_due(), "notifications may have been missed"


def test_a_consumer_that_has_received_something_sends_no_notification(clock: Clock) -> None:
    polls = make_schedule(clock)
    peers = polls.peers
    peers.subscribed = True
    assert peers.begin_heartbeat(news=True)
    clock.now += 1
    assert peers.begin_heartbeat(news=False), "it does not know whether it is listening"
    send(polls, "heartbeat me")
    clock.now += 1
    assert peers.begin_heartbeat(news=True), "the others do not know that it is listening"
    send(polls, "heartbeat me")
    clock.now += 10
    assert not peers.begin_heartbeat(news=False)
    send(polls, "heartbeat you")
    clock.now += 10
    assert not peers.begin_heartbeat(news=False), "its own heartbeat would have come by the same connection"
    assert peers.until_proof() == float("inf")
    clock.now += 10
    assert peers.begin_heartbeat(news=False), "the connection may have been lost since then"
    assert peers.until_proof() == PROOF_TIMEOUT


def test_maintenance_is_woken_by_the_notifications_that_concern_it(clock: Clock) -> None:
    woken: list[str] = []
    polls = PollSchedule("me", lambda: INTERVAL, lambda: None, lambda: woken.append(text), now=clock)
    for text in (
        "heartbeat you",
        "heartbeat me",
        "claimed 1 x",
        "pending x 1 0",
        "pending y 9 0 more",
        "cancel_requested",
        "poll",
    ):
        send(polls, text)
    assert woken == ["heartbeat you", "heartbeat me", "pending y 9 0 more", "cancel_requested"]


def test_all_consumers_poll_after_a_pause(group: list[PollSchedule], clock: Clock) -> None:
    send_all(group, "poll")
    assert waits(group, clock) == [0] * 5


def test_a_notification_during_a_poll_causes_another_one(group: list[PollSchedule], clock: Clock) -> None:
    """The statement of the first poll may have begun too early."""
    first = group[0]
    first.begin_poll()
    send(first, "poll")
    first.polled(more=False)
    assert first.is_due()
    first.begin_poll()
    first.polled(more=False)
    assert not first.is_due()


def test_requests_to_cancel_are_noted(group: list[PollSchedule]) -> None:
    assert not group[0].cancellation_requested
    send(group[0], "cancel_requested")
    assert group[0].cancellation_requested


def test_an_unknown_consumer_is_looked_for_now_and_then(clock: Clock) -> None:
    polls = listening(clock, "me")
    clock.now += 1
    polls.peers.begin_heartbeat(news=False)
    polls.heartbeat_sent(["me", "a"], 0.0)
    send(polls, "heartbeat a")
    assert polls.peers.until_look() == float("inf")
    clock.now += 2
    for number in range(9):
        send(polls, f"heartbeat b{number}")
    assert polls.peers.until_look() == 3
    polls.peers.begin_heartbeat(news=False)
    polls.heartbeat_sent(["me", "a", "b1"], 0.0)
    assert (polls.peers.until_look(), polls.peers.count) == (float("inf"), 3)


# -- when a Consumer rescues, without a database and with a clock of its own ---------------------------------------
NEVER = float("inf")


@pytest.fixture
def woken(clock: Clock) -> list[float]:
    """When the maintenance loop was woken."""
    return []


@pytest.fixture
def polls(clock: Clock, woken: list[float]) -> PollSchedule:
    """The schedule of the second of three Consumers, which rescue after 3, 4 and 5 seconds."""
    polls = PollSchedule(
        "b", lambda: 7.0, lambda: None, lambda: woken.append(clock.now), rescue=lambda rank: 3.0 + rank, now=clock
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


# -- the registry of jobs for which callers wait, without a database and with a clock of its own -------------------


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


# -- who watches a queue -----------------------------------------------------------------------------------------------


@pytest.fixture
def watched(clock: Clock) -> tuple[Watch, PollSchedule]:
    """A watch that has just got both locks, and the schedule of its Consumer, which begins the poll that follows."""
    watch, schedule = Watch("channel", now=clock), listening(clock, "me")
    watch.schedules.append(schedule)
    with schedule.waiting():
        assert watch.statement() is not None
        watch.answered("notified")
    assert schedule.is_due()
    schedule.begin_poll()
    return watch, schedule


def test_who_begins_to_be_notified_needs_a_poll_that_leaves_no_job(
    watched: tuple[Watch, PollSchedule], clock: Clock
) -> None:
    watch, schedule = watched
    schedule.polled(more=True, found=True)
    with schedule.waiting():
        assert watch.statement() is None
        assert watch.until_due() < float("inf"), "there may be jobs that were not announced"
        schedule.begin_poll()
        schedule.polled(more=False)
        assert watch.statement() is None
    clock.now += 60
    assert watch.until_due() == float("inf"), "all jobs are announced, to other Consumers as well"
    assert watch.mode == "notified"


def test_who_has_no_capacity_for_that_poll_hands_over(watched: tuple[Watch, PollSchedule], clock: Clock) -> None:
    watch, schedule = watched
    schedule.polled(more=True, found=True)
    clock.now += HAND_OVER_AFTER / 2
    assert watch.statement() is None
    clock.now += HAND_OVER_AFTER
    statement = watch.statement()
    assert watch.mode == "away"
    assert str(statement).count("pg_advisory_unlock") == 2
    assert str(Signal.UNWATCHED) in str(statement)


def test_a_flood_ends_with_one_poll_that_finds_nothing(clock: Clock) -> None:
    watch, process = Watch("channel", now=clock), process_of(3, clock)
    watch.schedules = process
    assert watch.statement() is not None
    watch.answered("notified")
    process[0].begin_poll()
    process[0].polled(more=False, drained=True)
    assert watch.statement() is None
    for number in range(FLOOD):
        watch.received(Pending(str(number), 1, 0.0))
    assert "unlock" in str(watch.statement())
    watch.answered(None)
    clock.now += 1
    assert watch.statement() is None, "it polls"
    process[0].begin_poll()
    process[0].polled(more=False, drained=True)
    clock.now += 1
    assert "pg_try_advisory_lock" in str(watch.statement()), "it tries to be notified again"


def test_who_hears_that_nobody_watches_tries_at_once(clock: Clock) -> None:
    watch, schedule = Watch("channel", now=clock), listening(clock, "me")
    watch.schedules.append(schedule)
    with schedule.waiting():
        assert watch.statement() is not None
        watch.answered("watched")
        assert watch.statement() is None
        watch.received(Signal.UNWATCHED)
        assert watch.until_due() < 0.01
