"""Outages of the database: no job is lost, and the Consumer continues when the database is back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.consumer import worker
from tests.conftest import SERVERS
from tests.consumer.bench import Bench
from tests.consumer.conftest import MIXED
from tests.programs import wait_until
from tests.servers import Server


@pytest.fixture(scope="module")
def fragile_server(pytestconfig: pytest.Config, postgres_version: int) -> Iterator[Server]:
    """A server for the tests of this file, each of which finds it running and leaves it running."""
    with pytestconfig.stash[SERVERS].own(postgres_version) as server:
        yield server


@pytest.fixture(params=MIXED, ids="-".join)
def mixed(fragile_server: Server, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A queue on a server that may be stopped."""
    with fragile_server.database() as database:
        bench = Bench(database, *request.param)
        bench.create()
        yield bench


@pytest.fixture(params=[each for each in MIXED if each[0] == "update_status"], ids="-".join)
def leased_there(fragile_server: Server, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The same for the strategy under which runs end without a connection."""
    with fragile_server.database() as database:
        bench = Bench(database, *request.param)
        bench.create()
        yield bench


def test_the_server_is_gone_for_a_while(mixed: Bench) -> None:
    """It crashes while jobs run; the Consumer retries, and all jobs end when it is back."""
    mixed.enqueue(40)
    done = threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.execute(mixed.effect(job.id))
        if job.id == 20:
            done.set()

    server = mixed.consumer(work, concurrency=2, batch_size=5, lease=2, retry=lambda *_: 0)
    tries: list[float] = []
    with server.running():
        failed = server.context.intervals.failed
        server.context.intervals.failed = lambda: tries.append(failed()) or tries[-1]
        assert done.wait(30)
        mixed.database.server.stop("immediate")
        wait_until(lambda: len(tries) >= 4, "that the Consumer misses the database")
        mixed.database.server.start()
        mixed.enqueue(5)
        wait_until(lambda: mixed.states() == {"completed": 45})
        assert not server.finished.is_set()
    # In a crash the last commits are not lost: the server writes its log before it answers.
    assert set(mixed.effects().values()) == {1}
    assert len(mixed.effects()) == 45
    assert max(tries) <= 3


def test_the_server_is_not_there_at_the_start(mixed: Bench) -> None:
    mixed.enqueue(3)
    mixed.database.server.stop("fast")
    server = mixed.consumer(concurrency=2)
    with server.running():
        wait_until(lambda: server.consumer._parts.intervals.failures >= 2)
        mixed.database.server.start()
        wait_until(lambda: mixed.states() == {"completed": 3})


def test_the_server_is_not_there_at_the_end(mixed: Bench) -> None:
    """What could not be settled runs again; run() returns all the same."""
    mixed.enqueue(3)
    started, go_on = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.execute(mixed.effect(job.id))
        started.set()
        await io.wait(go_on)

    with mixed.consumer(work, lease=1, retry=lambda *_: 0).running() as server:
        assert started.wait(30)
        mixed.database.server.stop("immediate")
        server.stop()
        go_on.set()
        assert server.finished.wait(30)
    mixed.database.server.start()
    with mixed.consumer(lambda io, job: io.execute(mixed.effect(job.id))).running():
        wait_until(lambda: mixed.states() == {"completed": 3})
    assert mixed.effects() == {1: 1, 2: 1, 3: 1}


def test_runs_that_end_during_an_outage_keep_their_outcome(leased_there: Bench) -> None:
    """A refused connection is no error of the job; without its outcome it would run again."""
    leased_there.enqueue(1)
    started, go_on = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(go_on)

    with leased_there.consumer(work, lease=600).running() as server:
        assert started.wait(30)
        leased_there.database.server.stop("immediate")
        go_on.set()
        wait_until(lambda: server.consumer._parts.intervals.failures >= 4, "that it tries with new connections")
        leased_there.database.server.start()
        wait_until(lambda: leased_there.states() == {"completed": 1})


def test_a_queue_on_a_server_that_is_not_there_is_not_drained_for_ever(
    leased_there: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a wrong port: who waits for the end gets the error."""
    monkeypatch.setattr(worker, "MOST_FAILURES", 3)
    server = leased_there.consumer(concurrency=2)
    leased_there.database.server.stop("immediate")
    try:
        with pytest.raises((sa.exc.OperationalError, OSError)):
            server.drain()
    finally:
        leased_there.database.server.start()


def test_connections_are_ended_at_random(bench: Bench) -> None:
    """By an administrator: handlers fail, batches are lost, and in the end each job is completed once."""
    bench.enqueue(30, max_attempts=100)
    dice = random.Random(1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))

    server = bench.consumer(work, concurrency=2, batch_size=4, lease=1, retry=lambda *_: 0)
    kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database()"
    with server.running():
        while bench.states()["completed"] < 30:
            bench.execute(f"{kill} AND pid <> pg_backend_pid() AND random() < {dice.random()}")
            time.sleep(0.05)
    assert set(bench.effects().values()) == {1}
    assert len(bench.effects()) == 30
    bench.assert_tidy()


def test_a_job_that_always_loses_its_connection_fails(bench: Bench) -> None:
    """And the other jobs of its batch complete."""
    good = bench.enqueue(2)
    [bad] = bench.enqueue(1)
    good += bench.enqueue(2)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            await io.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    bench.consumer(work).drain()
    assert bench.states() == {"completed": 4, "failed": 1}
    assert bench.attempts() == dict.fromkeys(good, 1) | {bad: 3}
    assert bench.effects() == dict.fromkeys(good, 1)
    bench.assert_tidy()


def test_a_job_that_hides_lost_connections_fails(bench: Bench) -> None:
    """Such as one that runs longer than a transaction may be idle, and executes no statement after that."""
    good = bench.enqueue(2)
    [bad] = bench.enqueue(1)
    good += bench.enqueue(2)

    async def work(io: Any, job: Any) -> None:
        pid = await io.scalar(sa.text("SELECT pg_backend_pid()"))
        await io.execute(bench.effect(job.id))
        if job.id == bad:
            bench.execute("SELECT pg_terminate_backend(:pid, 10000)", pid=pid)

    bench.consumer(work).drain()
    assert bench.states() == {"completed": 4, "failed": 1}
    assert bench.attempts() == dict.fromkeys(good, 1) | {bad: 3}
    assert bench.effects() == dict.fromkeys(good, 1)
    bench.assert_tidy()


def test_the_reply_to_a_commit_is_lost(leased: Bench) -> None:
    """The job is completed: it must neither run again nor be reported as refused."""
    [key] = leased.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(leased.effect(job.id))

    server = leased.consumer(work)
    lost: list[int] = []

    @sa.event.listens_for(server.sync_engine, "commit")
    def commit(connection: sa.Connection) -> None:
        # The commit happens here; by the time the driver asks for it, the connection is gone.
        if not lost and connection.scalar(sa.text("SELECT count(*) FROM effect")):
            lost.append(connection.scalar(sa.text("SELECT pg_backend_pid()")) or 0)
            connection.exec_driver_sql("COMMIT")
            leased.execute("SELECT pg_terminate_backend(:pid, 10000)", pid=lost[0])

    server.drain()
    assert lost
    assert leased.row(key).status == "completed"
    assert leased.attempts() == {key: 1}
    assert leased.effects() == {key: 1}
    assert server.told("completed") == [key]
    assert server.told("lease_lost", "retried") == []


def test_a_commit_without_a_reply_did_not_take_place(leased: Bench) -> None:
    """Another worker has run the job since: only that one reports that it is completed."""
    [key] = leased.enqueue(1)

    async def work(io: Any, job: Any) -> None:
        await io.execute(leased.effect(job.id))

    server = leased.consumer(work)
    lost: list[int] = []

    @sa.event.listens_for(server.sync_engine, "commit")
    def commit(connection: sa.Connection) -> None:
        if not lost and connection.scalar(sa.text("SELECT count(*) FROM effect")):
            lost.append(connection.scalar(sa.text("SELECT pg_backend_pid()")) or 0)
            leased.execute("SELECT pg_terminate_backend(:pid, 10000)", pid=lost[0])
            leased.execute(
                "UPDATE job SET status = 'completed', attempts = 2, lease_token = NULL, lease_expires_at = NULL"
            )

    server.drain()
    assert lost
    assert (leased.row(key).status, leased.effects()) == ("completed", {})
    assert server.told("completed") == []
    assert server.told("lease_lost") == [key]


@pytest.mark.once
@pytest.mark.parametrize("writes", [False, True], ids=["quiet", "writing"])
def test_a_settlement_that_is_blocked_is_no_failed_attempt(leased: Bench, *, writes: bool) -> None:
    """A transaction locks the row for longer than a statement may wait: the success is settled after it."""
    [key, other] = leased.enqueue(2, max_attempts=1)
    started, go_on = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        if writes:
            await io.execute(leased.effect(job.id))
        if job.id == key and not go_on.is_set():
            started.set()
            await io.wait(go_on)

    connecting = (
        {"options": "-c lock_timeout=100"} if leased.api == "sync" else {"server_settings": {"lock_timeout": "100"}}
    )
    server = leased.consumer(work, engine={"connect_args": connecting})
    with server.running():
        assert started.wait(30)
        with leased.engine.begin() as holding:
            holding.execute(sa.text("SELECT FROM job WHERE id = :id FOR UPDATE"), {"id": key})
            go_on.set()
            wait_until(lambda: leased.row(other).status == "completed", "the other one is not held up")
        wait_until(lambda: leased.states() == {"completed": 2})
    assert leased.attempts() == {key: 1, other: 1}
    assert leased.effects() == ({key: 1, other: 1} if writes else {})
    assert not server.told("failed", "retried", "lease_lost")


@pytest.mark.once
def test_the_reply_to_a_claim_is_lost(leased: Bench) -> None:
    """The jobs are claimed, and the Consumer does not know: it releases them, and no attempt is counted."""
    keys = leased.enqueue(3, max_attempts=1)
    server = leased.consumer(lease=600, batch_size=3, batch=True)
    lost: list[int] = []

    @sa.event.listens_for(server.sync_engine, "commit")
    def commit(connection: sa.Connection) -> None:
        if not lost and connection.scalar(sa.text("SELECT count(*) FROM job WHERE status = 'processing'")):
            lost.append(connection.scalar(sa.text("SELECT pg_backend_pid()")) or 0)
            connection.exec_driver_sql("COMMIT")
            leased.execute("SELECT pg_terminate_backend(:pid, 10000)", pid=lost[0])

    with server.running():
        wait_until(lambda: leased.states() == {"completed": 3})
    assert lost
    assert leased.attempts() == dict.fromkeys(keys, 1)
    assert server.told() == {"claimed": 3, "completed": 3}


@pytest.mark.once
def test_a_connection_that_cannot_be_made_costs_no_attempt(leased: Bench) -> None:
    """As while the server restarts: otherwise all jobs that a Consumer has claimed would fail."""
    keys = leased.enqueue(3, max_attempts=1)
    runs: list[int] = []
    refused: list[int] = []

    async def work(io: Any, job: Any) -> None:
        runs.append(job.id)
        if runs.count(job.id) == 1:
            refused.append(job.id)
        try:
            await io.execute(leased.effect(job.id))
        finally:
            refused.clear()

    server = leased.consumer(work)

    @sa.event.listens_for(server.sync_engine, "checkout")
    def checkout(*_: Any) -> None:
        if refused:
            raise ConnectionRefusedError

    server.drain()
    assert leased.states() == {"completed": 3}
    assert leased.attempts() == dict.fromkeys(keys, 1)
    assert leased.effects() == dict.fromkeys(keys, 1)


@pytest.mark.each_value
@pytest.mark.once
@pytest.mark.parametrize("at", ["handler", "commit"])
def test_a_lost_connection_costs_no_attempt(mixed: Bench, at: str) -> None:
    """The first time: if the job then runs by itself and loses another one, the attempt counts."""
    once, always = mixed.enqueue(1, max_attempts=1), mixed.enqueue(1, max_attempts=1, payload="always")
    runs: list[int] = []

    async def work(io: Any, job: Any) -> None:
        runs.append(job.id)
        await io.execute(mixed.effect(job.id, job.payload))
        if at == "handler" and (job.payload or runs.count(job.id) == 1):
            await io.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    server = mixed.consumer(work, batch_size=1)

    @sa.event.listens_for(server.sync_engine, "commit")
    def commit(connection: sa.Connection) -> None:
        if at == "commit":
            seen = connection.execute(sa.text("SELECT job, note FROM effect")).all()
            uncommitted = [row for row in seen if not mixed.effects()[row.job]]
            if any(row.note or runs.count(row.job) == 1 for row in uncommitted):
                pid = connection.scalar(sa.text("SELECT pg_backend_pid()"))
                mixed.execute("SELECT pg_terminate_backend(:pid, 10000)", pid=pid)

    server.drain()
    assert mixed.states() == {"completed": 1, "failed": 1}
    assert mixed.attempts() == dict.fromkeys(once + always, 1)
    assert {key: runs.count(key) for key in once + always} == dict.fromkeys(once + always, 2)
    assert mixed.effects() == dict.fromkeys(once, 1)
    mixed.assert_tidy()
