"""Scenarios without a fault: order of claims, batches, requeued jobs, deleted messages, slow jobs."""

from __future__ import annotations

import sqlalchemy as sa

from sqlaqueue.mapping.mixin import spec_of
from tests.faults.harness import Harness
from tests.faults.scenarios.registry import attempts, enqueue_after_short_job, scenario


@scenario
def no_faults(harness: Harness) -> None:
    """One worker runs all jobs, in order."""
    harness.enqueue_random(8)
    harness.enqueue("flaky", "fails", max_attempts=2)
    harness.start_worker(batch_size=harness.rng.randint(1, 6))
    harness.start_producer(12)
    assert attempts(harness, harness.finish()) <= {1, 2}, "a job has more attempts than failures explain"


@scenario
def batch_handler(harness: Harness) -> None:
    """The handler takes batches. The jobs of a batch that fails are tried one by one."""
    harness.enqueue_random(8)
    harness.enqueue("flaky", "fails", max_attempts=2)
    harness.start_worker(batch_size=harness.rng.randint(2, 6), batch=True)
    harness.start_producer(12)
    assert attempts(harness, harness.finish()) <= {1, 2}, "a job has more attempts than failures explain"


@scenario
def requeued_by_plain_sql(harness: Harness) -> None:
    """A failed job without attempts left is requeued by plain SQL, and runs once more."""
    [key] = harness.enqueue("fails", max_attempts=2)
    worker = harness.start_worker()
    harness.wait_until_finished()
    harness.recorder.record("requeued", key)
    if harness.bench.has_status:
        harness.bench.execute("UPDATE job SET status = 'pending'")
    else:
        harness.bench.execute("""
            WITH letter AS (DELETE FROM sqlaqueue_dead_letter RETURNING row)
            INSERT INTO job SELECT job.* FROM letter, jsonb_populate_record(NULL::job, row) AS job
        """)
    harness.wait_until(lambda: len(worker.records("failed")) == 2, "the job has failed again")
    assert attempts(harness, harness.finish()) == {3}
    assert len(worker.records("start")) == 3


@scenario
def messages_deleted(harness: Harness) -> None:
    """Another application deletes the messages of pending jobs, and they are restored."""
    harness.enqueue("work", "quiet")
    harness.bench.execute(sa.delete(spec_of(harness.bench.Job).side_tables["messages"]))
    harness.start_worker()
    harness.finish()


@scenario
def settled_while_other_job_runs(harness: Harness) -> None:
    """A finished job is settled while a job of the same claim still runs."""
    enqueue_after_short_job(harness, "quiet", "gated", "gated")
    worker = harness.start_worker()
    harness.wait_until(lambda: len(worker.records("completed")) == 2, "both short jobs are settled")
    harness.open_gate()
    harness.finish()
