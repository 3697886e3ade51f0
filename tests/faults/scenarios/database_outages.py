"""Outages of the database: terminated connections, a server crash, a lost COMMIT or its lost reply."""

from __future__ import annotations

from tests.faults.harness import Harness
from tests.faults.proxy import Action, Proxy, TransactionKind
from tests.faults.scenarios.registry import attempts, scenario


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
    harness.recorder.record("fault", kind="server crash")
    server.stop("immediate")
    try:
        # Worker threads log the first message. Where there are leases, the maintenance loop logs the second one.
        for message in ("next try in", *([] if harness.held else ["maintenance:"])):
            harness.wait_until(
                lambda: all(message in harness.output_of(one) for one in workers),  # noqa: B023 - called at once
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
        # Under a lease, "settle" releases the job of the lost claim. Otherwise a job whose settlement was lost runs
        # alone; a second lost settlement would be of the same job, and would count an attempt.
        kinds: list[TransactionKind] = (
            ["settle_with_effects", "journal_open"]
            if harness.held
            else ["settle_with_effects", "claim", "settle", "complete"]
        )
        rules = [proxy.on_commit(kind, action) for kind in kinds]
        for _ in rules:
            harness.recorder.record("fault", kind="lost commit")
        harness.enqueue(*harness.rng.sample(["work"] * 4 + ["quiet"] * 4, 8))
        # With ``batch_size=1`` each job would be responsible for the death of its worker. The worker does not die, so
        # no attempt is counted.
        worker = harness.start_worker(url=proxy.url, batch_size=1, lease=2)
        tables = harness.finish()
        assert all(rule.triggered.is_set() for rule in rules)
    assert not worker.records("lease_lost", "failed")
    if harness.held:
        assert attempts(harness, tables) <= {1}, "an attempt was counted for a lost connection"
