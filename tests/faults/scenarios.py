"""The scenarios: each runs real processes under some faults, and ends with a check of the history.

Beyond that a scenario asserts only what the checker cannot know, such as that a graceful shutdown counts no attempt.
"""

import signal
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from sqlaqueue.mapping.mixin import spec_of
from tests.faults.checker import Tables
from tests.faults.harness import Harness
from tests.faults.history import with_event
from tests.faults.processes import Process
from tests.faults.proxy import Action, Proxy, TransactionKind
from tests.faults.roles import EXITED_BY_JOB

Scenario = Callable[[Harness], None]

SCENARIOS: dict[str, Scenario] = {}
"""All scenarios by the name of their function."""

STRATEGIES_OF = {
    "messages_deleted": ("delete_returning",),
    "settled_while_other_job_runs": ("update_status",),
    "failed_batch_runs_longer_than_lease": ("update_status",),
    "paused_while_extending_leases": ("update_status",),
    "paused_while_rescuing": ("update_status",),
}
"""The strategies of the scenarios that do not apply to all."""

ONE_API = {
    "requeued_by_plain_sql",
    "batch_handler",
    "killed_with_several_claims",
    "handler_exits_process_with_concurrency",
    "handler_runs_longer_than_lease",
}
"""Scenarios that run with one API under each strategy, to save time: the API does not matter to them."""

CRASHES_SERVER = {"server_crashed"}
"""Scenarios that need a server of their own."""


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def attempts(harness: Harness, tables: Tables) -> set[int]:
    """Return the distinct numbers of attempts, in rows and in ``completed`` events of jobs that leave no row."""
    completed = {record.details["attempt"] for record in with_event(harness.records(), "completed")}
    return completed | {row.attempts for row in tables.rows.values()}


def enqueue_after_short_job(harness: Harness, *payloads: str) -> None:
    """Enqueue jobs that one claim takes together: under a lease, a worker does so once it has run a short job."""
    harness.enqueue("quiet", priority=-9)
    harness.enqueue(*payloads, priority=0)


def wait_for_handlers(harness: Harness, worker: Process, number: int = 1) -> None:
    harness.wait_until(lambda: len(worker.records("at gate")) >= number, "handlers are at the gate")


# -- without a fault: order of claims, batches, requeued jobs, deleted messages, slow jobs ---------------------------


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


# -- workers that die: killed by SIGKILL, or by a handler that exits the process or terminates its connection --------


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


# -- workers that are paused, mostly beyond their lease, and resume; and a worker whose handler is slow --------------


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


# -- outages of the database: terminated connections, a server crash, a lost COMMIT or its lost reply ----------------


@scenario
def connections_terminated(harness: Harness) -> None:
    """Random connections are terminated, five times."""
    harness.enqueue_random(8)
    for _ in range(2):
        harness.start_worker(concurrency=harness.rng.randint(1, 3))
    harness.start_producer(12)
    for _ in range(5):
        harness.wait_for_records(12)
        harness.terminate_connections(share=0.5)
    harness.finish()


@scenario
def server_crashed(harness: Harness) -> None:
    """The server crashes while workers run, and is started again when they have noticed it."""
    harness.enqueue_random(10)
    workers = [harness.start_worker(concurrency=harness.rng.randint(1, 2)) for _ in range(2)]
    server = harness.bench.database.server
    harness.wait_for_records(25)
    harness.record_fault("server crash")
    server.stop("immediate")
    try:
        # Worker threads log the first message. Where there are leases, the maintenance loop logs the second one.
        for message in ("next try in", *([] if harness.held else ["maintenance:"])):
            harness.wait_until(
                lambda: all(message in one.output for one in workers),  # noqa: B023 - called at once
                f"all workers log {message!r}",
            )
    finally:
        server.start()
    harness.enqueue_random(4)
    harness.finish()


@scenario
def commit_lost(harness: Harness) -> None:
    """One COMMIT of each kind does not reach the server."""
    run_with_lost_commits(harness, "drop_commit")


@scenario
def commit_reply_lost(harness: Harness) -> None:
    """The server executes one COMMIT of each kind, and the worker receives no reply."""
    run_with_lost_commits(harness, "drop_reply")


def run_with_lost_commits(harness: Harness, action: Action) -> None:
    with Proxy(harness.bench.database) as proxy:
        # Under a lease, "settle" completes a quiet job, or releases the job of the lost claim. Otherwise a job whose
        # settlement was lost runs alone; a second lost settlement would be of the same job, and would count an attempt.
        kinds: list[TransactionKind] = (
            ["settle_with_effects", "journal_open"] if harness.held else ["settle_with_effects", "claim", "settle"]
        )
        rules = [proxy.on_commit(kind, action) for kind in kinds]
        for _ in rules:
            harness.record_fault("lost commit")
        harness.enqueue(*harness.rng.sample(["work"] * 4 + ["quiet"] * 4, 8))
        # With ``batch_size=1`` each job would be responsible for the death of its worker. The worker does not die, so
        # no attempt is counted.
        worker = harness.start_worker(url=proxy.url, batch_size=1, lease=2)
        tables = harness.finish()
        assert all(rule.triggered.is_set() for rule in rules)
    assert not worker.records("lease_lost", "failed")
    if harness.held:
        assert attempts(harness, tables) <= {1}, "an attempt was counted for a lost connection"


# -- SIGTERM while a worker is idle, claims, runs a handler, exceeds its grace period, or settles --------------------


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


# -- all kinds of faults in random order -----------------------------------------------------------------------------


@scenario
def random_faults(harness: Harness) -> None:
    """Two workers and a producer run under four random faults."""
    harness.enqueue_random(6)
    with Proxy(harness.bench.database) as proxy:

        def start_worker() -> Process:
            rng = harness.rng
            return harness.start_worker(
                url=proxy.url, concurrency=rng.randint(1, 3), batch_size=rng.randint(1, 5), batch=rng.random() < 0.3
            )

        workers = [start_worker(), start_worker()]
        harness.start_producer(15)
        for fault in harness.rng.choices(FAULTS, k=4):
            harness.wait_for_records(12)
            fault(harness, proxy, workers)
            if workers[0].exit_code is not None:
                workers[0] = start_worker()
            harness.rng.shuffle(workers)
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
        harness.finish()


def _kill(harness: Harness, _: Proxy, workers: list[Process]) -> None:
    workers[0].send_signal(signal.SIGKILL)
    workers[0].wait()


def _shut_down(_: Harness, __: Proxy, workers: list[Process]) -> None:
    workers[0].send_signal(signal.SIGCONT)
    workers[0].send_signal(signal.SIGTERM)
    assert workers[0].wait() == 0


def _pause(_: Harness, __: Proxy, workers: list[Process]) -> None:
    workers[0].send_signal(signal.SIGSTOP)


def _resume(_: Harness, __: Proxy, workers: list[Process]) -> None:
    for worker in workers:
        worker.send_signal(signal.SIGCONT)


def _terminate_connections(harness: Harness, _: Proxy, __: list[Process]) -> None:
    harness.terminate_connections(share=0.5)


def _lose_commit_or_reply(harness: Harness, proxy: Proxy, _: list[Process]) -> None:
    harness.record_fault("lost commit")
    kinds: list[TransactionKind] = (
        ["settle_with_effects", "journal_open", "journal_discard"]
        if harness.held
        else ["settle_with_effects", "complete", "settle", "claim", "extend", "rescue"]
    )
    actions: list[Action] = ["drop_commit", "drop_reply"]
    proxy.on_commit(harness.rng.choice(kinds), harness.rng.choice(actions))


FAULTS: list[Callable[[Harness, Proxy, list[Process]], None]] = [
    _kill,
    _shut_down,
    _pause,
    _resume,
    _terminate_connections,
    _lose_commit_or_reply,
]
