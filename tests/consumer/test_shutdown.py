"""Signals to real processes: running jobs end within the grace period, the other ones are released."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.consumer.bench import Bench
from tests.programs import wait_until

pytestmark = pytest.mark.usefixtures("frequent_rescues")

SIGNALS = [signal.SIGTERM, signal.SIGINT]


def answers_by_default(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has no handler of its own for a signal: any more, once it has answered the first."""
    with Path(f"/proc/{pid}/status").open() as status:
        caught = next(line.split()[1] for line in status if line.startswith("SigCgt"))
    return not int(caught, 16) >> (number - 1) & 1


def test_a_signal_lets_handlers_finish_and_releases_other_jobs(bench: Bench) -> None:
    check_that_handlers_finish(bench, signal.SIGTERM)


def test_ctrl_c_does_so_as_well(mixed: Bench) -> None:
    check_that_handlers_finish(mixed, signal.SIGINT)


def check_that_handlers_finish(bench: Bench, number: signal.Signals) -> None:
    keys = bench.enqueue(8)
    with bench.worker("wait", batch_size=8) as worker:
        worker.await_word("started")
        worker.signal(number)
        wait_until(lambda: answers_by_default(worker.pid, number))
        worker.write("go on")
        assert worker.await_end() == 0
        assert worker.said("returned")
        [begun] = worker.said("started")
    assert bench.states() == {"completed": 1, "pending": 7}
    assert bench.attempts() == dict.fromkeys(keys, 0) | {int(begun): 1}
    assert bench.effects() == {int(begun): 1}
    bench.assert_tidy()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_an_idle_worker(leased: Bench, number: signal.Signals) -> None:
    """It would poll again in an hour."""
    bench = leased
    bench.enqueue(1)
    with bench.worker("work", poll_interval=3600, concurrency=2) as worker:
        worker.await_word("completed")
        worker.signal(number)
        assert worker.await_end() == 0
        assert worker.said("returned")


def test_after_the_grace_period_jobs_are_released(bench: Bench) -> None:
    """And the process ends, whatever its handlers do."""
    check_that_jobs_come_back(bench, "hang")


def test_after_the_grace_period_locked_jobs_are_released(leased: Bench) -> None:
    check_that_jobs_come_back(leased, "hang_with_lock")


def check_that_jobs_come_back(bench: Bench, handler: str) -> None:
    keys = bench.enqueue(4)
    with bench.worker(handler, grace=0.3, concurrency=2, batch_size=2, lease=3) as worker:
        worker.await_word("started", times=2)
        worker.signal(signal.SIGTERM)
        assert worker.await_end() == 0
        assert worker.said("returned")
        # A task is cancelled; a thread goes on.
        assert worker.said("left") == (["2"] if bench.api == "sync" else [])
    locked = handler == "hang_with_lock" and bench.strategy == "update_status" and bench.api == "sync"
    if locked:
        # Their rows were locked by their handlers until the process ended: only their leases can give them back.
        with bench.consumer().running():
            wait_until(lambda: bench.states() == {"completed": 4})
        assert set(bench.attempts().values()) == {1}
        return
    wait_until(lambda: bench.states() == {"pending": 4})
    assert bench.attempts() == dict.fromkeys(keys, 0)
    # A transaction ends some moments after its process.
    wait_until(lambda: bench.consumer().drain() == 0 and bench.states() == {"completed": 4})
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


@pytest.mark.each_value
@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
def test_a_second_signal_ends_it_at_once_and_loses_nothing(
    mixed: Bench, first: signal.Signals, second: signal.Signals
) -> None:
    bench = mixed
    bench.enqueue(3)
    with bench.worker("wait", lease=1) as worker:
        worker.await_word("started")
        worker.signal(first)
        wait_until(lambda: answers_by_default(worker.pid, second))
        worker.signal(second)
        assert worker.await_end() == -second
    with bench.consumer().running():
        wait_until(lambda: bench.states() == {"completed": 3})
    assert not bench.effects()
    bench.assert_tidy()


def test_a_signal_stops_every_consumer_of_the_process(leased: Bench) -> None:
    """Two models served in one process, by two threads or in one event loop."""
    bench = leased
    with bench.worker("work", consumers=2) as worker:
        worker.await_word("ready", times=2)
        bench.enqueue(10)
        wait_until(lambda: bench.states() == {"completed": 10})
        worker.signal(signal.SIGTERM)
        assert worker.await_end() == 0
        assert len(worker.said("returned")) == 2
        assert worker.said("handlers are back")
