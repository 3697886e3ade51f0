"""Producers and Consumers behind PgBouncer; a Consumer logs that it receives no notifications there."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, cancel, claim, complete
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.notifications import polls
from tests.consumer.bench import LATER, Bench, Server, await_listening, is_listening
from tests.programs import wait_until
from tests.servers import PROGRAM, Pooler

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed; apt-get install pgbouncer"),
]

# As docs/deployment.md says.
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
    """Return a Consumer whose engine connects to a pooler."""
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


@DRIVERS
def test_a_consumer_works_behind_a_pooler(held: Bench, transactions: Pooler, driver: str) -> None:
    """For more than five executions, after which psycopg prepares a statement; asyncpg does so at once."""
    held.enqueue(60)
    server = behind(transactions, driver, held, batch_size=3, poll_interval=0.05)
    assert server.drain() == 60
    assert set(held.effects().values()) == {1}
    assert server.told() == {"claimed": 60, "completed": 60}
    held.assert_tidy()


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


@DRIVERS
@pytest.mark.usefixtures("frequent_heartbeats")
def test_a_consumer_behind_a_pooler_polls_and_logs_it_once(
    held: Bench, transactions: Pooler, driver: str, log: pytest.LogCaptureFixture
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


@DRIVERS
def test_notifications_arrive_in_session_mode(held: Bench, driver: str) -> None:
    with Pooler(held.database, "session", size=20) as pooler:
        server = behind(pooler, driver, held, poll_interval=LATER)
        with server.running():
            wait_until(lambda: is_listening(server), "that it receives its own heartbeat")
            for number in (1, 2):
                held.enqueue()
                wait_until(lambda number=number: held.states() == {"completed": number})


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


def test_without_the_option_statements_fail(supply: Any) -> None:
    """Otherwise psycopg prepares a statement on one connection to the server, and executes it on another."""
    bench = supply.take("update_status", "sync")
    with Pooler(bench.database, "transaction", size=2) as pooler:
        engine = sa.create_engine(pooler.url("psycopg"), pool_size=2)
        with pytest.raises(sa.exc.DBAPIError, match="prepared statement"), engine.connect() as one:
            for _ in range(20):
                one.execute(sa.text("SELECT 1"))
                one.commit()
                with engine.connect() as other:
                    other.execute(sa.text("SELECT 1"))
                    one.execute(sa.text("SELECT 1"))
        engine.dispose()
