"""Runs that are ended: by cancel(), with the task that runs their Consumer, and by a timeout."""

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import cancel
from sqlaqueue.consumer import leased as leased_routines
from sqlaqueue.consumer import tasks
from sqlaqueue.exc import JobTimeout
from tests.consumer.bench import Bench, Gate, for_some
from tests.programs import wait_until


def ask(bench: Bench, *keys: int) -> None:
    """Cancel some jobs, whatever they are doing."""
    with bench.sessions() as session:
        session.execute(cancel(sa.select(bench.Job).where(bench.Job.id.in_(keys))))
        session.commit()


@pytest.mark.usefixtures("frequent_rescues")
def test_a_running_task_is_cancelled(async_bench: Bench) -> None:
    good, bad = async_bench.enqueue(2)
    gate = Gate()
    with async_bench.consumer(async_bench.doing({bad: gate})).running() as server:
        gate.await_call()
        ask(async_bench, bad)
        wait_until(lambda: async_bench.states() == {"completed": 1, "cancelled": 1})
    assert server.told("cancelled") == [bad]
    assert async_bench.row(bad).last_error == "cancelled on request"
    assert async_bench.row(bad).attempts == 1
    async_bench.expect(effects={good: 1})


@pytest.mark.usefixtures("frequent_rescues")
def test_a_running_thread_is_marked(sync_bench: Bench) -> None:
    """It cannot be stopped: a success counts, and a failed run is cancelled and not retried."""
    succeeds, fails = sync_bench.enqueue(2)
    gate = Gate()
    work = for_some({fails: ValueError()}, first=gate)
    with sync_bench.consumer(work, concurrency=2, batch_size=1).running() as server:
        gate.await_call(2)
        ask(sync_bench, succeeds, fails)
        wait_until(lambda: all(one.cancelled for one in server.context.in_flight.busy()))
        gate.open()
        wait_until(lambda: sync_bench.states() == {"completed": 1, "cancelled": 1})
    assert server.told("cancelled") == [fails]
    sync_bench.expect(attempts={succeeds: 1, fails: 1})


@pytest.mark.usefixtures("frequent_rescues")
@pytest.mark.parametrize("succeeds", [False, True])
def test_a_job_is_cancelled_while_its_worker_shuts_down(bench: Bench, *, succeeds: bool) -> None:
    """Its handler has the grace period, and must not use it up: a task is cancelled, a thread is marked."""
    [key] = bench.enqueue(1)
    gate = Gate(*([] if succeeds else [ValueError()]), first=bench.work)
    with bench.consumer(gate).running() as server:
        gate.await_call()
        context = server.context
        server.stop()
        ask(bench, key)
        if bench.api == "sync":
            wait_until(lambda: any(one.cancelled for one in context.in_flight.busy()))
            gate.open()
        assert server.finished.wait(30)
    # A thread that succeeds has done its work.
    completed = succeeds and bench.api == "sync"
    bench.expect({"completed" if completed else "cancelled": 1}, effects=({key: 1} if completed else {}))
    assert server.told("completed" if completed else "cancelled") == [key]
    assert bench.row(key).attempts == 1
    assert bench.execute("SELECT count(*) FROM sqlaqueue_control") == 0
    bench.assert_tidy()


@pytest.mark.usefixtures("frequent_rescues")
def test_a_claimed_job_that_has_not_begun_is_cancelled(bench: Bench) -> None:
    """It waits behind others in the executor of its worker."""
    bench.enqueue(3, payload="quick", priority=-1)
    [first] = bench.enqueue(1)
    waiting = bench.enqueue(3)
    gate = Gate()
    with bench.consumer(for_some({first: gate}), batch_size=20).running() as server:
        gate.await_call()
        ask(bench, waiting[1])
        # Under a lease what was not claimed yet is cancelled at once.
        wait_until(lambda: server.context.cancelled or bench.states()["cancelled"])
        gate.open()
        wait_until(lambda: bench.states() == {"completed": 6, "cancelled": 1})
    assert bench.row(waiting[1]).status == "cancelled"
    bench.assert_tidy()


@pytest.mark.usefixtures("frequent_rescues")
def test_one_job_of_a_running_batch_is_cancelled(async_bench: Bench) -> None:
    """The other jobs of the batch run again, each by itself."""
    keys = async_bench.enqueue(3)
    started = threading.Event()
    calls: list[list[int]] = []

    async def work(io: Any, jobs: Any) -> None:
        calls.append([job.id for job in jobs])
        for job in jobs:
            await io.execute(async_bench.effect(job.id))
        if len(jobs) == 3:
            started.set()
            await asyncio.sleep(60)

    with async_bench.consumer(work, batch=True).running() as server:
        assert started.wait(30)
        ask(async_bench, keys[1])
        wait_until(lambda: async_bench.states() == {"completed": 2, "cancelled": 1})
    assert server.told("cancelled") == [keys[1]]
    assert sorted(calls) == sorted([keys, [keys[0]], [keys[2]]])
    async_bench.expect(effects={keys[0]: 1, keys[2]: 1})


@pytest.mark.usefixtures("frequent_rescues")
def test_an_old_request_does_not_end_a_new_run(async_bench: Bench) -> None:
    """The request was not deleted: the run for which it was meant had just ended."""
    [key] = async_bench.enqueue(1)
    async_bench.execute(
        "INSERT INTO sqlaqueue_control (queue, key, created_at)"
        " VALUES ('job', jsonb_build_array(CAST(:key AS int)), now() - interval '1 hour')",
        key=key,
    )

    async def work(io: Any, job: Any) -> None:
        while async_bench.execute("SELECT count(*) FROM sqlaqueue_control"):
            await asyncio.sleep(0.02)

    with async_bench.consumer(work).running():
        wait_until(lambda: async_bench.states() == {"completed": 1})


@pytest.mark.usefixtures("frequent_rescues")
def test_an_uncommitted_request_blocks_no_heartbeat(leased: Bench) -> None:
    key = 1  # as the next job will have it
    gate = Gate()
    leased.execute(
        "INSERT INTO sqlaqueue_control (queue, key) VALUES ('job', jsonb_build_array(CAST(:key AS int)))", key=key
    )
    with leased.sessions() as session, leased.consumer(gate, lease=1).running() as server:
        # Asked once more, as cancel() does for a job that is running.
        session.execute(sa.text("UPDATE sqlaqueue_control SET created_at = now()"))
        leased.enqueue(1)
        gate.await_call()
        ends = {leased.row(key).lease_expires_at}

        def lives() -> bool:
            ends.add(leased.row(key).lease_expires_at)
            return len(ends) > 5

        wait_until(lives)
        session.rollback()
        gate.open()
    assert server.told("lease_lost") == []


@pytest.mark.usefixtures("frequent_rescues")
@pytest.mark.parametrize("concurrency", [1, 3])
def test_cancelling_the_consumer_releases_its_jobs(async_bench: Bench, concurrency: int) -> None:
    """It cleans up, and the cancellation is raised again."""
    done = async_bench.enqueue(2, priority=-1, payload="quick")
    keys = async_bench.enqueue(6)
    started: set[int] = set()

    async def work(io: Any, job: Any) -> None:
        await io.execute(async_bench.effect(job.id))
        if job.payload != "quick":
            started.add(job.id)
            await asyncio.sleep(60)

    def quick_are_done() -> bool:
        """Tell whether nothing is left to do for them but, where a transaction holds the batch, to commit it."""
        return keys[0] in started if async_bench.held else async_bench.states()["completed"] == len(done)

    server = async_bench.consumer(work, concurrency=concurrency, batch_size=4)

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
    async_bench.expect(
        {"completed": 2, "pending": 6}, attempts=dict.fromkeys(done, 1) | dict.fromkeys(keys, 0), effects=done
    )


@pytest.mark.usefixtures("frequent_rescues")
def test_cancelling_an_idle_consumer(async_bench: Bench) -> None:
    server = async_bench.consumer(concurrency=2, poll_interval=3600)

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await server.consumer.run()
        await server.engine.dispose()

    asyncio.run(cancelled())
    assert async_bench.consumer().drain() == 0


@pytest.mark.usefixtures("frequent_rescues")
def test_the_end_of_the_event_loop_ends_the_consumer(async_bench: Bench) -> None:
    """asyncio.run() cancels every task there is, in no order."""
    async_bench.enqueue(3)
    started = threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.execute(async_bench.effect(job.id))
        if not started.is_set():
            started.set()
            await asyncio.sleep(60)

    server = async_bench.consumer(work, concurrency=2, batch_size=2, lease=1)

    async def leave() -> None:
        run = asyncio.create_task(server.consumer.run())
        while not started.is_set():
            await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([run])
        await server.engine.dispose()

    asyncio.run(leave())
    with async_bench.consumer(work).running():
        wait_until(lambda: async_bench.states() == {"completed": 3})
    async_bench.expect(effects=1)


# -- timeouts: a task is cancelled; a thread cannot be, so its result is refused -----------------------------------


def test_a_handler_that_is_too_slow_has_failed(bench: Bench, log: Any) -> None:
    """Under every strategy: its writes are undone, the attempt counts, and other jobs complete."""
    [slow] = bench.enqueue(1, payload="slow", priority=1)
    good = bench.enqueue(3)
    gate = Gate()
    work = bench.doing({"slow": gate})
    with bench.consumer(work, timeout=0.3, concurrency=2, retry=lambda *_: 3600).running() as server:
        wait_until(lambda: "exceeded its timeout" in log.text)
        gate.open()
        wait_until(lambda: server.told("retried") == [slow])
        wait_until(lambda: bench.states() == {"completed": 3, "pending": 1})
    row = bench.row(slow)
    assert row.attempts == 1
    assert row.last_error.startswith("JobTimeout")
    assert bench.effects() == dict.fromkeys(good, 1)
    assert f"queue job: job {slow} exceeded its timeout" in log.text
    assert isinstance(server.errors("retried")[0], JobTimeout)
    bench.assert_tidy()


def test_a_handler_that_returns_just_after_its_timeout_has_failed(bench: Bench) -> None:
    """Though it returned before the timeout was noticed."""
    bench.enqueue(1, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        # A blocking call: maintenance runs four times per timeout, and an event loop not at all.
        for _ in range(200_000):
            pass

    bench.consumer(work, timeout=1e-6).drain()
    assert bench.states() == {"failed": 1}


def test_a_cancelled_handler_sees_it(async_bench: Bench) -> None:
    """A task may clean up at its timeout."""
    async_bench.enqueue(1, max_attempts=1)
    seen: list[str] = []

    async def work(io: Any, job: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async_bench.consumer(work, timeout=0.05).drain()
    assert seen == ["cancelled"]
    async_bench.expect({"failed": 1})


def test_a_task_cancelled_while_the_database_works_for_it(async_bench: Bench) -> None:
    """Its connection is closed, and with it the transaction of its batch; the other jobs run again."""
    good = async_bench.enqueue(2)
    bad = async_bench.enqueue(1)
    good += async_bench.enqueue(2)
    work = async_bench.doing({bad[0]: lambda io, job: io.execute(sa.text("SELECT pg_sleep(60)"))})
    async_bench.consumer(work, timeout=1).drain()
    async_bench.expect({"completed": 4, "failed": 1}, attempts=dict.fromkeys(good, 1) | {bad[0]: 3}, effects=good)


def test_the_result_of_a_task_that_ignores_its_cancellation_is_refused(async_bench: Bench) -> None:
    async_bench.enqueue(1, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(async_bench.effect(job.id))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    async_bench.consumer(work, timeout=0.05).drain()
    async_bench.expect({"failed": 1}, effects={})


def test_a_task_that_swallows_its_cancellation_keeps_its_job_until_it_ends(
    async_leased: Bench, frequent_rescues: None, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    """Else its lease would expire, and the job run beside it in the same process."""
    monkeypatch.setattr(tasks, "_CANCELLATION", 0.1)
    [key] = async_leased.enqueue(1)
    calls, swallowed, go_on = [], threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        calls.append(job.id)
        while len(calls) == 1 and not go_on.is_set():
            try:
                await io.wait(go_on)
            except asyncio.CancelledError:
                swallowed.set()

    with async_leased.consumer(work, timeout=0.2, lease=1, concurrency=2).running() as server:
        assert swallowed.wait(30)
        first = async_leased.row(key).lease_expires_at
        wait_until(lambda: async_leased.row(key).lease_expires_at > first + timedelta(seconds=3))
        wait_until(lambda: "its handler still runs" in log.text)
        assert calls == [key]
        assert server.told() == {"claimed": 1}
        go_on.set()
        wait_until(lambda: async_leased.states() == {"completed": 1})
    assert server.told("retried") == [key]
    assert isinstance(server.errors("retried")[0], JobTimeout)
    assert async_leased.row(key).attempts == 2


def test_a_job_does_not_run_beside_its_own_thread_that_hangs(
    sync_leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run has ended at its timeout, and another process may run the job."""
    monkeypatch.setattr(leased_routines, "_LATE_AGAIN", 0.2)
    [key] = sync_leased.enqueue(1)
    gate = Gate()
    with sync_leased.consumer(gate, timeout=0.2, concurrency=3, retry=lambda *_: 0).running() as server:
        wait_until(lambda: server.told("released").count(key) >= 3)
        assert server.told("retried") == [key]
        gate.open()
        wait_until(lambda: sync_leased.states() == {"completed": 1})
    assert gate.most == 1
    assert sync_leased.row(key).attempts == 2


def test_a_thread_that_hangs_loses_its_job_at_its_timeout(sync_leased: Bench) -> None:
    """Another worker runs it, and the result of the thread is refused, with its writes."""
    [key] = sync_leased.enqueue(1, payload="slow")
    gate = Gate()
    work = sync_leased.doing({"slow": gate})
    hanging = sync_leased.consumer(work, timeout=0.2, lease=3600, retry=lambda *_: 0)
    with hanging.running():
        wait_until(lambda: hanging.told("retried") == [key])
        with sync_leased.consumer().running() as other:
            wait_until(lambda: sync_leased.states() == {"completed": 1})
            # The event follows the commit.
            wait_until(lambda: other.told("completed") == [key])
        gate.open()
        wait_until(lambda: hanging.told("lease_lost") == [key])
    assert sync_leased.row(key).attempts == 2
    assert not sync_leased.effects()


def test_jobs_behind_threads_that_hang_are_released(sync_leased: Bench) -> None:
    """No worker is left to run them, and their leases would be extended for ever."""
    gate = Gate()
    work = sync_leased.doing({"slow": gate})
    good = sync_leased.enqueue(2, priority=-1)
    sync_leased.enqueue(1, payload="slow")
    good += sync_leased.enqueue(5, priority=1)
    # What took no time promises that more can be done: the claim after it is a large one.
    with sync_leased.consumer(work, timeout=0.5, lease=3600).running():
        gate.await_call()
        with sync_leased.consumer().running():
            wait_until(lambda: sync_leased.states()["completed"] >= 7)
        gate.open()
        wait_until(lambda: sync_leased.states() == {"completed": 8})
    assert {sync_leased.row(key).attempts for key in good} == {1}


@pytest.mark.parametrize("strategy", ["batch_select", "own_message"])
def test_jobs_behind_a_thread_that_hangs_stay_in_the_transaction_that_holds_them(sync_bench: Bench, log: Any) -> None:
    """If the Consumer forgot them, its commit would leave them deleted, or locked until another claim."""
    slow = sync_bench.enqueue(1, payload="slow")
    good = sync_bench.enqueue(4)
    gate = Gate()
    work = sync_bench.doing({"slow": gate})
    with sync_bench.consumer(work, timeout=0.2, batch_size=5, retry=lambda *_: 3600).running() as server:
        wait_until(lambda: "exceeded its timeout" in log.text)
        gate.open()
        wait_until(lambda: len(server.told("completed")) == 4)
    assert server.told("claimed") == [*slow, *good]
    assert server.told("lease_lost") == []
    assert sync_bench.effects() == dict.fromkeys(good, 1)


def test_a_thread_that_hangs_with_its_row_locked_blocks_no_other_job(sync_leased: Bench, log: Any) -> None:
    """Its run cannot be settled before it returns."""
    [slow] = sync_leased.enqueue(1, payload="slow", priority=-1)
    sync_leased.enqueue(6)
    waits = threading.Event()

    async def work(io: Any, job: Any) -> None:
        if job.payload == "slow" and not waits.is_set():
            job.payload = "slow and written"
            await io.flush()
            await io.wait(waits)

    with sync_leased.consumer(work, timeout=0.2, concurrency=2, lease=1, retry=lambda *_: 3600).running() as server:
        wait_until(lambda: sync_leased.states()["completed"] == 6)
        wait_until(lambda: "cannot end before its handler" in log.text)
        assert sync_leased.row(slow).status == "processing"
        waits.set()
        wait_until(lambda: server.told("retried") == [slow])
    assert sync_leased.row(slow).payload == "slow"
    assert sync_leased.row(slow).attempts == 1
