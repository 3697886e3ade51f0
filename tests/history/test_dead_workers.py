"""Attempts whose worker died: the rescue writes them, or the run that retires the job."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import Unique, admin, claim, rescue
from sqlaqueue.consumer import pace
from sqlaqueue.strategies.update_status import LEASE_EXPIRED
from tests.history.queues import HistoryQueue, obey
from tests.programs import wait_until
from tests.servers import Database

EXPIRE = "UPDATE job SET lease_expires_at = now() - interval '1 second' WHERE status = 'processing'"
RUN_ROLES = {"started_at": "started_at"}


@contextlib.contextmanager
def worker_process(queue: HistoryQueue) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.history.dying_worker", queue.database.url(), queue.kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def test_a_killed_worker_leaves_a_rescued_attempt(leased: HistoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.2)
    [key] = leased.enqueue(None)
    with worker_process(leased) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "running\n"
        worker.kill()
    with leased.running():
        wait_until(lambda: leased.outcomes(key) == [(1, "rescued"), (2, "completed")])
    rescued, _ = leased.history()
    assert rescued.worker.endswith(":dying")
    assert rescued.error == LEASE_EXPIRED
    assert (rescued.started_at, rescued.traceback) == (None, None)


def test_a_job_that_kills_its_workers(held: HistoryQueue) -> None:
    """The deaths roll everything back; the run that retires the job is the only one that can be written."""
    [key] = held.enqueue("die")
    for _ in range(2):
        with worker_process(held) as worker:
            assert worker.wait(30) == 13
    held.drain()
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
    with leased.sessions() as session:
        session.scalars(claim(leased.Job, 2)).all()
        session.commit()
    leased.execute(EXPIRE)
    with leased.sessions() as session:
        assert admin.rescue(session, leased.Job) == 2
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
        assert admin.rescue(session, leased.Job) == 2
    assert leased.outcomes() == [(1, "rescued"), (1, "rescued")]
    assert leased.execute("SELECT count(*) FROM job WHERE status = 'pending'") == 2
    with leased.sessions() as session:
        assert admin.rescue(session, leased.Job) == 0
    assert len(leased.history()) == 2


def test_what_the_row_says_about_the_run_is_kept(database: Database) -> None:
    queue = HistoryQueue(database, "update_status", columns=RUN_ROLES, max_attempts=1)
    expired(queue)
    began, worker = queue.execute("SELECT started_at FROM job"), queue.execute("SELECT claimed_by FROM job")
    with queue.sessions() as session:
        assert admin.rescue(session, queue.Job) == 1
    (row,) = queue.history()
    assert (row.outcome, row.started_at, row.worker) == ("rescued", began, worker)
    assert queue.execute("SELECT status FROM job") == "failed"
    queue.engine.dispose()


def test_a_queue_without_attempts_and_workers(database: Database) -> None:
    queue = HistoryQueue(database, "update_status", columns={"attempts": None, "claimed_by": None})
    expired(queue)
    with queue.sessions() as session:
        assert admin.rescue(session, queue.Job) == 1
    queue.drain()
    assert queue.outcomes() == [(1, "rescued"), (1, "completed")]
    queue.engine.dispose()


@pytest.mark.parametrize("on_return", ["cancel", "wait"])
def test_unique_jobs(database: Database, on_return: Any) -> None:
    """A job that waits for its twin has no run, and is no attempt when it comes back."""
    unique = Unique("payload", states=("pending",), on_return=on_return)
    queue = HistoryQueue(database, "update_status", unique=unique, lease=600)
    [key] = expired(queue)
    queue.execute("UPDATE job SET payload = 'twin'")
    [twin] = queue.enqueue("twin")
    with queue.sessions() as session:
        admin.rescue(session, queue.Job)
    assert queue.outcomes() == [(1, "rescued")]
    state = {"cancel": "cancelled", "wait": "processing"}[on_return]
    assert queue.execute(f"SELECT status FROM job WHERE id = {key}") == state
    queue.execute(f"DELETE FROM job WHERE id = {twin}")
    with queue.sessions() as session:
        admin.rescue(session, queue.Job)
    assert queue.outcomes() == [(1, "rescued")]
    if on_return == "wait":
        assert queue.execute(f"SELECT status FROM job WHERE id = {key}") == "pending"
    queue.engine.dispose()


@pytest.mark.each_value
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
    with queue.consumer(obey) as (consumer, _):
        # Its start reads the catalogue.
        if fault == "locked":
            consumer.on("rescued", lambda _: locking.rollback())
            locking.execute(sa.text("LOCK TABLE sqlaqueue_attempt IN SHARE MODE"))
        thread = threading.Thread(target=consumer.run, daemon=True)
        thread.start()
        if fault == "locked" and unique is not None:
            # It cannot be told from a twin that is not committed: the job is rescued when the lock is gone.
            wait_until(lambda: queue.execute("SELECT count(*) FROM sqlaqueue_consumer") == 1)
            locking.rollback()
        wait_until(lambda: queue.execute(f"SELECT status FROM job WHERE id = {key}") == "completed")
        consumer.stop()
        thread.join(30)
    locking.close()
    if fault == "locked" and unique is not None:
        assert queue.outcomes() == [(1, "rescued"), (2, "completed")]
    else:
        assert queue.outcomes() == [(2, "completed")]
        assert any(record.event == "history_failed" for record in log.records)
    queue.engine.dispose()


def test_a_rescue_of_nothing_does_not_blame_the_history(
    database: Database, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """The table of the history is locked, and no lease has expired."""
    monkeypatch.setattr(pace, "RESCUE", 0.2)
    queue = HistoryQueue(database, "update_status")
    rescues = list[int]()
    with queue.running() as consumer, queue.engine.connect() as locking:
        wait_until(lambda: queue.execute("SELECT count(*) FROM sqlaqueue_consumer") == 1)
        due = consumer._context.polls.rescues
        begin = due.begin
        monkeypatch.setattr(due, "begin", lambda rank: [rescues.append(rank), begin(rank)])
        locking.execute(sa.text("LOCK TABLE sqlaqueue_attempt"))
        rescues.clear()
        wait_until(lambda: len(rescues) >= 3)
    assert not any(record.event == "history_failed" for record in log.records)
    queue.engine.dispose()
