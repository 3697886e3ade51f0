"""Claimed jobs that would wait for long behind slow ones are released, and other consumers run them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from sqlaqueue import cancel, consumers
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.executor import Executor
from sqlaqueue.consumer.in_flight import run_of_claimed
from sqlaqueue.consumer.leased import Report, apply
from sqlaqueue.consumer.maintenance.handlers_running import late_groups, release_late
from sqlaqueue.consumer.pace import LATE, LONGEST_IN_BUFFER
from sqlaqueue.mapping.runs import set_run
from sqlaqueue.queue.run import Run
from tests.consumer.bench import Bench
from tests.consumer.models import models
from tests.contexts import make_context
from tests.programs import wait_until

JOB = models("update_status").job
N, HEAD = 60, 10


def test_quick_jobs_do_not_wait_behind_a_slow_one(leased: Bench) -> None:
    """Where another Consumer is idle. A Consumer with several handlers releases jobs when all of them are busy."""
    concurrency = 1 if leased.api == "sync" else 2
    keys = leased.enqueue(HEAD + concurrency + N)
    slow, go_on = set(keys[HEAD : HEAD + concurrency]), threading.Event()
    begun: set[int] = set()

    async def work(io: Any, job: Any) -> None:
        if job.id in slow:
            begun.add(job.id)
            await io.wait(go_on)

    with leased.consumer(work, concurrency=concurrency).running() as busy:
        wait_until(lambda: begun == slow)
        with leased.consumer().running() as idle:
            wait_until(lambda: leased.states() == {"completed": len(keys) - len(slow), "processing": len(slow)})
        go_on.set()
        wait_until(lambda: leased.states() == {"completed": len(keys)})
    assert set(leased.attempts().values()) == {1}
    released = busy.told("released")
    assert released
    assert set(released) <= set(idle.told("completed"))
    assert busy.told()["released"] == len(set(released)), "the same Consumer does not claim a released job again"
    assert not busy.told("lease_lost")


def test_a_request_to_cancel_is_not_lost_with_a_released_job(leased: Bench) -> None:
    """It was meant for this run of the job."""
    keys = leased.enqueue(HEAD + 3)
    slow, requested, last = keys[HEAD:]
    go_on, begun = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        if job.id == slow:
            with leased.sessions() as session:
                session.execute(cancel(session.get_one(leased.Job, requested)))
                session.commit()
            begun.set()
            await io.wait(go_on)

    with leased.consumer(work).running():
        assert begun.wait(20)
        wait_until(lambda: leased.row(requested).status == "cancelled" and leased.row(last).status == "pending")
        go_on.set()
    assert leased.row(slow).status == "completed"


def test_a_held_batch_ends_when_it_takes_longer_than_expected(
    supply: Any, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs that have not begun are free with its commit, and other consumers are notified."""
    monkeypatch.setattr(pace, "LATE", 0.2)
    bench = supply.take("delete_returning" if api == "sync" else "batch_select", api)
    keys = bench.enqueue(HEAD + 1 + N)
    slow, go_on, begun = keys[HEAD], threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == slow:
            begun.set()
            await io.wait(go_on)

    with bench.consumer(work).running() as server:
        assert begun.wait(20)
        held_up = time.monotonic()
        wait_until(lambda: time.monotonic() - held_up > pace.LATE)
        go_on.set()
        wait_until(lambda: bench.states() == {"completed": len(keys)})
    assert server.told("released")
    assert bench.effects() == dict.fromkeys(keys, 1)
    assert set(bench.attempts().values()) == {1}
    bench.assert_tidy()


def test_consumers_report_running_and_waiting_jobs(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "HEARTBEAT", 0.2)
    for name in ("LATE", "LONGEST_IN_BUFFER"):
        monkeypatch.setattr(f"sqlaqueue.consumer.maintenance.handlers_running.{name}", 60.0)
    keys = leased.enqueue(HEAD + 3)
    slow, go_on = keys[HEAD], threading.Event()

    async def work(io: Any, job: Any) -> None:
        if job.id == slow:
            await io.wait(go_on)

    def seen() -> Any:
        with leased.sessions() as session:
            return [(row.running, row.claimed) for row in session.execute(consumers(leased.Job))]

    with leased.consumer(work).running():
        wait_until(lambda: seen() == [([[str(slow)]], 2)])
        go_on.set()
        wait_until(lambda: leased.states() == {"completed": len(keys)})


# -- when jobs are released ----------------------------------------------------------------------------------------


def job(key: int) -> Any:
    claimed = models("update_status").job(id=key)
    set_run(claimed, Run((key,), None, 1, 5))
    return claimed


@pytest.fixture
def calls() -> Iterator[contextlib.ExitStack]:
    """The calls of handlers that last as long as the test."""
    with contextlib.ExitStack() as calls:
        yield calls


def begin_call(calls: contextlib.ExitStack, context: ConsumerContext, *keys: int) -> Executor:
    """Return an executor that has begun the first of these jobs, while the other ones wait."""
    executor = Executor(context, [[job(key)] for key in keys], context.completions.add)
    calls.enter_context(context.in_flight.calling(executor))
    assert executor.begin_call(Session()) is not None
    return executor


@pytest.mark.once
def test_waiting_jobs_are_released_when_all_handlers_are_busy(calls: contextlib.ExitStack) -> None:
    context = make_context(JOB, concurrency=2, duration=0.1)
    busy, now = begin_call(calls, context, 1, 2), time.monotonic()
    context.add_jobs([[job(3)]])
    assert not late_groups(context, now + LONGEST_IN_BUFFER), "the other handler takes it"
    begin_call(calls, context, 4)
    assert not late_groups(context, now), "they may end in a moment"
    assert [one.id for [one] in late_groups(context, now + 1.1 * LONGEST_IN_BUFFER)] == [3, 2]
    context.cancelled.add((2,))
    assert release_late(context, now + 1.1 * LONGEST_IN_BUFFER) == 2
    finished = context.completions.take()
    assert {one.run.key: one.outcome.event for one in finished} == {(3,): "released", (2,): "cancelled"}
    assert not context.buffer
    assert busy.is_done
    assert {run.key for run in context.in_flight.running()} == {(1,), (4,)}


@pytest.mark.once
def test_waiting_jobs_are_released_when_they_wait_longer_than_expected() -> None:
    """However quick each handler is; and at once when the Consumer stops."""
    context = make_context(JOB, concurrency=2, duration=0.1)
    context.add_jobs([[job(1)]])
    now = time.monotonic()
    assert not late_groups(context, now + 0.9 * LATE)
    assert late_groups(context, now + 1.1 * LATE)
    assert not late_groups(context, now)
    context.stopping = True
    assert late_groups(context, now)


@pytest.mark.once
def test_the_jobs_of_a_failed_batch_are_not_released(calls: contextlib.ExitStack) -> None:
    """They would be claimed as a batch again, and fail as a batch, before they are tried one by one."""
    context, failed = make_context(JOB, concurrency=1, duration=0.1), job(1)
    run_of_claimed(failed).handler_started_at = time.monotonic()
    apply(context, Report(retry_alone=[failed]))
    begin_call(calls, context, 2)
    assert not late_groups(context, time.monotonic() + 10 * LATE)
    assert context.buffer
