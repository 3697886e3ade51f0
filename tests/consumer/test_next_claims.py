"""When workers claim again and settle: before the buffered jobs run out, and in one session for several claims."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import Retry
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.claim import Claimer
from sqlaqueue.consumer.leased import WorkerTurn
from sqlaqueue.consumer.outcomes import COMPLETED, FinishedRun
from sqlaqueue.consumer.pace import FLUSH_AFTER, BatchSizer
from sqlaqueue.postgresql.claim_scan import FEW
from sqlaqueue.queue.run import Run
from tests.consumer.bench import Bench
from tests.consumer.models import models
from tests.contexts import make_context
from tests.programs import wait_until

JOB = models("update_status").job

WORKERS, BATCH = 2, 4
N = WORKERS + 7 * BATCH
"""The first claim is one job for each worker; all others are full, and shared."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all handlers count as slow, so that workers share each claim."""
    monkeypatch.setattr(pace, "_IN_ROW_ALONE", 0.0)
    monkeypatch.setattr(pace, "_IN_ROW_AMONG_OTHERS", 0.0)


@pytest.mark.usefixtures("slow")
def test_each_worker_has_one_session(leased: Bench) -> None:
    leased.enqueue(N)
    seen: list[Any] = []

    async def work(io: Any, job: Any) -> None:
        assert [*io.session] == [job]
        seen.append(io.session)

    assert leased.consumer(work, concurrency=WORKERS, batch_size=BATCH).drain() == N
    assert len(seen) == N
    assert len(set(map(id, seen))) <= WORKERS
    assert leased.states() == {"completed": N}


@pytest.mark.usefixtures("slow")
def test_a_session_that_was_used_is_not_used_again(leased: Bench) -> None:
    keys = leased.enqueue(N)
    writers, failing = set(keys[::3]), set(keys[1::3])
    seen: list[tuple[Any, int]] = []

    async def work(io: Any, job: Any) -> None:
        seen.append((io.session, job.id))
        if job.id in writers:
            await io.execute(leased.effect(job.id))
        elif job.id in failing:
            await io.execute(sa.select(leased.Effect))
            raise ValueError

    assert leased.consumer(work, concurrency=WORKERS, batch_size=BATCH, retry=lambda attempt, error: None).drain() == N
    jobs: dict[int, list[int]] = {}
    for session, key in seen:
        jobs.setdefault(id(session), []).append(key)
    assert all((writers | failing).isdisjoint(run[:-1]) for run in jobs.values())
    assert leased.effects() == dict.fromkeys(writers, 1)
    assert leased.states() == Counter(completed=N - len(failing), failed=len(failing))


@pytest.mark.usefixtures("slow")
def test_a_retried_job_may_run_in_the_same_session(leased: Bench) -> None:
    leased.enqueue(N, payload="as it was")
    seen: list[tuple[int, int]] = []

    async def work(io: Any, job: Any) -> None:
        assert job.payload == "as it was"
        seen.append((job.id, job.attempts))
        if job.attempts == 1:
            raise Retry(0)

    server = leased.consumer(work, concurrency=WORKERS, batch_size=BATCH)
    assert server.drain() == 2 * N
    assert len(set(seen)) == len(seen) == 2 * N
    assert server.told() == Counter(claimed=2 * N, retried=N, completed=N)


@pytest.mark.usefixtures("slow")
def test_the_next_claim_begins_before_the_buffer_is_empty(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two jobs done of twelve, a third claim of four is made, though three of the second one still wait."""
    monkeypatch.setattr(BatchSizer, "jobs_during_claim", lambda self: 3 if len(started) > workers else 0)
    workers, started = 4, list[int]()
    gates = {key: threading.Event() for key in leased.enqueue(3 * workers)}

    async def work(io: Any, job: Any) -> None:
        started.append(job.id)
        await io.wait(gates[job.id])

    with leased.consumer(work, concurrency=workers, batch_size=workers).running() as server:
        for done, claimed in ((0, 4), (1, 8), (2, 12)):
            wait_until(lambda claimed=claimed: server.told()["claimed"] == claimed)
            wait_until(lambda done=done: len(started) >= workers + done)
            gates[started[done]].set()
        for gate in gates.values():
            gate.set()
        wait_until(lambda: leased.states() == {"completed": 3 * workers})


@pytest.mark.usefixtures("slow")
def test_one_turn_runs_several_jobs(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has run a job takes the next one in the same session and task."""
    monkeypatch.setattr(BatchSizer, "jobs_during_claim", lambda self: 0)
    turns, take_jobs = list[WorkerTurn](), WorkerTurn.take_jobs

    def count(turn: WorkerTurn) -> Any:
        executor = take_jobs(turn)
        turns.extend([turn] if executor else [])
        return executor

    monkeypatch.setattr(WorkerTurn, "take_jobs", count)
    leased.enqueue(N)
    assert leased.consumer(concurrency=WORKERS, batch_size=BATCH).drain() == N
    assert len(turns) < N * 0.75


def test_no_job_follows_a_quarantined_one() -> None:
    context = make_context(JOB, concurrency=10, duration=0.1)
    context.add_jobs([[object()], [object()]])
    assert context.next_group()
    context.quarantine.begin([(1,)])
    assert not context.next_group()


# -- when finished runs are settled --------------------------------------------------------------------------------


def finished_run(key: int) -> FinishedRun:
    return FinishedRun(Run((key,), None, 1, 5), COMPLETED)


def test_a_finished_run_waits_for_runs_that_end_soon() -> None:
    context, now = make_context(JOB, concurrency=10, duration=0.1), time.monotonic()
    completions = context.completions
    assert not context.wants_settling(now)
    completions.add([finished_run(1)])
    assert context.wants_settling(now), "no other run will end, and no claim settles it"
    context.plenty = True
    assert not context.wants_settling(now), "the next claim settles it"
    assert context.wants_settling(now + 2 * FLUSH_AFTER), "there is no next claim"
    context.plenty = False
    completions.take()
    completions.add([finished_run(2)])
    assert not context.wants_settling(now), "the first is being settled; runs that end meanwhile are settled together"
    assert context.wants_settling(now + 2 * FLUSH_AFTER), "that takes too long"


def test_a_finished_run_does_not_wait_for_slow_handlers() -> None:
    context = make_context(JOB, concurrency=2, duration=10 * FLUSH_AFTER)
    context.plenty = True
    context.completions.add([finished_run(1)])
    assert context.wants_settling(time.monotonic())


# -- how many workers claim at once, and how many jobs -------------------------------------------------------------


@pytest.mark.parametrize(("others", "at_once"), [(0, 2), (1, 2), (2, 1), (7, 1)])
def test_with_many_peers_one_worker_claims_at_a_time(others: int, at_once: int) -> None:
    """Several consumers keep the server busy, and each claim passes over the rows that the others have locked."""
    context = make_context(JOB, concurrency=10, duration=0.0)
    context.plenty = True
    context.polls.heartbeat_sent([f"other {number}" for number in range(others)], 0.0)
    assert [WorkerTurn(context).may_claim() for _ in range(3)].count(True) == at_once


def record_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record from now on how many jobs each claim may take."""
    claim, sizes = Claimer.claim, list[int]()

    def record(self: Claimer, session: Any, limit: int, *arguments: Any) -> Any:
        sizes.append(limit)
        return claim(self, session, limit, *arguments)

    monkeypatch.setattr(Claimer, "claim", record)
    return sizes


def test_the_batch_sizer_decides_how_many_jobs_are_claimed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And how many consumers poll for an announcement; it is told how long claims take."""
    monkeypatch.setattr(BatchSizer, "claim_size", lambda self, **_: 3)
    sizes = record_sizes(monkeypatch)
    bench.enqueue(9)
    with bench.consumer().running() as server:
        wait_until(lambda: bench.states() == {"completed": 9})
        assert server.context.polls._announcements._share() == 3
    assert set(sizes) == {3}
    assert bench.held or server.consumer._parts.sizer._claim_took > 0


def test_many_jobs_are_claimed_after_a_full_claim_of_a_few(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps its plan for a few jobs, which was made for an empty table and is bad for many."""
    sizes = record_sizes(monkeypatch)
    bench.enqueue(1)
    with bench.consumer().running():
        wait_until(lambda: bench.states() == {"completed": 1} and FEW in sizes)
        bench.enqueue(2 * FEW)
        wait_until(lambda: bench.states() == {"completed": 2 * FEW + 1})
    assert max(sizes[sizes.index(FEW) :]) > FEW
