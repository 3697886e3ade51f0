"""SIGTERM while a worker is idle, claims, runs a handler, exceeds its grace period, or settles."""

from __future__ import annotations

import time

import sqlalchemy as sa

from tests.faults.harness import Harness, Process
from tests.faults.proxy import Proxy
from tests.faults.scenarios.registry import attempts, enqueue_after_short_job, scenario, wait_for_handlers


def finish_after_shutdown(harness: Harness, worker: Process) -> None:
    """Check that a worker has shut down, let another one run the other jobs, and check that each has one attempt."""
    assert worker.wait() == 0
    assert worker.records("stopped")
    harness.open_gate()
    harness.start_worker()
    assert attempts(harness, harness.finish()) <= {1}, "a shutdown has counted an attempt"


@scenario
def sigterm_while_idle(harness: Harness) -> None:
    """The worker waits for its next poll, which is one hour away."""
    harness.enqueue("work")
    worker = harness.start_worker(poll_interval=3600, lease=30)

    def is_waiting() -> bool:
        # The worker records "idle" just before it begins to wait.
        idle = worker.records("idle")
        return bool(worker.records("completed") and idle) and time.monotonic_ns() - idle[-1].time_ns > 300_000_000

    harness.wait_until(is_waiting, "the worker is idle")
    worker.terminate()
    # A new job would wake the worker as well, so it is enqueued afterwards.
    assert worker.wait() == 0
    harness.enqueue("work", "quiet")
    finish_after_shutdown(harness, worker)


@scenario
def sigterm_while_claiming(harness: Harness) -> None:
    """The server executes the claim, or the check of the start before it, and jobs that are claimed are released."""
    harness.enqueue("work", "quiet", "work")
    with harness.bench.engine.begin() as connection:
        connection.execute(sa.text("LOCK TABLE job IN ACCESS EXCLUSIVE MODE"))
        worker = harness.start_worker(lease=30)
        waiting = """
            SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
            AND wait_event_type = 'Lock' AND query NOT LIKE 'LOCK %'
        """
        harness.wait_until(lambda: harness.bench.execute(waiting), "the worker waits for the lock")
        worker.terminate()
    finish_after_shutdown(harness, worker)
    assert not worker.records("start")


@scenario
def sigterm_in_handler(harness: Harness) -> None:
    """The job that runs is completed, and all other claimed jobs are released."""
    enqueue_after_short_job(harness, *["gated"] * 6)
    worker = harness.start_worker(lease=30)
    wait_for_handlers(harness, worker)
    worker.terminate()
    harness.open_gate()
    finish_after_shutdown(harness, worker)
    assert len(worker.records("start")) == len(worker.records("completed")) == 2


@scenario
def sigterm_and_grace_period_exceeded(harness: Harness) -> None:
    """A job that runs beyond the grace period is released, and its writes are rolled back."""
    harness.enqueue(*["gated"] * 3)
    # With ``batch_size=1`` the job would be responsible for the death of its worker.
    worker = harness.start_worker(lease=30, grace=0.2, batch_size=1)
    wait_for_handlers(harness, worker)
    worker.terminate()
    finish_after_shutdown(harness, worker)
    assert not worker.records("completed")


@scenario
def sigterm_while_settling(harness: Harness) -> None:
    """The worker has sent the COMMIT and waits for the reply."""
    with Proxy(harness.bench.database) as proxy:
        commit = proxy.on_commit("settle_with_effects", "hold_commit")
        harness.enqueue("work", "work", "quiet", "work")
        worker = harness.start_worker(url=proxy.url, lease=30)
        harness.wait_until(commit.triggered.is_set, "the worker commits")
        worker.terminate()
        commit.resume.set()
        worker.wait()
    assert worker.records("completed")
    finish_after_shutdown(harness, worker)
