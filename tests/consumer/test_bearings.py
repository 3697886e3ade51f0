"""From where a Consumer claims: it saves the way over what is dead, and misses nothing for long."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.serving.bearings import LONGEST, Bearings
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


@pytest.mark.once
def test_the_first_claim_looks_from_the_head(bearings: Bearings) -> None:
    assert bearings.begin() is None
    bearings.claimed(None, HERE, 0.01)
    assert bearings.begin() is HERE, "what a claim costs without the head is to be known"


@pytest.mark.once
def test_a_clean_head_is_looked_at_by_nearly_every_claim(bearings: Bearings, clock: Clock) -> None:
    heads = 0
    for _ in range(1000):
        began = bearings.begin()
        heads += began is None
        clock.time += 0.01
        bearings.claimed(began, FURTHER, 0.01)
    assert heads > 950


@pytest.mark.once
def test_looks_from_a_littered_head_cost_a_twentieth(bearings: Bearings, clock: Clock) -> None:
    began_at, spent = clock.time, 0.0
    while clock.time < began_at + 60:
        began = bearings.begin()
        took = 0.1 if began is None else 0.01
        spent += took - 0.01
        clock.time += took
        bearings.claimed(began, FURTHER, took)
    assert 0.02 < spent / 60 < 0.08


@pytest.mark.once
def test_however_littered_it_is_the_head_is_looked_at(bearings: Bearings, clock: Clock) -> None:
    last = clock.time
    while clock.time < 160:
        began = bearings.begin()
        if began is None:
            assert clock.time - last <= LONGEST + 0.1
            last = clock.time
        took = 2.0 if began is None else 0.01
        clock.time += took
        bearings.claimed(began, FURTHER, took)
        last = clock.time if began is None else last
    assert last > 150


@pytest.mark.once
def test_where_nothing_is_left_the_next_claim_looks_from_the_head(bearings: Bearings) -> None:
    bearings.claimed(None, HERE, 0.01)
    bearings.claimed(HERE, None, 0.01)
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
