"""A thread or task goes on in its session with jobs of other claims, and claims before it has run out of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import AsyncConsumer, Consumer, Retry
from sqlaqueue.consumer.claiming import batch_size, claim_jobs
from sqlaqueue.consumer.claiming.batch_size import FLUSH_AFTER, Pace
from sqlaqueue.consumer.claiming.claim_slot import Turn
from sqlaqueue.consumer.claiming.job_buffer import Crew
from sqlaqueue.consumer.core.events import EventEmitter
from sqlaqueue.consumer.notifications.poll_schedule import Calls
from sqlaqueue.consumer.settling.outcomes import COMPLETED, Ended
from sqlaqueue.postgresql.claims.planner import FEW
from sqlaqueue.queue.run import Run
from tests.consumer.bench import Bench, wait_until
from tests.consumer.models import models
from tests.consumer.test_arguments import async_handler, async_sessions, handler, sessions

LANES, BATCH = 2, 4
N = LANES + 7 * BATCH
"""The first claim is one job for each lane; all others are whole, and shared."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all handlers taken for slow, so that lanes share each claim."""
    monkeypatch.setattr(batch_size, "_ALONE", 0.0)
    monkeypatch.setattr(batch_size, "_AMONG_OTHERS", 0.0)


@pytest.mark.usefixtures("slow")
def test_each_lane_has_one_session(leased: Bench) -> None:
    leased.enqueue(N)
    seen: list[Any] = []

    async def work(hands: Any, job: Any) -> None:
        assert [*hands.session] == [job]
        seen.append(hands.session)

    assert leased.consumer(work, concurrency=LANES, batch_size=BATCH).drain() == N
    assert len(seen) == N
    assert len(set(map(id, seen))) <= LANES
    assert leased.states() == {"completed": N}


@pytest.mark.usefixtures("slow")
def test_a_session_that_was_used_is_not_used_again(leased: Bench) -> None:
    keys = leased.enqueue(N)
    writers, failing = set(keys[::3]), set(keys[1::3])
    seen: list[tuple[Any, int]] = []

    async def work(hands: Any, job: Any) -> None:
        seen.append((hands.session, job.id))
        if job.id in writers:
            await hands.execute(leased.effect(job.id))
        elif job.id in failing:
            await hands.execute(sa.select(leased.Effect))
            raise ValueError

    assert leased.consumer(work, concurrency=LANES, batch_size=BATCH, retry=lambda attempt, error: None).drain() == N
    jobs: dict[int, list[int]] = {}
    for session, key in seen:
        jobs.setdefault(id(session), []).append(key)
    assert all((writers | failing).isdisjoint(run[:-1]) for run in jobs.values())
    assert leased.effects() == dict.fromkeys(writers, 1)
    assert leased.states() == Counter(completed=N - len(failing), failed=len(failing))


@pytest.mark.usefixtures("slow")
def test_a_job_may_come_to_the_same_session_again(leased: Bench) -> None:
    leased.enqueue(N, payload="as it was")
    seen: list[tuple[int, int]] = []

    async def work(hands: Any, job: Any) -> None:
        assert job.payload == "as it was"
        seen.append((job.id, job.attempts))
        if job.attempts == 1:
            raise Retry(0)

    server = leased.consumer(work, concurrency=LANES, batch_size=BATCH)
    assert server.drain() == 2 * N
    assert len(set(seen)) == len(seen) == 2 * N
    assert server.told() == Counter(claimed=2 * N, retried=N, completed=N)


@pytest.mark.usefixtures("slow")
def test_a_claim_is_made_before_the_last_has_been_used_up(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two jobs done of twelve, a third claim of four is made, though three of the second one still wait."""
    monkeypatch.setattr(Pace, "ahead", lambda self: 3 if len(started) > lanes else 0)
    lanes, started = 4, list[int]()
    gates = {key: threading.Event() for key in leased.enqueue(3 * lanes)}

    async def work(hands: Any, job: Any) -> None:
        started.append(job.id)
        await hands.wait(gates[job.id])

    with leased.consumer(work, concurrency=lanes, batch_size=lanes).running() as server:
        for done, claimed in ((0, 4), (1, 8), (2, 12)):
            wait_until(lambda claimed=claimed: server.told()["claimed"] == claimed)
            wait_until(lambda done=done: len(started) >= lanes + done)
            gates[started[done]].set()
        for gate in gates.values():
            gate.set()
        wait_until(lambda: leased.states() == {"completed": 3 * lanes})


def test_as_many_are_claimed_ahead_as_are_done_during_a_claim() -> None:
    many, one, batches = (
        Pace(100, 50, 1.0),
        Pace(100, 1, 1.0),
        Pace(100, 50, 1.0, whole=True),
    )
    for each in (many, one, batches):
        assert each.ahead() == 0
        for _ in range(50):
            each.ended(0.1, quiet=True)
            each.claimed(0.02)
    # 500 a second.
    assert 8 <= many.ahead() <= 10
    assert one.ahead() == batches.ahead() == 0
    for _ in range(50):
        many.ended(60, quiet=True)
    assert many.ahead() == 0, "a job would wait here for minutes while other workers are idle"


@pytest.mark.usefixtures("slow")
def test_a_call_follows_another(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has made one takes further jobs, without putting its session and its task down in between."""
    monkeypatch.setattr(Pace, "ahead", lambda self: 0)
    hands_taken, take = list[Turn](), Turn.to_work

    def count(turn: Turn) -> Any:
        hand = take(turn)
        hands_taken.extend([turn] if hand else [])
        return hand

    monkeypatch.setattr(Turn, "to_work", count)
    leased.enqueue(N)
    assert leased.consumer(concurrency=LANES, batch_size=BATCH).drain() == N
    assert len(hands_taken) < N * 0.75


def test_nothing_follows_a_suspect() -> None:
    crew = make_crew()
    crew.fill([[object()], [object()]])
    assert crew.further_unit()
    crew.plan.suspects.begin((1,))
    assert not crew.further_unit()


# -- when what has ended is settled --------------------------------------------------------------------------------


def make_crew(*, concurrency: int = 10, duration: float = 0.1) -> Crew:
    consumer = Consumer(models("update_status").job, handler, sessions, concurrency=concurrency)
    its_pace = Pace(100, concurrency, 1.0)
    its_pace.ended(duration, quiet=True)
    calls = Calls("me", its_pace.poll, lambda: None, lambda: None)
    return Crew(consumer._plan, its_pace, EventEmitter(), lambda lanes: None, calls, lambda: None)


def ended(key: int) -> Ended:
    return Ended(Run((key,), None, 1, 5), COMPLETED)


def test_what_has_ended_waits_for_what_ends_soon() -> None:
    crew, now = make_crew(), time.monotonic()
    assert not crew.wants_settling(now)
    crew.finish([ended(1)])
    assert crew.wants_settling(now), "nothing else will end, nor be claimed"
    crew.plenty = True
    assert not crew.wants_settling(now), "the next claim settles it"
    assert crew.wants_settling(now + 2 * FLUSH_AFTER), "it does not come"
    crew.plenty = False
    crew.take_finished()
    crew.finish([ended(2)])
    assert not crew.wants_settling(now), "the first is being settled; those that end meanwhile go together"
    assert crew.wants_settling(now + 2 * FLUSH_AFTER), "that takes too long"


def test_what_has_ended_does_not_wait_for_what_takes_long() -> None:
    crew = make_crew(concurrency=2, duration=10 * FLUSH_AFTER)
    crew.plenty = True
    crew.finish([ended(1)])
    assert crew.wants_settling(time.monotonic())


# -- how many claim at once, and how much --------------------------------------------------------------------------


@pytest.mark.parametrize(("others", "at_once"), [(0, 2), (1, 2), (2, 1), (7, 1)])
def test_in_a_crowd_one_claims_at_a_time(others: int, at_once: int) -> None:
    """Several consumers keep the server busy by themselves, and each passes over what the others have locked."""
    crew = make_crew(duration=0.0)
    crew.plenty = True
    crew.calls.checked_in([f"other {number}" for number in range(others)], 0.0)
    assert [Turn(crew).to_claim() for _ in range(3)].count(True) == at_once


@pytest.mark.parametrize(
    ("strategy", "options", "first", "most"),
    [
        ("update_status", {}, 1, 500),
        ("update_status", {"concurrency": 4}, 4, 500),
        ("update_status", {"concurrency": 1000}, 1000, 1000),
        ("update_status", {"concurrency": 1000, "batch_size": 7}, 7, 7),
        ("update_status", {"batch": True}, 500, 500),
        ("delete_returning", {}, 1, 500),
        ("delete_returning", {"concurrency": 4}, 1, 500),
        ("delete_returning", {"batch_size": 7}, 7, 7),
        ("delete_returning", {"batch": True}, 500, 500),
    ],
)
def test_a_claim_is_large_where_handlers_are_quick(
    strategy: Any, options: dict[str, int], first: int, most: int
) -> None:
    model = models(strategy).job
    for consumer in (
        Consumer(model, handler, sessions, **options),
        AsyncConsumer(model, async_handler, async_sessions, **options),
    ):
        assert consumer._pace.claim_size() == first
        consumer._pace.ended(0.0001, calls=500, quiet=True)
        assert consumer._pace.claim_size() == most


def note_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note from now on how many jobs are claimed at most."""
    claim, sizes = claim_jobs.claim, list[int]()

    def note(session: Any, plan: Any, n: int, *arguments: Any) -> Any:
        sizes.append(n)
        return claim(session, plan, n, *arguments)

    monkeypatch.setattr(claim_jobs, "claim", note)
    return sizes


def test_a_consumer_asks_its_pace_how_much_to_claim(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do those that decide whether to come for a call; and it tells its pace how long that takes."""
    monkeypatch.setattr(Pace, "claim_size", lambda self, **_: 3)
    sizes = note_sizes(monkeypatch)
    bench.enqueue(9)
    with bench.consumer().running() as server:
        wait_until(lambda: bench.states() == {"completed": 9})
        assert server.consumer._shift.calls._share() == 3
    assert set(sizes) == {3}
    assert bench.held or server.consumer._pace._claim_took > 0


def test_many_are_claimed_when_a_few_were_not_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps its plan for a few jobs, which came from an empty table: it is no good for many."""
    sizes = note_sizes(monkeypatch)
    bench.enqueue(1)
    with bench.consumer().running():
        wait_until(lambda: bench.states() == {"completed": 1} and FEW in sizes)
        bench.enqueue(2 * FEW)
        wait_until(lambda: bench.states() == {"completed": 2 * FEW + 1})
    assert max(sizes[sizes.index(FEW) :]) > FEW


def test_a_transaction_is_short_where_handlers_are_slow() -> None:
    """Unless it was said how many jobs commit together."""
    model = models("batch_select").job
    usual, chosen = (
        Consumer(model, handler, sessions, concurrency=4, **options) for options in ({}, {"batch_size": 7})
    )
    for each in (usual, chosen):
        for _ in range(50):
            each._pace.ended(0.5, quiet=True)
    assert usual._pace.claim_size() == 2
    assert chosen._pace.claim_size() == 7
