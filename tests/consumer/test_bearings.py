"""From where a Consumer claims: it saves the way over what is dead, and misses nothing for long."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.consumer.claiming.scan_cursor import LONGEST, Bearings
from tests.consumer.bench import Bench, wait_until

HERE = {"mark": 1}
FURTHER = {"mark": 2}


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bearings(clock: Clock) -> Bearings:
    return Bearings(clock)


def serve(bearings: Bearings, clock: Clock, seconds: float, *, head: float, usual: float = 0.01) -> list[float]:
    """Claim batches of ten for some seconds; return the moments of the looks from the head, which take ``head``."""
    looks, end = [], clock.time + seconds
    while clock.time < end:
        began = bearings.begin()
        took = head if began is None else usual
        looks += [clock.time] if began is None else []
        clock.time += took
        bearings.claimed(began, FURTHER, 10, took)
    return looks


@pytest.mark.once
def test_a_clean_head_is_looked_at_by_every_claim(bearings: Bearings, clock: Clock) -> None:
    assert len(serve(bearings, clock, 10, head=0.01)) == pytest.approx(1000, abs=1)


@pytest.mark.once
def test_looks_from_a_littered_head_cost_a_twentieth(bearings: Bearings, clock: Clock) -> None:
    serve(bearings, clock, 1, head=0.01)
    looks = serve(bearings, clock, 60, head=0.1)
    assert 0.02 < len(looks) * 0.09 / 60 < 0.08


@pytest.mark.once
def test_it_is_seen_as_well_when_the_head_is_littered_slowly(bearings: Bearings, clock: Clock) -> None:
    for step in range(200):
        serve(bearings, clock, 0.2, head=0.01 + step * 0.0005)
    assert len(serve(bearings, clock, 10, head=0.11)) < 10


@pytest.mark.once
def test_however_littered_it_is_the_head_is_looked_at(bearings: Bearings, clock: Clock) -> None:
    serve(bearings, clock, 1, head=0.01)
    looks = serve(bearings, clock, 60, head=2.0)
    assert max(after - before for before, after in pairwise(looks)) <= 3.1


@pytest.mark.once
@pytest.mark.parametrize("head", [0.3, 1.0, 1.7])
def test_what_a_look_passed_over_the_next_one_has_in_time(bearings: Bearings, clock: Clock, head: float) -> None:
    serve(bearings, clock, 1, head=0.01)
    looks = serve(bearings, clock, 60, head=head)
    assert max(after - before for before, after in pairwise(looks)) == pytest.approx(LONGEST - head, abs=0.1)


@pytest.mark.once
def test_one_at_a_time_looks_from_the_head(bearings: Bearings, clock: Clock) -> None:
    """Others would meet the same dead entries at the same time; nor does it matter if that one never comes back."""
    serve(bearings, clock, 1, head=0.01)
    assert bearings.begin() is None
    assert bearings.begin() is FURTHER
    bearings.claimed(FURTHER, FURTHER, 10, 0.01)
    clock.time += LONGEST
    assert bearings.begin() is None
    assert bearings.begin() is FURTHER
    bearings.claimed(None, FURTHER, 10, 0.01)
    assert bearings.begin() is None


@pytest.mark.once
def test_a_look_that_takes_long_is_not_joined(bearings: Bearings, clock: Clock) -> None:
    """The longer it takes the more it would cost."""
    serve(bearings, clock, 1, head=0.01)
    serve(bearings, clock, 20, head=1.2)
    while bearings.begin() is not None:
        clock.time += 0.1
    clock.time += 1.3
    assert bearings.begin() is FURTHER
    clock.time += LONGEST
    assert bearings.begin() is None


@pytest.mark.once
def test_where_claims_begin_anew_the_head_is_looked_at(bearings: Bearings, clock: Clock) -> None:
    """Such as when they become larger, while one is under way that began at a mark."""
    serve(bearings, clock, 1, head=0.01)
    assert bearings.begin() is None
    assert bearings.begin() is FURTHER
    bearings.claimed(None, FURTHER, 20, 0.01)
    bearings.claimed(FURTHER, FURTHER, 20, 0.01)
    assert bearings.begin() is None


@pytest.mark.once
def test_single_jobs_are_claimed_from_the_head(bearings: Bearings) -> None:
    """A job that comes now and then makes no backlog, though a claim of one has found all that it might take."""
    bearings.claimed(None, HERE, 1, 0.01)
    assert bearings.begin() is None
    bearings.claimed(None, None, 0, 0.5)
    bearings.claimed(None, HERE, 1, 0.5)
    assert bearings.begin() is None


@pytest.mark.once
def test_where_nothing_is_left_the_next_claim_looks_from_the_head(bearings: Bearings, clock: Clock) -> None:
    serve(bearings, clock, 1, head=0.01)
    bearings.claimed(None, FURTHER, 10, 1.0)
    assert bearings.begin() is FURTHER
    bearings.claimed(FURTHER, None, 3, 0.01)
    assert bearings.begin() is None


def test_what_lies_before_the_mark_is_found(bench: Bench) -> None:
    """A late commit with an older time, a more urgent job and one that is given back, while a backlog is worked off."""
    backlog, go_on, started = 3000, threading.Event(), list[int]()
    early = datetime.now(UTC) - timedelta(hours=1)
    bench.enqueue(backlog)

    with bench.engine.connect() as snapshot, bench.engine.connect() as late:
        # What is claimed stays in the index for as long as this transaction might see it.
        snapshot.execution_options(isolation_level="REPEATABLE READ").execute(sa.select(bench.Job.id).limit(1))
        jobs = bench.Job.__table__
        (older,) = late.execute(sa.insert(jobs).values(run_at=early).returning(jobs.c.id)).one()

        async def work(hands: Any, job: Any) -> None:
            started.append(job.id)
            if len(started) == 200:
                await hands.wait(go_on)

        with bench.consumer(work, batch_size=20).running():
            wait_until(lambda: len(started) == 200)
            late.commit()
            (urgent,) = bench.enqueue(1, priority=-5)
            go_on.set()
            wait_until(lambda: {older, urgent} <= set(started))
            wait_until(lambda: len(started) >= backlog + 2)
    assert len(started) == len(set(started)) == backlog + 2
