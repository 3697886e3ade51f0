"""The scan cursor: claims skip the dead entries at the head of the queue, and miss no job for long."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.consumer.pace import LONGEST, ScanCursor
from tests.consumer.bench import Bench
from tests.programs import wait_until

FIRST = {"mark": 1}
SECOND = {"mark": 2}


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cursor(clock: Clock) -> ScanCursor:
    return ScanCursor(clock)


def claim(cursor: ScanCursor, clock: Clock, seconds: float, *, head: float, usual: float = 0.01) -> list[float]:
    """Claim batches of ten for some seconds; return the times of the scans from the head, which take ``head`` seconds."""
    scans, end = [], clock.time + seconds
    while clock.time < end:
        began = cursor.begin()
        took = head if began is None else usual
        scans += [clock.time] if began is None else []
        clock.time += took
        cursor.claimed(began, SECOND, 10, took)
    return scans


@pytest.mark.once
def test_every_claim_scans_a_clean_head(cursor: ScanCursor, clock: Clock) -> None:
    assert len(claim(cursor, clock, 10, head=0.01)) == pytest.approx(1000, abs=1)


@pytest.mark.once
def test_scans_over_dead_entries_take_a_twentieth_of_the_time(cursor: ScanCursor, clock: Clock) -> None:
    claim(cursor, clock, 1, head=0.01)
    scans = claim(cursor, clock, 60, head=0.1)
    assert 0.02 < len(scans) * 0.09 / 60 < 0.08


@pytest.mark.once
def test_a_slow_growth_of_dead_entries_is_noticed(cursor: ScanCursor, clock: Clock) -> None:
    for step in range(200):
        claim(cursor, clock, 0.2, head=0.01 + step * 0.0005)
    assert len(claim(cursor, clock, 10, head=0.11)) < 10


@pytest.mark.once
def test_the_head_is_scanned_however_many_dead_entries_it_has(cursor: ScanCursor, clock: Clock) -> None:
    claim(cursor, clock, 1, head=0.01)
    scans = claim(cursor, clock, 60, head=2.0)
    assert max(after - before for before, after in pairwise(scans)) <= 3.1


@pytest.mark.once
@pytest.mark.parametrize("head", [0.3, 1.0, 1.7])
def test_a_job_missed_by_one_scan_is_found_in_time_by_the_next(cursor: ScanCursor, clock: Clock, head: float) -> None:
    claim(cursor, clock, 1, head=0.01)
    scans = claim(cursor, clock, 60, head=head)
    assert max(after - before for before, after in pairwise(scans)) == pytest.approx(LONGEST - head, abs=0.1)


@pytest.mark.once
def test_one_at_a_time_scans_from_the_head(cursor: ScanCursor, clock: Clock) -> None:
    """Others would read the same dead entries. If that scan never ends, another one begins after a while."""
    claim(cursor, clock, 1, head=0.01)
    assert cursor.begin() is None
    assert cursor.begin() is SECOND
    cursor.claimed(SECOND, SECOND, 10, 0.01)
    clock.time += LONGEST
    assert cursor.begin() is None
    assert cursor.begin() is SECOND
    cursor.claimed(None, SECOND, 10, 0.01)
    assert cursor.begin() is None


@pytest.mark.once
def test_no_second_scan_begins_while_a_long_one_runs(cursor: ScanCursor, clock: Clock) -> None:
    """The longer a scan takes, the more a second one would cost."""
    claim(cursor, clock, 1, head=0.01)
    claim(cursor, clock, 20, head=1.2)
    while cursor.begin() is not None:
        clock.time += 0.1
    clock.time += 1.3
    assert cursor.begin() is SECOND
    clock.time += LONGEST
    assert cursor.begin() is None


@pytest.mark.once
def test_a_changed_claim_size_scans_the_head(cursor: ScanCursor, clock: Clock) -> None:
    """While a claim is executed that began at the cursor."""
    claim(cursor, clock, 1, head=0.01)
    assert cursor.begin() is None
    assert cursor.begin() is SECOND
    cursor.claimed(None, SECOND, 20, 0.01)
    cursor.claimed(SECOND, SECOND, 20, 0.01)
    assert cursor.begin() is None


@pytest.mark.once
def test_single_jobs_are_claimed_from_the_head(cursor: ScanCursor) -> None:
    """A job now and then is no backlog, though a claim of one job has found as many as it might take."""
    cursor.claimed(None, FIRST, 1, 0.01)
    assert cursor.begin() is None
    cursor.claimed(None, None, 0, 0.5)
    cursor.claimed(None, FIRST, 1, 0.5)
    assert cursor.begin() is None


@pytest.mark.once
def test_after_the_last_job_the_next_claim_scans_from_the_head(cursor: ScanCursor, clock: Clock) -> None:
    claim(cursor, clock, 1, head=0.01)
    cursor.claimed(None, SECOND, 10, 1.0)
    assert cursor.begin() is SECOND
    cursor.claimed(SECOND, None, 3, 0.01)
    assert cursor.begin() is None


def test_jobs_before_the_cursor_are_found(bench: Bench) -> None:
    """A late commit with an older time and a more urgent job, while a backlog is processed."""
    backlog, go_on, started = 3000, threading.Event(), list[int]()
    early = datetime.now(UTC) - timedelta(hours=1)
    bench.enqueue(backlog)

    with bench.engine.connect() as snapshot, bench.engine.connect() as late:
        # Claimed jobs stay in the index as long as this transaction may see them.
        snapshot.execution_options(isolation_level="REPEATABLE READ").execute(sa.select(bench.Job.id).limit(1))
        jobs = bench.Job.__table__
        (older,) = late.execute(sa.insert(jobs).values(run_at=early).returning(jobs.c.id)).one()

        async def work(io: Any, job: Any) -> None:
            started.append(job.id)
            if len(started) == 200:
                await io.wait(go_on)

        with bench.consumer(work, batch_size=20).running():
            wait_until(lambda: len(started) == 200)
            late.commit()
            (urgent,) = bench.enqueue(1, priority=-5)
            go_on.set()
            wait_until(lambda: {older, urgent} <= set(started))
            wait_until(lambda: len(started) >= backlog + 2)
    assert len(started) == len(set(started)) == backlog + 2
