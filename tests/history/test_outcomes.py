"""Each ended attempt is a row of the history, whatever the strategy, the API, and the way in which it is settled."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import Retry, claim, complete
from tests.history.queues import HistoryQueue, obey
from tests.programs import wait_until

FINAL = {
    None: [(1, "completed")],
    "write": [(1, "completed")],
    "raise": [(1, "retried"), (2, "failed")],
    "fail": [(1, "failed")],
    "cancel": [(1, "cancelled")],
    "snooze": [(1, "released")],
}
LATE = timedelta(seconds=5)
ERRORS = {"raise": "ValueError: no address", "fail": "no_stock: no stock", "cancel": "not wanted"}


def test_each_outcome(queue: HistoryQueue) -> None:
    """A batch of mixed outcomes, and writes through the session."""
    keys = dict(zip(queue.enqueue(*FINAL), FINAL, strict=True))
    before = datetime.now(UTC)
    queue.drain()
    for key, payload in keys.items():
        assert queue.outcomes(key) == FINAL[payload], payload
    for row in queue.history():
        (key,) = row.key
        assert row.queue == "job"
        assert row.error == ERRORS.get(keys[key])
        assert (row.traceback is not None) == (row.error is not None)
        if keys[key] == "raise":
            assert row.traceback.startswith("Traceback (most recent call last):")
            assert row.traceback.endswith("ValueError: no address\n")
        assert (
            before - timedelta(seconds=5) <= row.started_at <= row.ended_at <= datetime.now(UTC) + timedelta(seconds=5)
        )
        assert row.worker


def test_the_history_agrees_with_the_row(queue: HistoryQueue) -> None:
    """The last attempt has the error of the row, and its number is that of the attempts."""
    if queue.kind == "own_message":
        pytest.skip("a row of this queue is deleted by its claim")
    queue.enqueue("raise", "fail", "cancel", None)
    queue.drain()
    with queue.sessions() as session:
        rows = {job.id: (job.attempts, job.last_error, job.status) for job in session.scalars(sa.select(queue.Job))}
    last = {row.key[0]: (row.attempt, row.error, row.outcome) for row in queue.history()}
    assert last == rows


def test_each_outcome_of_a_handler_of_batches(mixed: HistoryQueue) -> None:
    """A batch that fails is tried job by job; each job has one attempt for that."""
    keys = mixed.enqueue(None, "raise", None, max_attempts=1)

    async def work(io: Any, jobs: Any) -> None:
        for job in jobs:
            await io.execute(sa.text("SELECT 1"))
            await obey(io, job)

    mixed.drain(work, batch=True)
    assert [mixed.outcomes(key) for key in keys] == [[(1, "completed")], [(1, "failed")], [(1, "completed")]]


def test_a_job_that_its_handler_deletes(queue: HistoryQueue) -> None:
    if queue.kind == "own_message":
        pytest.skip("a row of this queue is deleted by its claim")
    [key] = queue.enqueue(None)

    async def delete(io: Any, job: Any) -> None:
        await io.delete(job)

    queue.drain(delete)
    assert queue.execute("SELECT count(*) FROM job") == 0
    assert queue.outcomes(key) == [(1, "completed")]


def test_completed_jobs_that_are_deleted_keep_their_attempts(database: Any) -> None:
    queue = HistoryQueue(database, "update_status", on_complete="delete")
    [key] = queue.enqueue(None)
    queue.drain()
    assert queue.execute("SELECT count(*) FROM job") == 0
    assert queue.outcomes(key) == [(1, "completed")]
    queue.engine.dispose()


def test_the_duration_is_that_of_the_handler(queue: HistoryQueue) -> None:
    """And not of the time until the run is settled, or of a wrong clock of the worker."""
    queue.enqueue(None, None)

    async def work(io: Any, job: Any) -> None:
        if job.id == 1:
            await io.wait_for(lambda: bool(queue.execute("SELECT pg_sleep(0.3) IS NOT NULL")))

    queue.drain(work, batch_size=2)
    first, second = sorted(queue.history(), key=lambda row: row.key)
    assert first.ended_at - first.started_at >= timedelta(seconds=0.3)
    assert second.ended_at - second.started_at < first.ended_at - first.started_at
    assert first.ended_at <= second.started_at


def test_a_handler_that_is_abandoned_is_released(leased: HistoryQueue) -> None:
    """Its run was an attempt, though it does not count."""
    leased.enqueue(None)
    begun, go_on = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        begun.set()
        await io.wait(go_on)

    with leased.running(work, grace=0.1) as consumer:
        assert begun.wait(30)
        consumer.stop()
        wait_until(lambda: leased.outcomes() == [(1, "released")])
        go_on.set()
    assert leased.execute("SELECT attempts FROM job") == 0


def test_a_timeout(leased: HistoryQueue) -> None:
    leased.enqueue(None, max_attempts=1)
    go_on = threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.wait(go_on)

    with leased.running(work, timeout=0.2):
        wait_until(lambda: leased.outcomes() == [(1, "failed")])
        go_on.set()
    (row,) = leased.history()
    assert row.error.startswith("JobTimeout: ")


def test_a_retry_without_an_error(leased: HistoryQueue) -> None:
    leased.enqueue(None)

    async def work(io: Any, job: Any) -> None:
        if job.attempts == 1:
            raise Retry

    leased.drain(work)
    retried, completed = leased.history()
    assert (retried.outcome, retried.error) == ("retried", None)
    assert completed.outcome == "completed"


def test_a_twin_cancels(database: Any) -> None:
    """A retried job whose place a twin has taken is cancelled, as its row says."""
    from sqlaqueue import Unique  # noqa: PLC0415 - for one test

    unique = Unique("payload", states=("pending",), on_return="cancel")
    queue = HistoryQueue(database, "update_status", unique=unique)
    [key] = queue.enqueue("raise")

    async def work(io: Any, job: Any) -> None:
        if job.id == key:
            queue.enqueue("raise")
            raise ValueError("no address")

    queue.drain(work)
    (row,) = [row for row in queue.history() if row.key == [key]]
    assert (row.outcome, row.error) == ("cancelled", "twin: 2\nValueError: no address")
    assert row.error == queue.execute(f"SELECT last_error FROM job WHERE id = {key}")
    assert "ValueError: no address" in row.traceback
    queue.engine.dispose()


def test_bare_verbs_write_no_history(leased: HistoryQueue) -> None:
    leased.enqueue(None)
    with leased.sessions() as session:
        jobs = session.scalars(claim(leased.Job, 1)).all()
        session.execute(complete(jobs))
        session.commit()
    assert leased.history() == []
    assert leased.execute("SELECT status FROM job") == "completed"


@pytest.mark.parametrize("flushed", [False, True])
def test_a_job_that_its_handler_has_deleted(leased: HistoryQueue, *, flushed: bool) -> None:
    [key] = leased.enqueue(None)

    async def work(io: Any, job: Any) -> None:
        await io.delete(job)
        if flushed:
            await io.flush()

    leased.drain(work)
    assert leased.execute("SELECT count(*) FROM job") == 0
    assert leased.outcomes(key) == [(1, "completed")]
