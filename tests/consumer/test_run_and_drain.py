"""run(), drain() and stop(), also by a signal: how many handlers run at once, when a run ends, and what is released."""

import signal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer, Retry
from sqlaqueue.exc import ConfigurationError
from tests.consumer.bench import Bench, Gate, for_some, noting
from tests.programs import wait_until


def test_drain_runs_every_job_and_returns_their_number(bench: Bench) -> None:
    keys = bench.enqueue(25)
    server = bench.consumer(bench.work, batch_size=10)
    assert server.drain() == 25
    bench.expect({"completed": 25}, attempts=1, effects=keys)
    assert server.drain() == 0
    bench.assert_tidy()


@pytest.mark.once
@pytest.mark.parametrize("strategy", ["update_status", "delete_returning", "batch_select"])
def test_a_consumer_works_with_an_older_driver(sync_bench: Bench) -> None:
    first, *_ = sync_bench.enqueue(20)
    engine = sa.create_engine(sync_bench.database.url("psycopg2"))

    def work(session: Any, job: Any) -> None:
        session.execute(sync_bench.effect(job.id))
        if job.id == first and job.attempts == 1:
            raise Retry(0)

    assert Consumer(sync_bench.Job, work, sessionmaker(engine), batch_size=5, concurrency=2).drain() == 21
    engine.dispose()
    sync_bench.expect({"completed": 20}, effects=1)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_drain_with_several_workers_runs_every_job(bench: Bench, batch_size: int) -> None:
    bench.enqueue(30)
    assert bench.consumer(batch_size=batch_size, concurrency=4).drain() == 30
    bench.expect({"completed": 30})


def test_drain_waits_for_retries_that_are_due_at_once(bench: Bench) -> None:
    keys = bench.enqueue(6)
    failures = dict.fromkeys(keys, 2)

    async def fail_twice(io: Any, job: Any) -> None:
        if failures[job.id]:
            failures[job.id] -= 1
            raise Retry(0)

    assert bench.consumer(fail_twice, concurrency=3, batch_size=2).drain() == 18
    bench.expect({"completed": 6}, attempts=3)


def test_drain_leaves_jobs_that_are_due_later(bench: Bench) -> None:
    bench.enqueue(2, run_at=sa.func.now() + sa.text("interval '1 hour'"))
    bench.enqueue(1)
    assert bench.consumer(concurrency=2).drain() == 1
    bench.expect({"completed": 1, "pending": 2})


def test_drain_leaves_jobs_of_other_workers(bench: Bench) -> None:
    bench.enqueue(1)
    gate = Gate()
    with bench.consumer(gate).running():
        wait_until(lambda: gate.running == 1)
        bench.enqueue(2)
        assert bench.consumer().drain() == 2
        gate.open()
    assert bench.states() == {"completed": 3}


def test_run_processes_jobs_until_it_is_stopped(bench: Bench) -> None:
    with bench.consumer(concurrency=2).running() as server:
        for _ in range(3):
            bench.enqueue(4)
            wait_until(lambda: not bench.states()["pending"] + bench.states()["processing"])
        assert not server.finished.is_set()
    bench.expect({"completed": 12})


def test_a_batch_handler_gets_a_list(bench: Bench) -> None:
    keys = bench.enqueue(20)
    calls: list[list[int]] = []

    async def work(io: Any, jobs: Any) -> None:
        assert isinstance(jobs, list)
        calls.append([job.id for job in jobs])
        for job in jobs:
            await io.execute(bench.effect(job.id))

    assert bench.consumer(work, batch=True, batch_size=8).drain() == 20
    assert calls == [keys[:8], keys[8:16], keys[16:]]
    bench.expect(effects=keys)


def test_a_batch_is_never_larger_than_a_claim(bench: Bench) -> None:
    bench.enqueue(40)
    sizes: list[int] = []
    work = noting(sizes, lambda _, jobs: len(jobs))
    assert bench.consumer(work, batch=True, batch_size=5, concurrency=4).drain() == 40
    assert max(sizes) <= 5


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_concurrency_is_the_number_of_handlers_that_run_at_once(bench: Bench, batch_size: int) -> None:
    """Under a strategy that holds a transaction each worker has a batch of its own, so it takes several batches."""
    gate = Gate()
    bench.enqueue(batch_size * 3 if bench.held else 12)
    with bench.consumer(gate, concurrency=3, batch_size=batch_size).running():
        wait_until(lambda: gate.running == 3, "three handlers at once")
        gate.open()
        wait_until(lambda: not bench.states()["pending"] + bench.states()["processing"])
    assert gate.most == 3


def test_an_idle_worker_takes_the_next_job_at_once(bench: Bench) -> None:
    """While another worker is busy, whichever of them claimed."""
    long, quick = Gate(), Gate()
    quick.open()
    bench.enqueue(1, payload="long", priority=-1)
    work = for_some({"long": long, "quick": quick})
    # A worker waits this long only if it was not woken.
    with bench.consumer(work, concurrency=2, batch_size=1, poll_interval=0.01).running():
        for _ in range(1, 40):
            bench.enqueue(1, payload="quick")
            quick.await_call()
        long.open()
    assert bench.states() == {"completed": 40}


def test_runs_are_settled_while_another_worker_waits_for_the_next_poll(bench: Bench) -> None:
    """That worker keeps the turn to claim, and polls again in an hour."""
    gate = Gate()
    bench.enqueue(1)
    with bench.consumer(gate, concurrency=2, poll_interval=3600).running():
        wait_until(lambda: gate.running == 1)
        gate.open()
        wait_until(lambda: bench.states() == {"completed": 1})


def test_runs_are_settled_while_all_workers_are_busy(leased: Bench) -> None:
    gate = Gate()
    leased.enqueue(4)
    with leased.consumer(gate, concurrency=2, batch_size=4).running():
        gate.await_call(2)
        gate.let_go()
        gate.await_call()
        wait_until(lambda: leased.states()["completed"] == 1)
        gate.open()


def test_stop_from_a_handler(bench: Bench) -> None:
    """Jobs that have not begun are released without a counted attempt."""
    bench.enqueue(10)

    async def stop(io: Any, job: Any) -> None:
        server.stop()

    server = bench.consumer(stop)
    server.run()
    assert bench.states() == {"completed": 1, "pending": 9}
    assert sum(bench.attempts().values()) == 1
    bench.assert_tidy()


def test_stop_while_idle(bench: Bench) -> None:
    with bench.consumer(concurrency=3, poll_interval=3600).running() as server:
        wait_until(lambda: server.context.has_claimed)
    assert server.finished.is_set()


def test_stop_waits_for_handlers(bench: Bench) -> None:
    bench.enqueue(1)
    gate = Gate()
    with bench.consumer(gate, concurrency=2).running() as server:
        wait_until(lambda: gate.running == 1)
        server.stop()
        gate.open()
    assert bench.states() == {"completed": 1}


def test_it_runs_again_after_it_was_stopped(bench: Bench) -> None:
    server = bench.consumer(concurrency=2)
    for n in range(1, 3):
        with server.running():
            bench.enqueue(3)
            wait_until(lambda n=n: bench.states()["completed"] == 3 * n)
    assert server.drain() == 0


def test_it_cannot_run_twice_at_once(bench: Bench) -> None:
    server = bench.consumer()
    with server.running(), pytest.raises(ConfigurationError, match="running already"):
        server.drain_again()


def test_several_consumers_share_a_process(bench: Bench) -> None:
    bench.enqueue(60)
    servers = [bench.consumer(batch_size=3, concurrency=2, worker_name=str(n)) for n in range(2)]
    with servers[0].running(), servers[1].running():
        wait_until(lambda: bench.states() == {"completed": 60})
    told = [server.told("completed") for server in servers]
    assert sorted(told[0] + told[1]) == sorted(bench.rows())
    bench.assert_tidy()


def test_a_select_serves_some_of_the_jobs(bench: Bench) -> None:
    bench.enqueue(3, payload="mine")
    bench.enqueue(3, payload="theirs")
    mine = sa.select(bench.Job).where(bench.Job.payload == "mine")
    assert bench.consumer(model=mine, concurrency=2).drain() == 3
    assert {row.payload for row in bench.rows().values() if row.status == "pending"} == {"theirs"}
    bench.assert_tidy()


def test_failing_jobs_at_the_head_do_not_block_the_others(bench: Bench) -> None:
    head = bench.enqueue(1, priority=-1)[0]
    bench.enqueue(5)
    work = for_some({head: ValueError()})
    with bench.consumer(work, batch_size=1, retry=lambda *_: 3600).running():
        wait_until(lambda: bench.states() == {"completed": 5, "pending": 1})
    assert bench.row(head).attempts == 1


def test_a_job_at_the_head_that_is_retried_at_once_fails_after_its_attempts(bench: Bench) -> None:
    head = bench.enqueue(1, priority=-1)[0]
    bench.enqueue(5)
    work = for_some({head: ValueError()})
    bench.consumer(work, batch_size=1).drain()
    assert bench.states() == {"completed": 5, "failed": 1}
    assert bench.row(head).attempts == 3
    bench.assert_tidy()


def test_a_stop_after_the_end_of_the_event_loop(supply: Any) -> None:
    """Another thread may call it when the run has just ended."""
    bench = supply.take("batch_select", "async")
    bench.enqueue()
    contexts: list[Any] = []
    server = bench.consumer(noting(contexts, lambda *_: server.context))
    server.drain()
    assert contexts[0].runner._loop.is_closed()
    contexts[0].stop()


# -- signals to real processes: running jobs end within the grace period, the other ones are released --------------
SIGNALS = [signal.SIGTERM, signal.SIGINT]


def answers_by_default(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has no handler of its own for a signal: any more, once it has answered the first."""
    with Path(f"/proc/{pid}/status").open() as status:
        caught = next(line.split()[1] for line in status if line.startswith("SigCgt"))
    return not int(caught, 16) >> (number - 1) & 1


@pytest.mark.usefixtures("frequent_rescues")
def test_a_signal_lets_handlers_finish_and_releases_other_jobs(bench: Bench) -> None:
    check_that_handlers_finish(bench, signal.SIGTERM)


@pytest.mark.usefixtures("frequent_rescues")
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
    bench.expect(
        {"completed": 1, "pending": 7}, attempts=dict.fromkeys(keys, 0) | {int(begun): 1}, effects={int(begun): 1}
    )


@pytest.mark.usefixtures("frequent_rescues")
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


@pytest.mark.usefixtures("frequent_rescues")
def test_after_the_grace_period_jobs_are_released(bench: Bench) -> None:
    """And the process ends, whatever its handlers do."""
    check_that_jobs_come_back(bench, "hang")


@pytest.mark.usefixtures("frequent_rescues")
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
    bench.expect(attempts=1)


@pytest.mark.usefixtures("frequent_rescues")
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
    bench.expect(effects={})


@pytest.mark.usefixtures("frequent_rescues")
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
