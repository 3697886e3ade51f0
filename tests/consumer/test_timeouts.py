"""Timeouts: a task is cancelled; a thread cannot be, so its result is refused."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.consumer import leased as leased_routines
from sqlaqueue.consumer import tasks
from sqlaqueue.exc import JobTimeout
from tests.consumer.bench import Bench
from tests.programs import wait_until


class Slow:
    """A handler that waits for the test when its job says so, after an effect."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.started, self.go_on = threading.Event(), threading.Event()

    async def __call__(self, io: Any, job: Any) -> None:
        await io.execute(self._bench.effect(job.id))
        if job.payload == "slow" and not self.go_on.is_set():
            self.started.set()
            await io.wait(self.go_on)


def test_a_handler_that_is_too_slow_has_failed(bench: Bench, log: Any) -> None:
    """Under every strategy: its writes are undone, the attempt counts, and other jobs complete."""
    [slow] = bench.enqueue(1, payload="slow", priority=1)
    good = bench.enqueue(3)
    handler = Slow(bench)
    with bench.consumer(handler, timeout=0.3, concurrency=2, retry=lambda *_: 3600).running() as server:
        wait_until(lambda: "exceeded its timeout" in log.text)
        handler.go_on.set()
        wait_until(lambda: server.told("retried") == [slow])
        wait_until(lambda: bench.states() == {"completed": 3, "pending": 1})
    row = bench.row(slow)
    assert row.attempts == 1
    assert row.last_error.startswith("JobTimeout")
    assert bench.effects() == dict.fromkeys(good, 1)
    assert f"job {slow} of queue job exceeded its timeout" in log.text
    [told] = [event for event in server.events if event.name == "retried"]
    assert isinstance(told.error, JobTimeout)
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


def test_a_cancelled_handler_sees_it(supply: Any, strategy: str) -> None:
    """A task may clean up at its timeout."""
    bench = supply.take(strategy, "async")
    bench.enqueue(1, max_attempts=1)
    seen: list[str] = []

    async def work(io: Any, job: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    bench.consumer(work, timeout=0.05).drain()
    assert seen == ["cancelled"]
    assert bench.states() == {"failed": 1}
    bench.assert_tidy()


def test_a_task_cancelled_while_the_database_works_for_it(supply: Any, strategy: str) -> None:
    """Its connection is closed, and with it the transaction of its batch; the other jobs run again."""
    bench = supply.take(strategy, "async")
    good = bench.enqueue(2)
    bad = bench.enqueue(1)
    good += bench.enqueue(2)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == bad[0]:
            await io.execute(sa.text("SELECT pg_sleep(60)"))

    bench.consumer(work, timeout=1).drain()
    assert bench.states() == {"completed": 4, "failed": 1}
    assert bench.attempts() == dict.fromkeys(good, 1) | {bad[0]: 3}
    assert bench.effects() == dict.fromkeys(good, 1)
    bench.assert_tidy()


def test_the_result_of_a_task_that_ignores_its_cancellation_is_refused(supply: Any, strategy: str) -> None:
    bench = supply.take(strategy, "async")
    bench.enqueue(1, max_attempts=1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    bench.consumer(work, timeout=0.05).drain()
    assert bench.states() == {"failed": 1}
    assert not bench.effects()


def test_a_task_that_swallows_its_cancellation_keeps_its_job_until_it_ends(
    supply: Any, frequent_rescues: None, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    """Else its lease would expire, and the job run beside it in the same process."""
    monkeypatch.setattr(tasks, "_CANCELLATION", 0.1)
    leased = supply.take("update_status", "async")
    [key] = leased.enqueue(1)
    calls, swallowed, go_on = [], threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        calls.append(job.id)
        while len(calls) == 1 and not go_on.is_set():
            try:
                await io.wait(go_on)
            except asyncio.CancelledError:
                swallowed.set()

    with leased.consumer(work, timeout=0.2, lease=1, concurrency=2).running() as server:
        assert swallowed.wait(30)
        first = leased.row(key).lease_expires_at
        wait_until(lambda: leased.row(key).lease_expires_at > first + timedelta(seconds=3))
        wait_until(lambda: "its handler goes on" in log.text)
        assert calls == [key]
        assert server.told() == {"claimed": 1}
        go_on.set()
        wait_until(lambda: leased.states() == {"completed": 1})
    assert server.told("retried") == [key]
    assert isinstance(next(event.error for event in server.events if event.name == "retried"), JobTimeout)
    assert leased.row(key).attempts == 2


def test_a_job_does_not_run_beside_its_own_thread_that_hangs(supply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run has ended at its timeout, and another process may run the job."""
    monkeypatch.setattr(leased_routines, "_LATE_AGAIN", 0.2)
    leased = supply.take("update_status", "sync")
    [key] = leased.enqueue(1)
    running, most, go_on = [0], [0], threading.Event()

    async def work(io: Any, job: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        if not go_on.is_set():
            await io.wait(go_on)
        running[0] -= 1

    with leased.consumer(work, timeout=0.2, concurrency=3, retry=lambda *_: 0).running() as server:
        wait_until(lambda: server.told("released").count(key) >= 3)
        assert server.told("retried") == [key]
        go_on.set()
        wait_until(lambda: leased.states() == {"completed": 1})
    assert most == [1]
    assert leased.row(key).attempts == 2


@pytest.fixture
def threads(supply: Any) -> Bench:
    return supply.take("update_status", "sync")


def test_a_thread_that_hangs_loses_its_job_at_its_timeout(threads: Bench) -> None:
    """Another worker runs it, and the result of the thread is refused, with its writes."""
    [key] = threads.enqueue(1, payload="slow")
    handler = Slow(threads)
    hanging = threads.consumer(handler, timeout=0.2, lease=3600, retry=lambda *_: 0)
    with hanging.running():
        wait_until(lambda: hanging.told("retried") == [key])
        with threads.consumer().running() as other:
            wait_until(lambda: threads.states() == {"completed": 1})
            # The event follows the commit.
            wait_until(lambda: other.told("completed") == [key])
        handler.go_on.set()
        wait_until(lambda: hanging.told("lease_lost") == [key])
    assert threads.row(key).attempts == 2
    assert not threads.effects()


def test_jobs_behind_threads_that_hang_are_released(threads: Bench) -> None:
    """No worker is left to run them, and their leases would be extended for ever."""
    handler = Slow(threads)
    good = threads.enqueue(2, priority=-1)
    threads.enqueue(1, payload="slow")
    good += threads.enqueue(5, priority=1)
    # What took no time promises that more can be done: the claim after it is a large one.
    with threads.consumer(handler, timeout=0.5, lease=3600).running():
        handler.started.wait(30)
        with threads.consumer().running():
            wait_until(lambda: threads.states()["completed"] >= 7)
        handler.go_on.set()
        wait_until(lambda: threads.states() == {"completed": 8})
    assert {threads.row(key).attempts for key in good} == {1}


@pytest.mark.parametrize("strategy", ["batch_select", "own_message"])
def test_jobs_behind_a_thread_that_hangs_stay_in_the_transaction_that_holds_them(
    supply: Any, strategy: str, log: Any
) -> None:
    """If the Consumer forgot them, its commit would leave them deleted, or locked until another claim."""
    held = supply.take(strategy, "sync")
    slow = held.enqueue(1, payload="slow")
    good = held.enqueue(4)
    handler = Slow(held)
    with held.consumer(handler, timeout=0.2, batch_size=5, retry=lambda *_: 3600).running() as server:
        wait_until(lambda: "exceeded its timeout" in log.text)
        handler.go_on.set()
        wait_until(lambda: len(server.told("completed")) == 4)
    assert server.told("claimed") == [*slow, *good]
    assert server.told("lease_lost") == []
    assert held.effects() == dict.fromkeys(good, 1)


def test_a_thread_that_hangs_with_its_row_locked_blocks_no_other_job(threads: Bench, log: Any) -> None:
    """Its run cannot be settled before it returns."""
    [slow] = threads.enqueue(1, payload="slow", priority=-1)
    threads.enqueue(6)
    waits = threading.Event()

    async def work(io: Any, job: Any) -> None:
        if job.payload == "slow" and not waits.is_set():
            job.payload = "slow and written"
            await io.flush()
            await io.wait(waits)

    with threads.consumer(work, timeout=0.2, concurrency=2, lease=1, retry=lambda *_: 3600).running() as server:
        wait_until(lambda: threads.states()["completed"] == 6)
        wait_until(lambda: "cannot be settled" in log.text)
        assert threads.row(slow).status == "processing"
        waits.set()
        wait_until(lambda: server.told("retried") == [slow])
    assert threads.row(slow).payload == "slow"
    assert threads.row(slow).attempts == 1
