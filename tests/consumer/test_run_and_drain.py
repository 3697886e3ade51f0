"""run(), drain() and stop(): the arguments of handlers, how many run at once, and when a run ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer, Retry
from sqlaqueue.exc import ConfigurationError
from tests.consumer.bench import Bench
from tests.programs import wait_until


class Gauge:
    """Counts the running handlers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = self.calls = 0
        self.open = threading.Event()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.calls += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1

    async def handle(self, io: Any, job: Any) -> None:
        """Wait in the handler until the gauge is opened."""
        with self:
            await io.wait(self.open)


def test_drain_runs_every_job_and_returns_their_number(bench: Bench) -> None:
    keys = bench.enqueue(25)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))

    server = bench.consumer(work, batch_size=10)
    assert server.drain() == 25
    assert bench.effects() == dict.fromkeys(keys, 1)
    assert bench.states() == {"completed": 25}
    assert set(bench.attempts().values()) == {1}
    assert server.drain() == 0
    bench.assert_tidy()


@pytest.mark.once
@pytest.mark.parametrize("strategy", ["update_status", "delete_returning", "batch_select"])
def test_a_consumer_works_with_an_older_driver(supply: Any, strategy: str) -> None:
    bench = supply.take(strategy, "sync")
    first, *_ = bench.enqueue(20)
    engine = sa.create_engine(bench.database.url("psycopg2"))

    def work(session: Any, job: Any) -> None:
        session.execute(bench.effect(job.id))
        if job.id == first and job.attempts == 1:
            raise Retry(0)

    assert Consumer(bench.Job, work, sessionmaker(engine), batch_size=5, concurrency=2).drain() == 21
    engine.dispose()
    assert bench.states() == {"completed": 20}
    assert set(bench.effects().values()) == {1}
    bench.assert_tidy()


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_drain_with_several_workers_runs_every_job(bench: Bench, batch_size: int) -> None:
    bench.enqueue(30)
    assert bench.consumer(batch_size=batch_size, concurrency=4).drain() == 30
    assert bench.states() == {"completed": 30}
    bench.assert_tidy()


def test_drain_waits_for_retries_that_are_due_at_once(bench: Bench) -> None:
    keys = bench.enqueue(6)
    failures = dict.fromkeys(keys, 2)

    async def fail_twice(io: Any, job: Any) -> None:
        if failures[job.id]:
            failures[job.id] -= 1
            raise Retry(0)

    assert bench.consumer(fail_twice, concurrency=3, batch_size=2).drain() == 18
    assert bench.states() == {"completed": 6}
    assert set(bench.attempts().values()) == {3}
    bench.assert_tidy()


def test_drain_leaves_jobs_that_are_due_later(bench: Bench) -> None:
    bench.enqueue(2, run_at=sa.func.now() + sa.text("interval '1 hour'"))
    bench.enqueue(1)
    assert bench.consumer(concurrency=2).drain() == 1
    assert bench.states() == {"completed": 1, "pending": 2}
    bench.assert_tidy()


def test_drain_leaves_jobs_of_other_workers(bench: Bench) -> None:
    bench.enqueue(1)
    gauge = Gauge()
    with bench.consumer(gauge.handle).running():
        wait_until(lambda: gauge.now == 1)
        bench.enqueue(2)
        assert bench.consumer().drain() == 2
        gauge.open.set()
    assert bench.states() == {"completed": 3}


def test_run_processes_jobs_until_it_is_stopped(bench: Bench) -> None:
    with bench.consumer(concurrency=2).running() as server:
        for _ in range(3):
            bench.enqueue(4)
            wait_until(lambda: not bench.states()["pending"] + bench.states()["processing"])
        assert not server.finished.is_set()
    assert bench.states() == {"completed": 12}
    bench.assert_tidy()


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
    assert bench.effects() == dict.fromkeys(keys, 1)
    bench.assert_tidy()


def test_a_batch_is_never_larger_than_a_claim(bench: Bench) -> None:
    bench.enqueue(40)
    sizes: list[int] = []

    async def work(io: Any, jobs: Any) -> None:
        sizes.append(len(jobs))

    assert bench.consumer(work, batch=True, batch_size=5, concurrency=4).drain() == 40
    assert max(sizes) <= 5


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_concurrency_is_the_number_of_handlers_that_run_at_once(bench: Bench, batch_size: int) -> None:
    """Under a strategy that holds a transaction each worker has a batch of its own, so it takes several batches."""
    gauge = Gauge()
    bench.enqueue(batch_size * 3 if bench.held else 12)
    with bench.consumer(gauge.handle, concurrency=3, batch_size=batch_size).running():
        wait_until(lambda: gauge.now == 3, "three handlers at once")
        gauge.open.set()
        wait_until(lambda: not bench.states()["pending"] + bench.states()["processing"])
    assert gauge.most == 3


def test_an_idle_worker_takes_the_next_job_at_once(bench: Bench) -> None:
    """While another worker is busy, whichever of them claimed."""
    long, gauge = threading.Event(), Gauge()
    bench.enqueue(1, payload="long", priority=-1)

    async def work(io: Any, job: Any) -> None:
        if job.payload == "long":
            await io.wait(long)
        else:
            with gauge:
                pass

    # A worker waits this long only if it was not woken.
    with bench.consumer(work, concurrency=2, batch_size=1, poll_interval=0.01).running():
        for n in range(1, 40):
            bench.enqueue(1)
            wait_until(lambda n=n: gauge.calls == n)
        long.set()
    assert bench.states() == {"completed": 40}


def test_runs_are_settled_while_another_worker_waits_for_the_next_poll(bench: Bench) -> None:
    """That worker keeps the turn to claim, and polls again in an hour."""
    gauge = Gauge()
    bench.enqueue(1)
    with bench.consumer(gauge.handle, concurrency=2, poll_interval=3600).running():
        wait_until(lambda: gauge.now == 1)
        gauge.open.set()
        wait_until(lambda: bench.states() == {"completed": 1})


def test_runs_are_settled_while_all_workers_are_busy(leased: Bench) -> None:
    done, gauge = threading.Event(), Gauge()

    async def work(io: Any, job: Any) -> None:
        if job.payload == "quick":
            await io.wait(done)
        else:
            await gauge.handle(io, job)

    quick = leased.enqueue(1, payload="quick", priority=-1)
    leased.enqueue(3)
    with leased.consumer(work, concurrency=2, batch_size=4).running():
        wait_until(lambda: gauge.now == 1)
        done.set()
        wait_until(lambda: gauge.now == 2)
        wait_until(lambda: leased.row(quick[0]).status == "completed")
        gauge.open.set()


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
    gauge = Gauge()
    with bench.consumer(gauge.handle, concurrency=2).running() as server:
        wait_until(lambda: gauge.now == 1)
        server.stop()
        gauge.open.set()
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
    servers = [bench.consumer(batch_size=3, concurrency=2, name=str(n)) for n in range(2)]
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

    async def work(io: Any, job: Any) -> None:
        if job.id == head:
            raise ValueError

    with bench.consumer(work, batch_size=1, retry=lambda *_: 3600).running():
        wait_until(lambda: bench.states() == {"completed": 5, "pending": 1})
    assert bench.row(head).attempts == 1


def test_a_job_at_the_head_that_is_retried_at_once_fails_after_its_attempts(bench: Bench) -> None:
    head = bench.enqueue(1, priority=-1)[0]
    bench.enqueue(5)

    async def work(io: Any, job: Any) -> None:
        if job.id == head:
            raise ValueError

    bench.consumer(work, batch_size=1).drain()
    assert bench.states() == {"completed": 5, "failed": 1}
    assert bench.row(head).attempts == 3
    bench.assert_tidy()


def test_a_stop_after_the_end_of_the_event_loop(supply: Any) -> None:
    """Another thread may call it when the run has just ended."""
    bench = supply.take("batch_select", "async")
    bench.enqueue()
    contexts: list[Any] = []

    async def work(io: Any, job: Any) -> None:
        contexts.append(server.context)

    server = bench.consumer(work)
    server.drain()
    assert contexts[0].runner._loop.is_closed()
    contexts[0].stop()
