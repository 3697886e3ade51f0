"""All kinds of faults in random order."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.faults.harness import Harness, Process
from tests.faults.proxy import Action, Proxy, TransactionKind
from tests.faults.scenarios.registry import scenario


@scenario
def random_faults(harness: Harness) -> None:
    """Two workers and a producer run under four random faults."""
    harness.enqueue_random(6)
    with Proxy(harness.bench.database) as proxy:

        def start_worker() -> Process:
            rng = harness.rng
            return harness.start_worker(
                url=proxy.url,
                concurrency=rng.randint(1, 3),
                batch_size=rng.randint(1, 5),
                batch=rng.random() < 0.3,
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
    harness.recorder.record("fault", kind="lost commit")
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
