"""Workers without work wait: as many are woken as there is work for, and none has to wait for its timeout."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from sqlaqueue.consumer import worker
from sqlaqueue.consumer.core.effects import Wait
from sqlaqueue.consumer.leased import WorkerTurn
from tests.consumer.bench import LATER, Bench, Server, await_listening
from tests.programs import wait_until

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def no_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers wait until they are woken."""
    for pause in ("_PAUSE", "_LONGEST_PAUSE", "_PAUSE_DRAINING"):
        monkeypatch.setattr(worker, pause, LATER)


def waiting(server: Server) -> int:
    """Return how many workers wait for a change; one waits for the next poll instead."""
    context = server.context
    return 0 if context is None else waiting_in(context.runner)


def waiting_in(runner: Any) -> int:
    return len(runner._waiting if runner.can_interrupt else runner._changed._waiters)


def test_each_claimed_job_has_a_worker(bench: Bench) -> None:
    """Jobs of one claim begin together, and then those of the next claim."""
    number, started, all_there = 4, list[int](), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.append(job.id)
        if len(started) == number:
            all_there.set()
        await io.wait(all_there)

    batch_size = 1 if bench.held else 3
    with bench.consumer(work, concurrency=number, batch_size=batch_size, poll_interval=LATER).running() as server:
        await_listening(server)
        wait_until(lambda: waiting(server) == number - 1)
        bench.enqueue(number)
        wait_until(lambda: bench.states() == {"completed": number})
        context = server.context
    assert context is not None
    assert waiting_in(context.runner) == 0, "stop() has not woken them"


def test_a_stop_wakes_a_worker_that_begins_to_wait_later(bench: Bench) -> None:
    """Two workers may wait for the next poll, one after the other: the second one finds that the first was woken."""
    with bench.consumer(concurrency=2, poll_interval=LATER).running() as server:
        await_listening(server)
        context = server.context
    assert context is not None
    for _ in range(2):
        assert context.runner._poll.is_set()
        waited = context.runner._wait(Wait("poll", LATER))
        if bench.api == "async":
            asyncio.run(waited)


def test_a_job_does_not_wake_all_workers(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    number, jobs, turns = 20, 10, list[WorkerTurn]()
    begin = WorkerTurn.__init__

    def count(self: WorkerTurn, context: Any) -> None:
        turns.append(self)
        begin(self, context)

    with leased.consumer(concurrency=number, poll_interval=LATER).running() as server:
        await_listening(server)
        wait_until(lambda: waiting(server) == number - 1)
        monkeypatch.setattr(WorkerTurn, "__init__", count)
        for done in range(1, jobs + 1):
            leased.enqueue()
            wait_until(lambda done=done: leased.states() == {"completed": done})
    assert len(turns) < jobs * number / 2


def test_a_drain_waits_while_another_worker_is_busy(bench: Bench) -> None:
    """It does not claim again and again meanwhile, and ends when the other worker has finished its job."""

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(other_waits)

    started, other_waits = threading.Event(), threading.Event()
    server = bench.consumer(work, concurrency=2)
    bench.enqueue()
    thread = threading.Thread(target=server.drain, daemon=True)
    thread.start()
    # Before that it waits because the first worker claims.
    assert started.wait(30)
    wait_until(lambda: waiting(server) == 1)
    other_waits.set()
    thread.join(30)
    assert not thread.is_alive()
    assert bench.states() == {"completed": 1}
