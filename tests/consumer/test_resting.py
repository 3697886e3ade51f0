"""Lanes without work rest: as many are woken as there is something new for, and nobody counts on a lane's own clock."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from sqlaqueue.consumer.claiming.claim_slot import Turn
from sqlaqueue.consumer.core.effects import Watch
from sqlaqueue.consumer.executing import worker
from tests.consumer.bench import Bench, Server, wait_until
from tests.consumer.hearing import LATER, await_hearing

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for rest in ("_REST", "_LONGEST_REST", "_REST_DRAINING"):
        monkeypatch.setattr(worker, rest, LATER)


def resting(server: Server) -> int:
    """Return how many lanes rest; one waits for calls instead."""
    shift = server.consumer._shift
    return 0 if shift is None else resting_in(shift)


def resting_in(shift: Any) -> int:
    return len(shift._resting if hasattr(shift, "_resting") else shift._changed._waiters)


def test_each_job_that_waits_has_a_lane(bench: Bench) -> None:
    """Those that were claimed together begin together, and then those that are claimed next."""
    number, started, all_there = 4, list[int](), threading.Event()

    async def work(hands: Any, job: Any) -> None:
        started.append(job.id)
        if len(started) == number:
            all_there.set()
        await hands.wait(all_there)

    batch_size = 1 if bench.held else 3
    with bench.consumer(work, concurrency=number, batch_size=batch_size, poll_interval=LATER).running() as server:
        await_hearing(server)
        wait_until(lambda: resting(server) == number - 1)
        bench.enqueue(number)
        wait_until(lambda: bench.states() == {"completed": number})
        shift = server.consumer._shift
    assert shift is not None
    assert resting_in(shift) == 0, "stop() has left them to their own clock"


def test_a_stop_is_heard_by_a_lane_that_comes_late(bench: Bench) -> None:
    """Two may watch for calls, and begin to one after the other: what has woken the first is there for the second."""
    with bench.consumer(concurrency=2, poll_interval=LATER).running() as server:
        await_hearing(server)
        shift = server.consumer._shift
    for _ in range(2):
        assert shift._called.is_set()
        watched = shift._pass_time(Watch(LATER))
        if bench.colour == "async":
            asyncio.run(watched)


def test_a_job_does_not_wake_all_lanes(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    number, jobs, turns = 20, 10, list[Turn]()
    begin = Turn.__init__

    def count(self: Turn, crew: Any) -> None:
        turns.append(self)
        begin(self, crew)

    with leased.consumer(concurrency=number, poll_interval=LATER).running() as server:
        await_hearing(server)
        wait_until(lambda: resting(server) == number - 1)
        monkeypatch.setattr(Turn, "__init__", count)
        for done in range(1, jobs + 1):
            leased.enqueue()
            wait_until(lambda done=done: leased.states() == {"completed": done})
    assert len(turns) < jobs * number / 2


def test_a_drain_rests_while_another_lane_is_at_work(bench: Bench) -> None:
    """It does not claim again and again meanwhile, and ends with the other's work."""

    async def work(hands: Any, job: Any) -> None:
        started.set()
        await hands.wait(other_rests)

    started, other_rests = threading.Event(), threading.Event()
    server = bench.consumer(work, concurrency=2)
    bench.enqueue()
    thread = threading.Thread(target=server.drain, daemon=True)
    thread.start()
    # Before that it rests because the first one claims.
    assert started.wait(30)
    wait_until(lambda: resting(server) == 1)
    other_rests.set()
    thread.join(30)
    assert not thread.is_alive()
    assert bench.states() == {"completed": 1}
