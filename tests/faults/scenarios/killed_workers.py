"""Workers that die: killed by SIGKILL, or by a handler that exits the process or terminates its connection."""

from __future__ import annotations

import signal
from typing import Any

from tests.faults.harness import Harness
from tests.faults.process_roles import EXITED_BY_JOB
from tests.faults.scenarios.registry import attempts, scenario, wait_for_handlers


@scenario
def killed_at_random(harness: Harness) -> None:
    """Workers are killed at random moments, and so is a producer."""
    harness.enqueue_random(10)
    for _ in range(2):
        worker = harness.start_worker(concurrency=harness.rng.randint(1, 3))
        producer = harness.start_producer(6)
        harness.wait_for_records(25)
        worker.send_signal(signal.SIGKILL)
        if harness.rng.random() < 0.5:
            producer.send_signal(signal.SIGKILL)
    harness.start_worker(concurrency=2)
    harness.finish()


@scenario
def killed_with_one_batch(harness: Harness) -> None:
    """A worker dies with several jobs: no job is solely responsible, and no attempt is counted."""
    harness.enqueue(*["gated"] * 4)
    worker = harness.start_worker(concurrency=2, batch_size=2)
    wait_for_handlers(harness, worker, 2)
    worker.send_signal(signal.SIGKILL)
    harness.open_gate()
    harness.start_worker()
    assert attempts(harness, harness.finish()) <= {1}
    harness.bench.assert_tidy()


@scenario
def killed_with_several_claims(harness: Harness) -> None:
    """A worker dies with several jobs, each claimed by a separate statement: no attempt is counted."""
    harness.enqueue(*["gated"] * 3)
    worker = harness.start_worker(concurrency=3, batch_size=1)
    wait_for_handlers(harness, worker, 3)
    worker.send_signal(signal.SIGKILL)
    harness.open_gate()
    harness.start_worker()
    assert attempts(harness, harness.finish()) <= {1}
    harness.bench.assert_tidy()


@scenario
def handler_exits_process(harness: Harness) -> None:
    """One job of ten exits its process: it fails after its last attempt, and no other job loses an attempt."""
    run_until_poison_job_fails(harness, "exit")


@scenario
def handler_exits_process_with_concurrency(harness: Harness) -> None:
    """One job of ten exits its process, in which three handlers run at once."""
    run_until_poison_job_fails(harness, "exit", concurrency=3, batch_size=2)


@scenario
def handler_terminates_connection(harness: Harness) -> None:
    """One job of ten terminates its worker's connection: it fails after its last attempt."""
    run_until_poison_job_fails(harness, "disconnect")


def run_until_poison_job_fails(harness: Harness, payload: str, **options: Any) -> None:
    """Run ten jobs, one of them with ``payload``, and replace each worker that exits."""
    other_jobs = harness.enqueue(*["work"] * 5, priority=0)
    [poison] = harness.enqueue(payload, max_attempts=2, priority=0)
    other_jobs += harness.enqueue(*["quiet"] * 4, priority=0)
    worker = harness.start_worker(**options)
    exits = 0

    def is_finished() -> bool:
        nonlocal worker, exits
        if worker.has_exited:
            assert worker.wait() == EXITED_BY_JOB
            harness.recorder.record("exited", worker=worker.name)
            exits += 1
            assert exits <= 3, "the poison job has more runs than attempts"
            worker = harness.start_worker(**options)
        return harness.is_finished()

    harness.wait_until(is_finished, "all jobs are in a final state")
    tables = harness.finish()
    assert tables.rows[poison].state == "failed"
    assert tables.rows[poison].attempts == 2
    found = {tables.rows[key].attempts for key in other_jobs if key in tables.rows}
    assert found <= {1}, "an attempt was counted for a job that is not responsible"
