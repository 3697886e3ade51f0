"""Workers that are paused by SIGSTOP, mostly beyond their lease, and resume; and a worker whose handler is slow."""

from __future__ import annotations

import signal

from tests.faults.harness import Harness, Process
from tests.faults.history import with_event
from tests.faults.proxy import Proxy, TransactionKind
from tests.faults.scenarios.registry import attempts, enqueue_after_short_job, scenario, wait_for_handlers


def pause_worker(harness: Harness) -> Process:
    """Return a worker that was paused in a handler until its leases expired."""
    enqueue_after_short_job(harness, "gated", "quiet gated", "work")
    paused = harness.start_worker()
    wait_for_handlers(harness, paused)
    paused.send_signal(signal.SIGSTOP)
    if not harness.held:
        wait_for_expiry(harness)
    return paused


def wait_for_expiry(harness: Harness) -> None:
    """Wait until all leases have expired."""
    valid = "SELECT count(*) FROM job WHERE lease_expires_at > clock_timestamp()"
    harness.wait_until(lambda: not harness.bench.execute(valid), "all leases have expired")


@scenario
def paused_until_others_finished(harness: Harness) -> None:
    """Under a lease other workers run its jobs, and its results are refused. Otherwise its transaction holds them."""
    paused = pause_worker(harness)
    [first] = [record.key for record in paused.records("completed")] or [None]
    harness.open_gate()
    other = harness.start_worker()
    [later] = harness.enqueue("work")
    if harness.held:
        harness.wait_until(
            lambda: any(record.key == later for record in other.records("completed")), "the other worker runs a job"
        )
    else:
        harness.wait_until_finished()
    paused.send_signal(signal.SIGCONT)
    if harness.held:
        assert attempts(harness, harness.finish()) <= {1}
        assert not paused.records("lease_lost")
    else:
        harness.wait_until(lambda: paused.records("lease_lost"), "the paused worker loses its lease")
        harness.finish()
        assert not [record for record in paused.records("completed") if record.key not in {first, later}]


@scenario
def paused_until_another_runs_its_job(harness: Harness) -> None:
    """It resumes while another worker runs its job: its result is refused, and that of the other is accepted."""
    paused = pause_worker(harness)
    if harness.held:
        harness.terminate_connections()
    other = harness.start_worker(lease=30)
    wait_for_handlers(harness, other)
    harness.open_gate(paused)
    paused.send_signal(signal.SIGCONT)
    if harness.held:
        harness.wait_until(
            lambda: len(paused.records("return")) > len(paused.records("completed")), "the paused worker resumes"
        )
    else:
        harness.wait_until(lambda: paused.records("lease_lost"), "the paused worker loses its lease")
    running = other.records("at gate")[0].key
    assert running not in {record.key for record in with_event(harness.records(), "completed")}, "the run was settled"
    harness.open_gate()
    harness.finish()
    assert not other.records("lease_lost")


@scenario
def paused_until_its_jobs_are_rescued(harness: Harness) -> None:
    """It resumes when its jobs are rescued and not claimed again: its results are refused."""
    paused = pause_worker(harness)
    if harness.held:
        harness.terminate_connections()
    else:
        harness.rescue_expired_jobs()
    harness.open_gate()
    paused.send_signal(signal.SIGCONT)
    harness.finish()


@scenario
def paused_while_connections_are_terminated(harness: Harness) -> None:
    """Its connections are terminated while it is paused, and another worker runs its jobs."""
    paused = pause_worker(harness)
    harness.terminate_connections()
    harness.open_gate()
    harness.start_worker()
    harness.wait_until_finished()
    paused.send_signal(signal.SIGCONT)
    harness.finish()


@scenario
def handler_runs_longer_than_lease(harness: Harness) -> None:
    """A live worker keeps the jobs that it runs. Those that it has not started may be released, but not rescued."""
    enqueue_after_short_job(harness, *["gated"] * 3)
    worker = harness.start_worker(lease=1.5)
    wait_for_handlers(harness, worker)
    other = harness.start_worker(lease=1.5)
    if not harness.held:
        wait_for_first_leases(harness)
    harness.open_gate()
    assert attempts(harness, harness.finish()) <= {1}
    assert not with_event(harness.records(), "rescued", "lease_lost")
    assert len(worker.records("start")) + len(other.records("start")) == 4


@scenario
def failed_batch_runs_longer_than_lease(harness: Harness) -> None:
    """A live worker keeps the jobs of a failed batch, which it tries one by one."""
    enqueue_after_short_job(harness, "flaky", "gated", "gated")
    worker = harness.start_worker(batch=True, lease=1.5)
    wait_for_handlers(harness, worker)
    wait_for_first_leases(harness)
    harness.open_gate()
    assert attempts(harness, harness.finish()) <= {1, 2}
    assert not with_event(harness.records(), "rescued", "lease_lost")


def wait_for_first_leases(harness: Harness) -> None:
    """Wait until all leases would have expired that nothing has extended."""
    end = harness.bench.execute("SELECT max(lease_expires_at) + interval '1.5 s' FROM job")
    harness.wait_until(
        lambda: harness.bench.execute("SELECT clock_timestamp() > :end", end=end), "the first leases are over"
    )


@scenario
def paused_while_extending_leases(harness: Harness) -> None:
    """A worker is paused between the extension of its leases and the COMMIT: the rows do not stay locked."""
    harness.enqueue("gated")
    pause_before_commit(harness, "extend")


@scenario
def paused_while_rescuing(harness: Harness) -> None:
    """A worker is paused between the rescue of jobs and the COMMIT: the rows do not stay locked."""
    harness.enqueue("gated")
    killed = harness.start_worker()
    wait_for_handlers(harness, killed)
    killed.send_signal(signal.SIGKILL)
    wait_for_expiry(harness)
    pause_before_commit(harness, "rescue")


def pause_before_commit(harness: Harness, kind: TransactionKind) -> None:
    """Pause a worker before a COMMIT, and resume it when another worker has run all jobs."""
    with Proxy(harness.bench.database) as proxy:
        commit = proxy.on_commit(kind, "hold_commit")
        worker = harness.start_worker(url=proxy.url)
        harness.wait_until(commit.triggered.is_set, "the worker commits")
        worker.send_signal(signal.SIGSTOP)
        harness.open_gate()
        harness.start_worker()
        harness.wait_until_finished()
        commit.resume.set()
        worker.send_signal(signal.SIGCONT)
        harness.finish()
