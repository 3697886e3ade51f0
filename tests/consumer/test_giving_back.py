"""No claimed job waits for long behind a slow one: it goes back to the queue, and others have it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from sqlalchemy.orm import Session

from sqlaqueue import cancel, consumers
from sqlaqueue.consumer.claiming import batch_size
from sqlaqueue.consumer.claiming.batch_size import LATE, LONGEST_WAIT, Pace
from sqlaqueue.consumer.claiming.job_buffer import Crew
from sqlaqueue.consumer.core.effects import Report
from sqlaqueue.consumer.executing.executor import Hand, held_run
from sqlaqueue.mapping.runs import set_run
from sqlaqueue.queue.run import Run
from tests.consumer.bench import Bench, wait_until
from tests.consumer.models import models
from tests.consumer.test_going_on import make_crew

N, HEAD = 60, 10


def test_quick_jobs_do_not_wait_behind_a_slow_one(leased: Bench) -> None:
    """With an idle Consumer beside the one that has claimed them; with several handlers when all of them are busy."""
    concurrency = 1 if leased.colour == "sync" else 2
    keys = leased.enqueue(HEAD + concurrency + N)
    slow, go_on = set(keys[HEAD : HEAD + concurrency]), threading.Event()
    begun: set[int] = set()

    async def work(hands: Any, job: Any) -> None:
        if job.id in slow:
            begun.add(job.id)
            await hands.wait(go_on)

    with leased.consumer(work, concurrency=concurrency).running() as busy:
        wait_until(lambda: begun == slow)
        with leased.consumer().running() as idle:
            wait_until(lambda: leased.states() == {"completed": len(keys) - len(slow), "processing": len(slow)})
        go_on.set()
        wait_until(lambda: leased.states() == {"completed": len(keys)})
    assert set(leased.attempts().values()) == {1}
    given_back = busy.told("released")
    assert given_back
    assert set(given_back) <= set(idle.told("completed"))
    assert busy.told()["released"] == len(set(given_back)), "what goes back is not claimed again by the same"
    assert not busy.told("lease_lost")


def test_a_request_to_stop_is_not_lost_with_what_is_given_back(leased: Bench) -> None:
    """It is meant for the run that ends here."""
    keys = leased.enqueue(HEAD + 3)
    slow, asked, last = keys[HEAD:]
    go_on, begun = threading.Event(), threading.Event()

    async def work(hands: Any, job: Any) -> None:
        if job.id == slow:
            with leased.sessions() as session:
                session.execute(cancel(session.get_one(leased.Job, asked)))
                session.commit()
            begun.set()
            await hands.wait(go_on)

    with leased.consumer(work).running():
        assert begun.wait(20)
        wait_until(lambda: leased.row(asked).status == "cancelled" and leased.row(last).status == "pending")
        go_on.set()
    assert leased.row(slow).status == "completed"


def test_a_held_batch_ends_when_it_takes_longer_than_expected(
    supply: Any, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not begun is free with its commit, and others hear of it."""
    monkeypatch.setattr(batch_size, "LATE", 0.2)
    bench = supply.take("delete_returning" if colour == "sync" else "batch_select", colour)
    keys = bench.enqueue(HEAD + 1 + N)
    slow, go_on, begun = keys[HEAD], threading.Event(), threading.Event()

    async def work(hands: Any, job: Any) -> None:
        await hands.execute(bench.effect(job.id))
        if job.id == slow:
            begun.set()
            await hands.wait(go_on)

    with bench.consumer(work).running() as server:
        assert begun.wait(20)
        held_up = time.monotonic()
        wait_until(lambda: time.monotonic() - held_up > batch_size.LATE)
        go_on.set()
        wait_until(lambda: bench.states() == {"completed": len(keys)})
    assert server.told("released")
    assert bench.effects() == dict.fromkeys(keys, 1)
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


def test_consumers_tell_what_they_claimed_from_what_they_run(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "CHECK_IN", 0.2)
    for name in ("LATE", "LONGEST_WAIT"):
        monkeypatch.setattr(f"sqlaqueue.consumer.claiming.job_buffer.{name}", 60.0)
    keys = leased.enqueue(HEAD + 3)
    slow, go_on = keys[HEAD], threading.Event()

    async def work(hands: Any, job: Any) -> None:
        if job.id == slow:
            await hands.wait(go_on)

    def seen() -> Any:
        with leased.sessions() as session:
            return [(row.running, row.claimed) for row in session.execute(consumers(leased.Job))]

    with leased.consumer(work).running():
        wait_until(lambda: seen() == [([[str(slow)]], 2)])
        go_on.set()
        wait_until(lambda: leased.states() == {"completed": len(keys)})


# -- when, and how much is claimed ---------------------------------------------------------------------------------


def job(key: int) -> Any:
    claimed = models("update_status").job(id=key)
    set_run(claimed, Run((key,), None, 1, 5))
    return claimed


def at_work(crew: Crew, *keys: int) -> Hand:
    """Return a hand from which a call has begun, while the other jobs wait."""
    hand = Hand(crew, [[job(key)] for key in keys], crew.finish)
    crew._at_work.add(hand)
    assert hand.begin(Session()) is not None
    return hand


@pytest.mark.once
def test_what_waits_goes_back_when_no_handler_is_free() -> None:
    crew = make_crew(concurrency=2)
    busy, now = at_work(crew, 1, 2), time.monotonic()
    crew.fill([[job(3)]])
    assert not crew.late_units(now + LONGEST_WAIT), "the other handler takes it"
    at_work(crew, 4)
    assert not crew.late_units(now), "they may be done in a moment"
    assert [one.id for [one] in crew.late_units(now + 1.1 * LONGEST_WAIT)] == [3, 2]
    crew.plan.asked.add((2,))
    assert crew.give_back_late(now + 1.1 * LONGEST_WAIT) == 2
    assert {one.run.key: one.outcome.ending for one in crew.take_finished()} == {(3,): "released", (2,): "cancelled"}
    assert not crew.has_work
    assert not busy.left()
    assert {run.key for run in crew.running()} == {(1,), (4,)}


@pytest.mark.once
def test_what_waits_goes_back_when_it_takes_longer_than_expected() -> None:
    """However quick each handler is; and at once when the Consumer stops."""
    crew = make_crew(concurrency=2)
    crew.fill([[job(1)]])
    now = time.monotonic()
    assert not crew.late_units(now + 0.9 * LATE)
    assert crew.late_units(now + 1.1 * LATE)
    assert not crew.late_units(now)
    crew.plan.stopping = True
    assert crew.late_units(now)


@pytest.mark.once
def test_jobs_of_a_batch_that_failed_do_not_go_back() -> None:
    """They would come together again, and fail together, before it is their turn."""
    crew, failed = make_crew(concurrency=1), job(1)
    held_run(failed).called = time.monotonic()
    crew.report(Report(apart=[failed]))
    at_work(crew, 2)
    assert not crew.late_units(time.monotonic() + 10 * LATE)
    assert crew.has_work


@pytest.mark.once
@pytest.mark.parametrize("concurrency", [1, 8, 500])
def test_slow_handlers_are_not_claimed_for_ahead(concurrency: int) -> None:
    """What they would not come to would go back all the time."""
    its = Pace(500, concurrency, 1.0)
    assert its.claim_size(idle=1) == 1
    its.ended(2.0, quiet=True)
    assert its.claim_size(idle=1) == max(1, concurrency // 10)
    assert its.claim_size(idle=concurrency) == concurrency


@pytest.mark.once
def test_handlers_that_are_stuck_are_not_claimed_for() -> None:
    its = Pace(500, 4, 1.0)
    its.ended(0.1, quiet=True)
    assert [its.claim_size(idle=1, stuck=stuck) for stuck in range(5)] == [40, 30, 20, 10, 10]
    assert not its.is_stuck(LONGEST_WAIT)
    assert its.is_stuck(1.1 * LONGEST_WAIT)
    its.ended(20.0, quiet=True)
    assert not its.is_stuck(1.1 * LONGEST_WAIT), "that is what they take"


@pytest.mark.once
def test_claims_that_cannot_be_given_back_begin_small() -> None:
    """And begin again after a slow job."""
    its = Pace(500, 1, 1.0, cautious=True)
    sizes = []
    for _ in range(6):
        sizes.append(its.claim_size())
        its.ended(0.001, calls=sizes[-1], quiet=True)
    assert sizes == [1, 15, 64, 320, 500, 500]
    its.ended(1.1 * LATE, quiet=True)
    assert its.claim_size() <= 2
    assert its.enough() == LATE
    assert Pace(500, 1, 1.0, whole=True, cautious=True).enough() is None
