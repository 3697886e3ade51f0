"""When workers claim, settle and wait for work, and how a Consumer serves the values of a column in turn."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, mapped_column, sessionmaker

from sqlaqueue import ConcurrencyLimit, Consumer, FairShare, Retry, Unique, claim
from sqlaqueue.citus import Distribution
from sqlaqueue.consumer import pace, worker
from sqlaqueue.consumer.claim import Claimer
from sqlaqueue.consumer.core.effects import Wait
from sqlaqueue.consumer.leased import WorkerTurn
from sqlaqueue.consumer.outcomes import COMPLETED, FinishedRun
from sqlaqueue.consumer.pace import FLUSH_AFTER, BatchSizer, ShardTurns
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.postgresql.claim_scan import FEW
from sqlaqueue.queue.run import Run
from tests.consumer.bench import LATER, Bench, Gate, Server, await_listening, noting
from tests.consumer.models import models
from tests.contexts import make_context
from tests.models import execute, insert, make_job
from tests.programs import wait_until
from tests.servers import Database

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
    leased.expect(Counter(completed=N - len(failing), failed=len(failing)), effects=writers)


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
    # On a loaded machine each call is slow, and slow calls keep claims small.
    monkeypatch.setattr(pace, "_BUFFERED_WORK", 3600.0)
    monkeypatch.setattr(pace, "LATE", 3600.0)
    sizes = record_sizes(monkeypatch)
    bench.enqueue(1)
    with bench.consumer().running():
        wait_until(lambda: bench.states() == {"completed": 1} and FEW in sizes)
        bench.enqueue(2 * FEW)
        wait_until(lambda: bench.states() == {"completed": 2 * FEW + 1})
    assert max(sizes[sizes.index(FEW) :]) > FEW


def test_jobs_before_the_cursor_are_found(bench: Bench) -> None:
    """A late commit with an older time and a more urgent job, while a backlog is processed."""
    backlog, gate, started = 800, Gate(), list[int]()
    early = datetime.now(UTC) - timedelta(hours=1)
    bench.enqueue(backlog)
    with bench.snapshot() as snapshot, bench.engine.connect() as late:
        # Claimed jobs stay in the index as long as this transaction may see them.
        snapshot.execute(sa.select(bench.Job.id).limit(1))
        jobs = bench.Job.__table__
        (older,) = late.execute(sa.insert(jobs).values(run_at=early).returning(jobs.c.id)).one()

        async def work(io: Any, job: Any) -> None:
            started.append(job.id)
            if len(started) == 200:
                await gate(io, job)

        with bench.consumer(work, batch_size=20).running():
            gate.await_call()
            late.commit()
            (urgent,) = bench.enqueue(1, priority=-5)
            gate.open()
            wait_until(lambda: len(started) >= backlog + 2)
    assert len(started) == len(set(started)) == backlog + 2
    assert {older, urgent} <= set(started)


@pytest.fixture
def trails(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Have claims follow a trail as if each scan from the head were slow; return which of them did."""
    monkeypatch.setattr(pace, "_SLOW_SCAN", -10.0)
    monkeypatch.setattr(pace, "_LAG", 0.0)
    monkeypatch.setattr(pace, "_STEP", 0.0)
    followed, begin, claimed = list[bool](), pace.Trail.begin, pace.Trail.claimed

    def record(self: pace.Trail) -> Any:
        found = begin(self)
        followed.append(found is not None)
        return found

    def only_the_head_is_slow(self: pace.Trail, began_at: Any, found: int, took: float) -> None:
        if began_at is None:
            claimed(self, began_at, found, took)

    monkeypatch.setattr(pace.Trail, "begin", record)
    monkeypatch.setattr(pace.Trail, "claimed", only_the_head_is_slow)
    return followed


def complete_until(bench: Bench, condition: Callable[[], bool]) -> int:
    """Enqueue and complete one job after another until a condition holds; return how many."""
    number = 0
    while number == 0 or not condition():
        number += 1
        assert number < 100
        bench.enqueue(1)
        wait_until(lambda number=number: bench.states() == {"completed": number})
    return number


def test_jobs_before_the_trail_are_found_by_the_next_scan_from_the_head(
    bench: Bench, trails: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No poll finds them: what a claim from the trail may have missed is looked for in time."""
    monkeypatch.setattr(pace, "LONGEST", 2.0)
    monkeypatch.setattr(pace, "RECONCILE", LATER)
    early = datetime.now(UTC) - timedelta(hours=1)
    with bench.consumer(poll_interval=LATER).running():
        for missed in ({"run_at": early}, {"priority": -5}):
            done = complete_until(bench, lambda: trails[-1])
            bench.enqueue(1, **missed)
            wait_until(lambda done=done: bench.states() == {"completed": done + 1})
            bench.execute("DELETE FROM job")


def test_a_drain_finds_jobs_before_its_last_ones(
    bench: Bench, trails: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "LONGEST", LATER)
    early = datetime.now(UTC) - timedelta(hours=1)
    later = [{"run_at": early}, {}, {}]

    async def work(io: Any, job: Any) -> None:
        if later:
            bench.enqueue(1, **later.pop())

    bench.enqueue(1)
    assert bench.consumer(work).drain() == 4
    assert bench.states() == {"completed": 4}


# -- workers without work wait: as many are woken as there is work for, and none has to wait for its timeout -------


@pytest.fixture
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


@pytest.mark.usefixtures("no_timeouts")
@pytest.mark.once
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


@pytest.mark.usefixtures("no_timeouts")
@pytest.mark.once
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


@pytest.mark.usefixtures("no_timeouts")
@pytest.mark.once
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


@pytest.mark.usefixtures("no_timeouts")
@pytest.mark.once
def test_a_drain_waits_while_another_worker_is_busy(bench: Bench) -> None:
    """It does not claim again and again meanwhile, and ends when the other worker has finished its job."""
    gate = Gate()
    server = bench.consumer(gate, concurrency=2)
    bench.enqueue()
    thread = threading.Thread(target=server.drain, daemon=True)
    thread.start()
    # Before that it waits because the first worker claims.
    gate.await_call()
    wait_until(lambda: waiting(server) == 1)
    gate.open()
    thread.join(30)
    assert not thread.is_alive()
    assert bench.states() == {"completed": 1}


# -- a Consumer that serves the values of a column in turn; without Citus, its statements are limited in the same way --
TENANTS = 3
SHARDS = Distribution("tenant", range(TENANTS))


def make_tenants_job(kind: str = "update_status", **config: Any) -> Any:
    tenant = mapped_column(sa.Integer, primary_key=True)
    return make_job(kind, {"tenant": tenant}, **{"notify": False, **config})


Task = make_tenants_job()


@pytest.fixture
def tasks(engine: sa.Engine) -> sa.Engine:
    Task.metadata.create_all(engine)
    return engine


def enqueue(engine: sa.Engine, *numbers: int) -> None:
    insert(engine, Task, [{"tenant": tenant, "id": key} for tenant, n in enumerate(numbers) for key in range(n)])


def test_each_value_is_served_after_at_most_one_claim_of_each_other(tasks: sa.Engine, shared: Database) -> None:
    enqueue(tasks, 10, 1, 1)
    ran, polled = list[int](), list[int]()
    run = noting(ran, lambda _, job: job.tenant)
    server = Server(shared, "sync", Task, run, batch_size=2, distribution=SHARDS)
    server.consumer.on("polled", lambda event: polled.append(event.jobs))
    assert server.drain() == 12
    assert max(ran.index(1), ran.index(2)) < 2 + TENANTS - 1
    assert max(polled) <= 2, "a claim is of one value"


def test_the_values_of_an_async_consumer(tasks: sa.Engine, shared: Database) -> None:
    enqueue(tasks, 4, 1, 1)
    ran: list[int] = []
    run = noting(ran, lambda _, job: job.tenant)
    assert Server(shared, "async", Task, run, batch_size=2, distribution=SHARDS).drain() == 6
    assert max(ran.index(1), ran.index(2)) < 2 + TENANTS - 1


def test_values_that_are_not_served_are_left_alone(tasks: sa.Engine, shared: Database) -> None:
    enqueue(tasks, 2, 2, 2)
    assert Server(shared, "sync", Task, distribution=Distribution("tenant", {0, 2})).drain() == 4
    with tasks.connect() as connection:
        assert set(connection.scalars(sa.select(Task.tenant).where(Task.status == "pending"))) == {1}


def test_values_of_a_function_are_asked_for_at_each_claim(tasks: sa.Engine, shared: Database) -> None:
    enqueue(tasks, 1, 1)
    values: list[int] = []
    server = Server(shared, "sync", Task, distribution=Distribution("tenant", lambda: values))
    assert server.drain() == 0
    values.append(1)
    assert server.drain() == 1


def test_rescues_are_limited_to_the_values(tasks: sa.Engine, shared: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.1)
    enqueue(tasks, 1, 1)
    with Session(tasks) as session:
        assert len(session.scalars(claim(Task, 2)).all()) == 2
        session.execute(sa.update(Task).values(lease_expires_at=sa.func.now()))
        session.commit()
    with Server(shared, "sync", Task, distribution=Distribution("tenant", [1])).running():
        wait_until(lambda: execute(tasks, sa.select(Task.status).where(Task.tenant == 1)) == "completed")
        assert execute(tasks, sa.select(Task.status).where(Task.tenant == 0)) == "processing"


def test_the_turn_goes_on_behind_the_last_value_that_had_jobs() -> None:
    values = ["a", "b", "c", "b"]
    turns = ShardTurns(Distribution("tenant", lambda: values))
    assert turns.begin() == ["a", "b", "c"]
    turns.claimed("b", 1)
    assert turns.begin() == ["c", "a", "b"]
    values[:] = ["a", "c"]
    assert turns.begin() == ["a", "c"], "the last value is gone"


def test_values_whose_server_is_away_are_left_out_for_longer_each_time() -> None:
    now = 0.0
    turns = ShardTurns(Distribution("tenant", ["a", "b"]), lambda: now)
    turns.failed("a")
    assert turns.begin() == ["b"]
    now = 5.0
    assert turns.begin() == ["a", "b"], "it is tried again"
    turns.failed("a")
    now = 10.0
    assert turns.begin() == ["b"]
    turns.failed("b")
    assert turns.begin() == ["a", "b"], "none is left"
    turns.claimed("b", 0)
    assert turns.begin() == ["b"]
    now = 15.0
    turns.claimed("a", 0)
    turns.failed("a")
    now = 20.0
    assert turns.begin() == ["a", "b"], "an answer has ended the longer pauses"


@pytest.mark.parametrize(
    ("distribution", "reason"),
    [
        ("tenant", "give a sqlaqueue.citus.Distribution"),
        (Distribution("tennant", [1]), "must be one of several that make the primary key of Job, which is id, tenant"),
        (Distribution("status", [1]), "must be one of several that make the primary key"),
    ],
)
def test_wrong_distributions(distribution: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Consumer(Task, print, sessionmaker(), distribution=distribution)


@pytest.mark.parametrize("values", [[], "abc", 5])
def test_wrong_values(values: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Distribution\('tenant'"):
        Distribution("tenant", values)


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("strategy='batch_select'", {"kind": "batch_select"}),
        ("unique", {"unique": Unique("tenant")}),
        ("ConcurrencyLimit and FairShare", {"flow_control": [ConcurrencyLimit(1), FairShare("tenant")]}),
        ("retention", {"retention": {"completed": 3600}}),
        ("attempt_history", {"attempt_history": 3600}),
    ],
)
def test_options_that_need_several_shards(option: str, config: dict[str, Any]) -> None:
    job = make_tenants_job(**{"kind": "update_status"} | config)
    with pytest.raises(ConfigurationError, match=f"Job has {option} in its QueueConfig"):
        Consumer(job, print, sessionmaker(), distribution=SHARDS)
