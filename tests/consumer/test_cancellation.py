"""cancel() of claimed jobs, and the cancellation of a task that runs a Consumer."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import cancel
from tests.consumer.bench import Bench
from tests.programs import wait_until

pytestmark = pytest.mark.usefixtures("frequent_rescues")


def ask(bench: Bench, *keys: int) -> None:
    """Cancel some jobs, whatever they are doing."""
    with bench.sessions() as session:
        session.execute(cancel(sa.select(bench.Job).where(bench.Job.id.in_(keys))))
        session.commit()


def test_a_running_task_is_cancelled(supply: Any, strategy: str) -> None:
    bench = supply.take(strategy, "async")
    good, bad = bench.enqueue(2)
    started = threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            started.set()
            await asyncio.sleep(60)

    with bench.consumer(work).running() as server:
        assert started.wait(30)
        ask(bench, bad)
        wait_until(lambda: bench.states() == {"completed": 1, "cancelled": 1})
    assert server.told("cancelled") == [bad]
    assert bench.row(bad).last_error == "cancelled on request"
    assert bench.row(bad).attempts == 1
    assert bench.effects() == {good: 1}
    bench.assert_tidy()


def test_a_running_thread_is_marked(supply: Any, strategy: str) -> None:
    """It cannot be stopped: a success counts, and a failed run is cancelled and not retried."""
    bench = supply.take(strategy, "sync")
    succeeds, fails = bench.enqueue(2)
    go_on, started = threading.Event(), threading.Semaphore(0)

    async def work(io: Any, job: Any) -> None:
        started.release()
        await io.wait(go_on)
        if job.id == fails:
            raise ValueError

    with bench.consumer(work, concurrency=2, batch_size=1).running() as server:
        assert started.acquire(timeout=30)
        assert started.acquire(timeout=30)
        ask(bench, succeeds, fails)
        wait_until(lambda: all(one.cancelled for one in server.context.in_flight.busy()))
        go_on.set()
        wait_until(lambda: bench.states() == {"completed": 1, "cancelled": 1})
    assert server.told("cancelled") == [fails]
    assert bench.attempts() == {succeeds: 1, fails: 1}
    bench.assert_tidy()


@pytest.mark.parametrize("succeeds", [False, True])
def test_a_job_is_cancelled_while_its_worker_shuts_down(bench: Bench, *, succeeds: bool) -> None:
    """Its handler has the grace period, and must not use it up: a task is cancelled, a thread is marked."""
    [key] = bench.enqueue(1)
    started, go_on = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        started.set()
        await io.wait(go_on)
        if not succeeds:
            raise ValueError

    with bench.consumer(work).running() as server:
        assert started.wait(30)
        context = server.context
        server.stop()
        ask(bench, key)
        if bench.api == "sync":
            wait_until(lambda: any(one.cancelled for one in context.in_flight.busy()))
            go_on.set()
        assert server.finished.wait(30)
    # A thread that succeeds has done its work.
    completed = succeeds and bench.api == "sync"
    assert bench.states() == {"completed" if completed else "cancelled": 1}
    assert bench.effects() == ({key: 1} if completed else {})
    assert server.told("completed" if completed else "cancelled") == [key]
    assert bench.row(key).attempts == 1
    assert bench.execute("SELECT count(*) FROM sqlaqueue_control") == 0
    bench.assert_tidy()


def test_a_claimed_job_that_has_not_begun_is_cancelled(bench: Bench) -> None:
    """It waits behind others in the executor of its worker."""
    bench.enqueue(3, payload="quick", priority=-1)
    [first] = bench.enqueue(1)
    waiting = bench.enqueue(3)
    go_on, started = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        if job.id == first:
            started.set()
            await io.wait(go_on)

    with bench.consumer(work, batch_size=20).running() as server:
        assert started.wait(30)
        ask(bench, waiting[1])
        # Under a lease what was not claimed yet is cancelled at once.
        wait_until(lambda: server.context.cancelled or bench.states()["cancelled"])
        go_on.set()
        wait_until(lambda: bench.states() == {"completed": 6, "cancelled": 1})
    assert bench.row(waiting[1]).status == "cancelled"
    bench.assert_tidy()


def test_one_job_of_a_running_batch_is_cancelled(supply: Any, strategy: str) -> None:
    """The other jobs of the batch run again, each by itself."""
    bench = supply.take(strategy, "async")
    keys = bench.enqueue(3)
    started = threading.Event()
    calls: list[list[int]] = []

    async def work(io: Any, jobs: Any) -> None:
        calls.append([job.id for job in jobs])
        for job in jobs:
            await io.execute(bench.effect(job.id))
        if len(jobs) == 3:
            started.set()
            await asyncio.sleep(60)

    with bench.consumer(work, batch=True).running() as server:
        assert started.wait(30)
        ask(bench, keys[1])
        wait_until(lambda: bench.states() == {"completed": 2, "cancelled": 1})
    assert server.told("cancelled") == [keys[1]]
    assert sorted(calls) == sorted([keys, [keys[0]], [keys[2]]])
    assert bench.effects() == {keys[0]: 1, keys[2]: 1}
    bench.assert_tidy()


def test_an_old_request_does_not_end_a_new_run(supply: Any, strategy: str) -> None:
    """The request was not deleted: the run for which it was meant had just ended."""
    bench = supply.take(strategy, "async")
    [key] = bench.enqueue(1)
    bench.execute(
        "INSERT INTO sqlaqueue_control (queue, key, created_at)"
        " VALUES ('job', jsonb_build_array(CAST(:key AS int)), now() - interval '1 hour')",
        key=key,
    )

    async def work(io: Any, job: Any) -> None:
        while bench.execute("SELECT count(*) FROM sqlaqueue_control"):
            await asyncio.sleep(0.02)

    with bench.consumer(work).running():
        wait_until(lambda: bench.states() == {"completed": 1})


def test_an_uncommitted_request_blocks_no_heartbeat(leased: Bench) -> None:
    key = 1  # as the next job will have it
    go_on, started = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(go_on)

    leased.execute(
        "INSERT INTO sqlaqueue_control (queue, key) VALUES ('job', jsonb_build_array(CAST(:key AS int)))", key=key
    )
    with leased.sessions() as session, leased.consumer(work, lease=1).running() as server:
        # Asked once more, as cancel() does for a job that is running.
        session.execute(sa.text("UPDATE sqlaqueue_control SET created_at = now()"))
        leased.enqueue(1)
        assert started.wait(30)
        ends = {leased.row(key).lease_expires_at}

        def lives() -> bool:
            ends.add(leased.row(key).lease_expires_at)
            return len(ends) > 5

        wait_until(lives)
        session.rollback()
        go_on.set()
    assert server.told("lease_lost") == []


# -- the task that runs a Consumer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3])
def test_cancelling_the_consumer_releases_its_jobs(supply: Any, strategy: str, concurrency: int) -> None:
    """It cleans up, and the cancellation is raised again."""
    bench = supply.take(strategy, "async")
    done = bench.enqueue(2, priority=-1, payload="quick")
    keys = bench.enqueue(6)
    started: set[int] = set()

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.payload != "quick":
            started.add(job.id)
            await asyncio.sleep(60)

    def quick_are_done() -> bool:
        """Tell whether nothing is left to do for them but, where a transaction holds the batch, to commit it."""
        return keys[0] in started if bench.held else bench.states()["completed"] == len(done)

    server = bench.consumer(work, concurrency=concurrency, batch_size=4)

    async def cancelled() -> None:
        task = asyncio.create_task(server.consumer.run())
        while not started or not quick_are_done():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, "tasks were left behind"
        await server.engine.dispose()

    asyncio.run(cancelled())
    assert bench.states() == {"completed": 2, "pending": 6}
    assert bench.attempts() == dict.fromkeys(done, 1) | dict.fromkeys(keys, 0)
    assert bench.effects() == dict.fromkeys(done, 1)
    bench.assert_tidy()


def test_cancelling_an_idle_consumer(supply: Any, strategy: str) -> None:
    bench = supply.take(strategy, "async")
    server = bench.consumer(concurrency=2, poll_interval=3600)

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await server.consumer.run()
        await server.engine.dispose()

    asyncio.run(cancelled())
    assert bench.consumer().drain() == 0


def test_the_end_of_the_event_loop_ends_the_consumer(supply: Any, strategy: str) -> None:
    """asyncio.run() cancels every task there is, in no order."""
    bench = supply.take(strategy, "async")
    bench.enqueue(3)
    started = threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if not started.is_set():
            started.set()
            await asyncio.sleep(60)

    server = bench.consumer(work, concurrency=2, batch_size=2, lease=1)

    async def leave() -> None:
        run = asyncio.create_task(server.consumer.run())
        while not started.is_set():
            await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([run])
        await server.engine.dispose()

    asyncio.run(leave())
    with bench.consumer(work).running():
        wait_until(lambda: bench.states() == {"completed": 3})
    assert set(bench.effects().values()) == {1}
    bench.assert_tidy()
