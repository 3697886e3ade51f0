"""Each ended attempt is a row of the history: whatever the strategy, the API and the way in which it ended."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, Retry, Unique, claim, complete, rescue
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.consumer import pace
from sqlaqueue.strategies.update_status import LEASE_EXPIRED
from sqlaqueue.texts import split_error
from tests.history.conftest import PAIRS, HistoryQueue, make_model, obey
from tests.programs import DEADLINE, FORKS, wait_until
from tests.servers import Database

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


# A claim deletes the row of a queue whose rows are messages.
WITH_ROWS = [pair for pair in PAIRS if pair[0] != "rows_are_messages"]


@pytest.mark.parametrize("queue", WITH_ROWS, ids="-".join, indirect=True)
def test_the_history_agrees_with_the_row(queue: HistoryQueue) -> None:
    """The last attempt has the error of the row, and its number is that of the attempts."""
    queue.enqueue("raise", "fail", "cancel", None)
    queue.drain()
    with queue.sessions() as session:
        # The traceback of the row has a column of its own in the history.
        rows = {
            job.id: (job.attempts, split_error(job.last_error)[0] or None, job.status)
            for job in session.scalars(sa.select(queue.Job))
        }
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


@pytest.mark.parametrize("queue", WITH_ROWS, ids="-".join, indirect=True)
def test_a_job_that_its_handler_deletes(queue: HistoryQueue) -> None:
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

    with leased.running(work, grace=0.1) as server:
        assert begun.wait(30)
        server.stop()
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


def test_a_duplicate_cancels(database: Any) -> None:
    """A retried job whose place a duplicate has taken is cancelled, as its row says."""
    unique = Unique("payload", states=("pending",), on_return="cancel")
    queue = HistoryQueue(database, "update_status", unique=unique)
    [key] = queue.enqueue("raise")

    async def work(io: Any, job: Any) -> None:
        if job.id == key:
            queue.enqueue("raise")
            raise ValueError("no address")

    queue.drain(work)
    (row,) = [row for row in queue.history() if row.key == [key]]
    assert (row.outcome, row.error) == ("cancelled", "duplicate of job 2\nValueError: no address")
    assert row.error == split_error(queue.execute(f"SELECT last_error FROM job WHERE id = {key}"))[0]
    assert "ValueError: no address" in row.traceback


def test_bare_verbs_write_no_history(leased: HistoryQueue) -> None:
    leased.enqueue(None)
    with leased.sessions.begin() as session:
        jobs = session.scalars(claim(leased.Job, 1)).all()
        session.execute(complete(jobs))
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


# -- attempts whose worker died: the rescue writes them, or the run that retires the job ---------------------------

EXPIRE = "UPDATE job SET lease_expires_at = now() - interval '1 second' WHERE status = 'processing'"


def serve(url: str, kind: str, begun: Any) -> None:
    """Run a Consumer whose handler waits to be killed, or dies."""

    def handle(_: Session, job: Any) -> None:
        begun.set()
        if job.payload == "die":
            os._exit(13)
        time.sleep(600)

    Consumer(make_model(kind), handle, sessionmaker(sa.create_engine(url)), lease=1, worker_name="dying").run()


@contextlib.contextmanager
def worker_process(queue: HistoryQueue) -> Iterator[ForkServerProcess]:
    """Serve in a process, of which a handler has begun."""
    begun = FORKS.Event()
    worker = FORKS.Process(target=serve, args=(queue.database.url(), queue.kind, begun))
    worker.start()
    try:
        assert begun.wait(DEADLINE)
        yield worker
    finally:
        worker.kill()
        worker.join()


def test_a_killed_worker_leaves_a_rescued_attempt(leased: HistoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.2)
    [key] = leased.enqueue(None)
    with worker_process(leased):
        pass
    with leased.running():
        wait_until(lambda: leased.outcomes(key) == [(1, "rescued"), (2, "completed")])
    rescued, _ = leased.history()
    assert rescued.worker.endswith(":dying")
    assert rescued.error == LEASE_EXPIRED
    assert (rescued.started_at, rescued.traceback) == (None, None)


def test_a_job_that_kills_its_workers(held: HistoryQueue, caplog: pytest.LogCaptureFixture) -> None:
    """The deaths roll everything back; the run that retires the job is the only one that can be written."""
    [key] = held.enqueue("die")
    for _ in range(2):
        with worker_process(held) as worker:
            worker.join(DEADLINE)
            assert worker.exitcode == 13
    with caplog.at_level("ERROR", logger="sqlaqueue"):
        held.drain()
    assert f"job {key}: attempt 2 of 2 failed, no further try: WorkerDied: the worker died 2 times" in caplog.text
    (row,) = held.history()
    assert (row.key, row.outcome, row.attempt) == ([key], "failed", 2)
    assert row.error.startswith("WorkerDied: the worker died 2 times")
    assert (row.worker, row.started_at, row.traceback) == (None, None, None)


def expired(queue: HistoryQueue, number: int = 1, **values: Any) -> list[int]:
    """Return the keys of jobs whose worker died."""
    keys = queue.enqueue(*[None] * number, **values)
    with queue.sessions() as session:
        for _ in range(number):
            session.scalars(claim(queue.Job, 1)).all()
            session.commit()
    queue.execute(EXPIRE)
    return keys


def test_a_rescue_that_gives_the_attempt_back_does_not_count(leased: HistoryQueue) -> None:
    """It is not known which of the jobs killed the worker. The row keeps the error: it says that the job ran twice."""
    keys = leased.enqueue(None, None)
    with leased.sessions.begin() as session:
        session.scalars(claim(leased.Job, 2)).all()
    leased.execute(EXPIRE)
    with leased.sessions() as session:
        assert QueueAdmin(session, leased.Job).rescue() == 2
    leased.drain()
    for key in keys:
        assert leased.outcomes(key) == [(1, "rescued"), (1, "completed")]
    assert leased.execute("SELECT count(*) FROM job WHERE attempts = 1 AND status = 'completed'") == 2
    assert leased.execute("SELECT min(last_error) FROM job") == LEASE_EXPIRED


def test_the_verb_and_the_function_for_operators_write_it_as_well(leased: HistoryQueue) -> None:
    first, second = expired(leased, 2)
    with leased.sessions() as session:
        assert sorted(session.scalars(rescue(leased.Job))) == [first, second]
        session.rollback()
    assert leased.history() == []
    with leased.sessions() as session:
        assert QueueAdmin(session, leased.Job).rescue() == 2
    assert leased.outcomes() == [(1, "rescued"), (1, "rescued")]
    assert leased.execute("SELECT count(*) FROM job WHERE status = 'pending'") == 2
    with leased.sessions() as session:
        assert QueueAdmin(session, leased.Job).rescue() == 0
    assert len(leased.history()) == 2


def test_what_the_row_says_about_the_run_is_kept(database: Database) -> None:
    queue = HistoryQueue(database, "update_status", extra_columns=("started_at",), max_attempts=1)
    expired(queue)
    began, worker = queue.execute("SELECT started_at FROM job"), queue.execute("SELECT claimed_by FROM job")
    with queue.sessions() as session:
        assert QueueAdmin(session, queue.Job).rescue() == 1
    (row,) = queue.history()
    assert (row.outcome, row.started_at, row.worker) == ("rescued", began, worker)
    assert queue.execute("SELECT status FROM job") == "failed"


def test_a_queue_without_attempts_and_workers(database: Database) -> None:
    queue = HistoryQueue(database, "update_status", columns={"attempts": None, "claimed_by": None})
    expired(queue)
    with queue.sessions() as session:
        assert QueueAdmin(session, queue.Job).rescue() == 1
    queue.drain()
    assert queue.outcomes() == [(1, "rescued"), (1, "completed")]


@pytest.mark.parametrize("on_return", ["cancel", "wait"])
def test_unique_jobs(database: Database, on_return: Any) -> None:
    """A job that waits for its duplicate has no run, and is no attempt when it comes back."""
    unique = Unique("payload", states=("pending",), on_return=on_return)
    queue = HistoryQueue(database, "update_status", unique=unique, lease=600)
    [key] = expired(queue)
    queue.execute("UPDATE job SET payload = 'duplicate'")
    [duplicate] = queue.enqueue("duplicate")
    with queue.sessions() as session:
        QueueAdmin(session, queue.Job).rescue()
    assert queue.outcomes() == [(1, "rescued")]
    state = {"cancel": "cancelled", "wait": "processing"}[on_return]
    assert queue.execute(f"SELECT status FROM job WHERE id = {key}") == state
    queue.execute(f"DELETE FROM job WHERE id = {duplicate}")
    with queue.sessions() as session:
        QueueAdmin(session, queue.Job).rescue()
    assert queue.outcomes() == [(1, "rescued")]
    if on_return == "wait":
        assert queue.execute(f"SELECT status FROM job WHERE id = {key}") == "pending"


@pytest.mark.parametrize("unique", [None, Unique("payload", states=("pending",))], ids=["plain", "unique"])
@pytest.mark.parametrize("fault", ["refused", "locked"])
def test_a_consumer_rescues_without_a_history_that_cannot_be_written(
    database: Database, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, unique: Any, fault: str
) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.2)
    queue = HistoryQueue(database, "update_status", unique=unique)
    [key] = expired(queue)
    locking = queue.engine.connect()
    if fault == "refused":
        queue.execute("ALTER TABLE sqlaqueue_attempt ADD CHECK (outcome <> 'rescued')")
    server = queue.server()
    # Its start reads the catalogue.
    if fault == "locked":
        server.consumer.on("rescued", lambda _: locking.rollback())
        locking.execute(sa.text("LOCK TABLE sqlaqueue_attempt IN SHARE MODE"))
    with server.running():
        if fault == "locked" and unique is not None:
            # It cannot be told from a duplicate that is not committed: the job is rescued when the lock is gone.
            wait_until(lambda: queue.execute("SELECT count(*) FROM sqlaqueue_consumer") == 1)
            locking.rollback()
        wait_until(lambda: queue.execute(f"SELECT status FROM job WHERE id = {key}") == "completed")
    locking.close()
    if fault == "locked" and unique is not None:
        assert queue.outcomes() == [(1, "rescued"), (2, "completed")]
    else:
        assert queue.outcomes() == [(2, "completed")]
        assert any(record.event == "history_failed" for record in log.records)


def test_a_rescue_of_nothing_does_not_blame_the_history(
    database: Database, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """The table of the history is locked, and no lease has expired."""
    monkeypatch.setattr(pace, "RESCUE", 0.2)
    queue = HistoryQueue(database, "update_status")
    rescues = list[int]()
    with queue.running() as server, queue.engine.connect() as locking:
        wait_until(lambda: queue.execute("SELECT count(*) FROM sqlaqueue_consumer") == 1)
        due = server.context.polls.rescues
        begin = due.begin
        monkeypatch.setattr(due, "begin", lambda rank: [rescues.append(rank), begin(rank)])
        locking.execute(sa.text("LOCK TABLE sqlaqueue_attempt"))
        rescues.clear()
        wait_until(lambda: len(rescues) >= 3)
    assert not any(record.event == "history_failed" for record in log.records)
