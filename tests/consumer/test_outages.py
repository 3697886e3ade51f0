"""Outages of the database, pools of connections, and poolers: no job is lost, and the Consumer goes on."""

import asyncio
import gc
import random
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from sqlaqueue import Consumer, cancel, claim, complete
from sqlaqueue.consumer import pace, worker
from sqlaqueue.consumer.notifications import polls
from sqlaqueue.consumer.outcomes import is_disconnected
from sqlaqueue.exc import ConfigurationError
from tests.conftest import SERVERS
from tests.consumer.bench import (
    LATER,
    Bench,
    Gate,
    Server,
    await_listening,
    for_some,
    is_listening,
    lose_at_commit,
    nothing,
)
from tests.consumer.conftest import MIXED
from tests.programs import wait_until
from tests.servers import PROGRAM, Pooler
from tests.servers import Server as PostgresServer


@pytest.fixture(scope="module")
def fragile_server(pytestconfig: pytest.Config, postgres_version: int) -> Iterator[PostgresServer]:
    """A server for the tests of this file, each of which finds it running and leaves it running."""
    with pytestconfig.stash[SERVERS].own(postgres_version) as server:
        yield server


@pytest.fixture(params=MIXED, ids="-".join)
def mixed(fragile_server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A queue on a server that may be stopped."""
    with fragile_server.database() as database:
        bench = Bench(database, *request.param)
        bench.create()
        yield bench


LEASED = pytest.mark.parametrize(
    "mixed", [each for each in MIXED if each[0] == "update_status"], indirect=True, ids="-".join
)
"""The strategy under which runs end without a connection."""


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
    gate = Gate(first=mixed.work)
    with mixed.consumer(gate, lease=1, retry=lambda *_: 0).running() as server:
        gate.await_call()
        mixed.database.server.stop("immediate")
        server.stop()
        gate.open()
        assert server.finished.wait(30)
    mixed.database.server.start()
    with mixed.consumer(mixed.work).running():
        wait_until(lambda: mixed.states() == {"completed": 3})
    assert mixed.effects() == {1: 1, 2: 1, 3: 1}


@LEASED
def test_runs_that_end_during_an_outage_keep_their_outcome(mixed: Bench) -> None:
    """A refused connection is no error of the job; without its outcome it would run again."""
    mixed.enqueue(1)
    gate = Gate()
    with mixed.consumer(gate, lease=600).running() as server:
        gate.await_call()
        mixed.database.server.stop("immediate")
        gate.open()
        wait_until(lambda: server.consumer._parts.intervals.failures >= 4, "that it tries with new connections")
        mixed.database.server.start()
        wait_until(lambda: mixed.states() == {"completed": 1})


@LEASED
def test_a_queue_on_a_server_that_is_not_there_is_not_drained_for_ever(
    mixed: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a wrong port: who waits for the end gets the error."""
    monkeypatch.setattr(worker, "MOST_FAILURES", 3)
    server = mixed.consumer(concurrency=2)
    mixed.database.server.stop("immediate")
    try:
        with pytest.raises((sa.exc.OperationalError, OSError)):
            server.drain()
    finally:
        mixed.database.server.start()


def test_connections_are_ended_at_random(bench: Bench) -> None:
    """By an administrator: handlers fail, batches are lost, and in the end each job is completed once."""
    bench.enqueue(30, max_attempts=100)
    dice = random.Random(1)
    server = bench.consumer(bench.work, concurrency=2, batch_size=4, lease=1, retry=lambda *_: 0)
    kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database()"
    with server.running():
        while bench.states()["completed"] < 30:
            bench.execute(f"{kill} AND pid <> pg_backend_pid() AND random() < {dice.random()}")
            time.sleep(0.15)
    assert set(bench.effects().values()) == {1}
    assert len(bench.effects()) == 30
    bench.assert_tidy()


async def lose_its_connection(bench: Bench, io: Any, job: Any) -> None:
    await io.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))


async def hide_that_its_connection_is_lost(bench: Bench, io: Any, job: Any) -> None:
    """Such as one that runs longer than a transaction may be idle, and executes no statement after that."""
    pid = await io.scalar(sa.text("SELECT pg_backend_pid()"))
    bench.execute("SELECT pg_terminate_backend(:pid, 10000)", pid=pid)


@pytest.mark.parametrize("lose", [lose_its_connection, hide_that_its_connection_is_lost])
def test_a_job_that_always_loses_its_connection_fails(bench: Bench, lose: Any) -> None:
    """And the other jobs of its batch complete."""
    good = bench.enqueue(2)
    [bad] = bench.enqueue(1)
    good += bench.enqueue(2)
    bench.consumer(bench.doing({bad: partial(lose, bench)})).drain()
    bench.expect({"completed": 4, "failed": 1}, attempts=dict.fromkeys(good, 1) | {bad: 3}, effects=good)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_relationship_that_a_coroutine_loads_by_reading_it_is_no_lost_connection() -> None:
    """Its first statement cannot connect, which is a mistake of the handler: the attempt counts."""
    engine = create_async_engine("postgresql+asyncpg://localhost:1/nowhere").sync_engine
    is_lost = None
    try:
        engine.connect()
    except sa.exc.MissingGreenlet as error:
        is_lost = is_disconnected(error, gone=False)
    # The coroutine that SQLAlchemy made goes with the error here, and not in a later test, which would fail for it.
    gc.collect()
    assert is_lost is False


def test_the_reply_to_a_commit_is_lost(leased: Bench) -> None:
    """The job is completed: it must neither run again nor be reported as refused."""
    [key] = leased.enqueue(1)
    server = leased.consumer(leased.work)
    lost = lose_at_commit(server, leased, "SELECT count(*) FROM effect", committed=True)

    server.drain()
    assert lost
    assert leased.row(key).status == "completed"
    leased.expect(attempts={key: 1}, effects={key: 1})
    assert server.told("completed") == [key]
    assert server.told("lease_lost", "retried") == []


def test_a_commit_without_a_reply_did_not_take_place(leased: Bench) -> None:
    """Another worker has run the job since: only that one reports that it is completed."""
    [key] = leased.enqueue(1)
    server = leased.consumer(leased.work)
    complete = "UPDATE job SET status = 'completed', attempts = 2, lease_token = NULL, lease_expires_at = NULL"
    lost = lose_at_commit(server, leased, "SELECT count(*) FROM effect", complete, committed=False)

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
    gate = Gate()
    work = for_some({key: gate}, first=leased.work if writes else nothing)

    connecting = (
        {"options": "-c lock_timeout=100"} if leased.api == "sync" else {"server_settings": {"lock_timeout": "100"}}
    )
    server = leased.consumer(work, engine={"connect_args": connecting})
    with server.running():
        gate.await_call()
        with leased.engine.begin() as holding:
            holding.execute(sa.text("SELECT FROM job WHERE id = :id FOR UPDATE"), {"id": key})
            gate.open()
            wait_until(lambda: leased.row(other).status == "completed", "the other one is not held up")
        wait_until(lambda: leased.states() == {"completed": 2})
    leased.expect(attempts={key: 1, other: 1}, effects=({key: 1, other: 1} if writes else {}))
    assert not server.told("failed", "retried", "lease_lost")


@pytest.mark.once
def test_the_reply_to_a_claim_is_lost(leased: Bench) -> None:
    """The jobs are claimed, and the Consumer does not know: it releases them, and no attempt is counted."""
    keys = leased.enqueue(3, max_attempts=1)
    server = leased.consumer(lease=600, batch_size=3, batch=True)
    claimed = "SELECT count(*) FROM job WHERE status = 'processing'"
    lost = lose_at_commit(server, leased, claimed, committed=True)

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
    leased.expect({"completed": 3}, attempts=dict.fromkeys(keys, 1), effects=keys)


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
    mixed.expect({"completed": 1, "failed": 1}, attempts=dict.fromkeys(once + always, 1), effects=once)
    assert {key: runs.count(key) for key in once + always} == dict.fromkeys(once + always, 2)


# -- the size of the connection pool: too small a pool is refused, and the smallest allowed one is enough ----------


def test_a_pool_that_is_too_small_is_refused(bench: Bench) -> None:
    """Before the first claim; the error contains the size that is needed."""
    bench.enqueue(1)
    server = bench.consumer(concurrency=4, engine={"pool_size": 2, "max_overflow": 2})
    with pytest.raises(ConfigurationError, match=r"needs 5 connections.*allows 4.*pool_size=5"):
        server.drain()
    assert bench.states() == {"pending": 1}


@pytest.mark.parametrize("engine", [{"pool_size": 1, "max_overflow": 4}, {"pool_size": 0}, {"max_overflow": -1}])
def test_a_pool_that_is_large_enough_is_not_refused(bench: Bench, engine: dict[str, Any]) -> None:
    bench.enqueue(3)
    assert bench.consumer(concurrency=4, engine=engine).drain() == 3


def test_an_engine_without_a_pool_is_not_refused(bench: Bench) -> None:
    bench.enqueue(8)
    assert bench.consumer(concurrency=4, batch_size=2, engine={"poolclass": NullPool}).drain() == 8


def test_the_smallest_allowed_pool_is_enough(bench: Bench) -> None:
    """All handlers use their sessions at once, and the maintenance loop works as well."""
    bench.enqueue(40)
    gate, engine = Gate(first=bench.work), {"pool_size": 5, "max_overflow": 0, "pool_timeout": 10}
    with bench.consumer(gate, concurrency=4, batch_size=5, engine=engine, lease=1).running() as server:
        gate.await_call(4)
        gate.open()
        wait_until(lambda: bench.states() == {"completed": 40})
    bench.expect(effects=1)
    assert server.told() == {"claimed": 40, "completed": 40}


def test_sessions_with_autocommit_are_refused(bench: Bench) -> None:
    """Other Consumers could claim the jobs of a batch, and a rollback would undo nothing."""
    bench.enqueue(2)
    server = bench.consumer(engine={"isolation_level": "AUTOCOMMIT"})
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        server.drain()
    bench.expect({"pending": 2})


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_stricter_isolation_still_drains(bench: Bench, level: str) -> None:
    """Claims may fail with conflicts, and are tried again."""
    bench.enqueue(20)
    servers = [bench.consumer(concurrency=2, batch_size=2, engine={"isolation_level": level}) for _ in range(2)]
    with servers[0].running(), servers[1].running():
        wait_until(lambda: bench.states() == {"completed": 20})
    assert set(bench.attempts().values()) == {1}


# -- producers and Consumers behind PgBouncer; a Consumer logs that it receives no notifications there -------------


# As docs/deploy.md says.
OPTIONS: dict[str, dict[str, Any]] = {
    "psycopg": {"connect_args": {"prepare_threshold": None}},
    "asyncpg": {
        "connect_args": {
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": lambda: f"__asyncpg_{uuid.uuid4()}__",
        }
    },
    "psycopg2": {},
}


def behind(pooler: Pooler, driver: str, bench: Bench, **options: Any) -> Server:
    api, given = "async" if driver == "asyncpg" else "sync", {"concurrency": 4} | options
    url, engine = pooler.url(driver), OPTIONS[driver]
    return Server(bench.database, api, bench.Job, bench.work, url=url, engine=engine, **given)


@pytest.fixture
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the interval of heartbeats and the time in which their notifications have to arrive."""
    monkeypatch.setattr(pace, "HEARTBEAT", 0.3)
    monkeypatch.setattr(polls, "PROOF_TIMEOUT", 0.2)


@pytest.fixture(params=["update_status", "delete_returning", "batch_select"])
def held(request: pytest.FixtureRequest, supply: Any) -> Bench:
    return supply.take(request.param, "sync")  # type: ignore[no-any-return] # a fixture of the package


@pytest.fixture
def transactions(held: Bench) -> Iterator[Pooler]:
    with Pooler(held.database, "transaction") as pooler:
        yield pooler


DRIVERS = pytest.mark.parametrize("driver", ["psycopg", "asyncpg", "psycopg2"])


@pytest.mark.once
@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer")
@DRIVERS
def test_a_consumer_works_behind_a_pooler(held: Bench, transactions: Pooler, driver: str) -> None:
    """For more than five executions, after which psycopg prepares a statement; asyncpg does so at once."""
    held.enqueue(60)
    server = behind(transactions, driver, held, batch_size=3, poll_interval=0.05)
    assert server.drain() == 60
    assert set(held.effects().values()) == {1}
    assert server.told() == {"claimed": 60, "completed": 60}
    held.assert_tidy()


@pytest.mark.once
@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer")
@DRIVERS
def test_producers_work_behind_a_pooler(held: Bench, transactions: Pooler, driver: str) -> None:
    """A Consumer that is connected to the server is woken by the commit; verbs work as well."""
    consumer = held.consumer(poll_interval=LATER)
    with consumer.running():
        await_listening(consumer)
        for number in range(1, 13):
            enqueue(transactions, driver, held)
            wait_until(lambda number=number: held.states() == {"completed": number})


def enqueue(pooler: Pooler, driver: str, bench: Bench) -> None:
    if driver == "asyncpg":

        async def add() -> None:
            engine = create_async_engine(pooler.url(driver), **OPTIONS[driver])
            async with AsyncSession(engine) as session:
                session.add(bench.Job())
                await session.commit()
            await engine.dispose()

        asyncio.run(add())
        return
    engine = sa.create_engine(pooler.url(driver), **OPTIONS[driver])
    with Session(engine) as session:
        session.add(bench.Job())
        session.commit()
    engine.dispose()


@pytest.mark.once
@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer")
def test_verbs_behind_a_pooler(held: Bench, transactions: Pooler) -> None:
    engine = sa.create_engine(transactions.url("psycopg"), **OPTIONS["psycopg"])
    for _ in range(10):
        held.enqueue(2)
        with Session(engine) as session:
            jobs = session.scalars(claim(held.Job, 1)).all()
            session.execute(complete(jobs))
            session.commit()
            session.execute(cancel(held.Job))
            session.commit()
    assert held.states() == {"completed": 10, "cancelled": 10}
    engine.dispose()


@pytest.mark.once
@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer")
@DRIVERS
@pytest.mark.usefixtures("frequent_heartbeats")
def test_a_consumer_behind_a_pooler_polls_and_logs_it_once(
    held: Bench, transactions: Pooler, driver: str, log: Any
) -> None:
    with behind(transactions, driver, held, poll_interval=0.05).running():
        held.enqueue(5)
        wait_until(lambda: held.states() == {"completed": 5})
        wait_until(lambda: "notifications do not arrive" in log.text)
        assert "give the Consumer an engine that is connected to the server itself" in log.text
        held.enqueue(5)
        wait_until(lambda: held.states() == {"completed": 10})
        heartbeat = "SELECT count(*) FROM sqlaqueue_consumer WHERE heartbeat_at > created_at + interval '3 s'"
        wait_until(lambda: held.execute(heartbeat))
    assert log.text.count("notifications do not arrive") == 1


@pytest.mark.once
@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer")
@DRIVERS
def test_notifications_arrive_in_session_mode(held: Bench, driver: str) -> None:
    with Pooler(held.database, "session", size=20) as pooler:
        server = behind(pooler, driver, held, poll_interval=LATER)
        with server.running():
            wait_until(lambda: is_listening(server), "that it receives its own heartbeat")
            for number in (1, 2):
                held.enqueue()
                wait_until(lambda number=number: held.states() == {"completed": number})


@pytest.mark.once
@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer")
def test_no_setting_outlives_its_transaction(held: Bench) -> None:
    """Otherwise another client of the pooler would get the setting together with the connection."""
    settings = ("lock_timeout", "statement_timeout", "synchronous_commit", "idle_in_transaction_session_timeout")
    query = sa.text("SELECT " + ", ".join(f"current_setting('{name}')" for name in settings))
    # One server connection for the worker and one for maintenance: each is given to all clients in turn.
    with Pooler(held.database, "transaction", size=2) as pooler:
        engine = sa.create_engine(pooler.url("psycopg"), **OPTIONS["psycopg"])
        with engine.connect() as one, engine.connect() as other:
            before = {one.execute(query).one(), other.execute(query).one()}
        held.enqueue(10)
        consumer = Consumer(held.Job, lambda session, job: None, sessionmaker(engine), poll_interval=0.05, lease=1)
        assert consumer.drain() == 10
        with engine.connect() as one, engine.connect() as other:
            assert {one.execute(query).one(), other.execute(query).one()} == before
        engine.dispose()


@pytest.mark.once
@pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer")
def test_without_the_option_statements_fail(sync_leased: Bench) -> None:
    """Otherwise psycopg prepares a statement on one connection to the server, and executes it on another."""
    with Pooler(sync_leased.database, "transaction", size=2) as pooler:
        engine = sa.create_engine(pooler.url("psycopg"), pool_size=2)
        with pytest.raises(sa.exc.DBAPIError, match="prepared statement"), engine.connect() as one:
            for _ in range(20):
                one.execute(sa.text("SELECT 1"))
                one.commit()
                with engine.connect() as other:
                    other.execute(sa.text("SELECT 1"))
                    one.execute(sa.text("SELECT 1"))
        engine.dispose()
