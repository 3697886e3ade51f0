"""Notifications, on a real server: no Consumer polls here without one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

import sqlaqueue
from sqlaqueue import Consumer, claim, complete, requeue, rescue
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance import leases
from sqlaqueue.consumer.notifications import polls
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.triggers import channel_of
from tests.consumer.bench import LATER, Bench, await_listening, idle, listening_connections
from tests.programs import wait_until


@pytest.fixture(autouse=True)
def no_rescues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", LATER)


def listener(bench: Bench) -> psycopg.Connection[Any]:
    connection = bench.database.connect()
    channel = channel_of(spec_of(bench.Job))
    connection.execute(f'LISTEN "{channel}"'.encode())
    return connection


def received(connection: psycopg.Connection[Any], first: str = "") -> list[str]:
    """Return the payloads received so far, of one kind."""
    connection.execute("SELECT 1")
    return [each.payload for each in connection.notifies(timeout=0.1) if each.payload.startswith(first)]


# -- which changes are announced ------------------------------------------------------------------------------------


def by_the_orm(bench: Bench) -> None:
    bench.enqueue()


def by_insert(bench: Bench) -> None:
    bench.execute(sa.insert(bench.Job).values(payload="x"))


def by_insert_select(bench: Bench) -> None:
    table = bench.Job.__table__
    bench.execute(sa.insert(table).from_select(["payload"], sa.select(sa.literal("x"))))


def by_copy(bench: Bench) -> None:
    with (
        bench.database.connect() as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY job (payload) FROM STDIN") as copy,
    ):
        copy.write_row(["x"])


def by_plain_sql(bench: Bench) -> None:
    bench.execute("INSERT INTO job (payload, status) VALUES ('x', 'failed')")
    bench.execute("UPDATE job SET status = 'pending' WHERE payload = 'x'")


def by_requeue(bench: Bench) -> None:
    bench.execute("INSERT INTO job (payload, status) VALUES ('x', 'failed')")
    with bench.sessions() as session:
        session.execute(requeue(bench.Job))
        session.commit()


WAYS = [by_the_orm, by_insert, by_insert_select, by_copy, by_plain_sql, by_requeue]


@pytest.mark.each_value
@pytest.mark.parametrize("enqueue", WAYS)
def test_an_idle_consumer_is_woken(mixed: Bench, enqueue: Callable[[Bench], None]) -> None:
    with idle(mixed).running() as server:
        await_listening(server)
        for done in (1, 2):
            enqueue(mixed)
            wait_until(lambda done=done: mixed.states() == {"completed": done})


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg", "asyncpg"])
def test_every_driver_receives_notifications(supply: Any, driver: str) -> None:
    bench = supply.take("update_status", "sync" if driver == "psycopg2" else "async")
    with idle(bench, url=bench.database.url(driver)).running() as server:
        await_listening(server)
        bench.enqueue()
        wait_until(lambda: bench.states() == {"completed": 1})


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_listener_that_was_cancelled_starts_again(supply: Any, driver: str) -> None:
    """As by the end of the last Consumer of an engine, while the database does not answer."""
    bench = supply.take("update_status", "async")
    server = idle(bench, url=bench.database.url(driver))

    async def cancel() -> None:
        while not (found := [one for one in asyncio.all_tasks() if one.get_name() == "sqlaqueue-listener"]):
            await asyncio.sleep(0.02)
        found[0].cancel()
        await asyncio.wait(found)

    async def serve() -> None:
        async with server.consumer, asyncio.timeout(30):
            await cancel()
        async with asyncio.timeout(30), server.consumer:
            while not server.context.polls.peers.listening:
                await asyncio.sleep(0.02)
        await server.engine.dispose()

    asyncio.run(serve())


def test_one_notification_a_statement(supply: Any, strategy: str) -> None:
    bench = supply.take(strategy, "sync")
    with listener(bench) as connection:
        bench.enqueue(100)
        assert [payload.split()[2] for payload in received(connection, "pending")] == ["100"]
        bench.execute("UPDATE job SET status = 'failed'")
        assert received(connection) == []
        bench.execute("UPDATE job SET status = 'pending'")
        assert [payload.split()[2] for payload in received(connection, "pending")] == ["1"]
        bench.execute("INSERT INTO job (status) VALUES ('failed')")
        bench.execute("UPDATE job SET payload = 'y'")
        assert received(connection) == []


def test_a_rescued_job_is_announced_as_quarantined(supply: Any) -> None:
    bench = supply.take("update_status", "sync")
    bench.enqueue(2)
    bench.in_session(claim(bench.Job, 2))
    with listener(bench) as connection:
        bench.execute("UPDATE job SET lease_expires_at = now()")
        bench.in_session(rescue(bench.Job))
        first, second = received(connection)
        assert first == "quarantined"
        assert second.startswith("pending ")


def test_claims_and_settlements_send_no_notification(supply: Any, strategy: str) -> None:
    bench = supply.take(strategy, "sync")
    bench.enqueue(3)
    with listener(bench) as connection, bench.sessions() as session:
        jobs = session.scalars(claim(bench.Job, 3)).all()
        session.execute(complete(jobs))
        session.commit()
        assert received(connection) == []


# -- due times --------------------------------------------------------------------------------------------------------


def test_a_job_for_later_begins_when_it_is_due(mixed: Bench) -> None:
    """Without a poll: the due times of jobs from before the start are queried, the others are announced."""
    due = "statement_timestamp() + interval '1.5 s'"
    mixed.execute(f"INSERT INTO job (payload, run_at) VALUES ('before', {due})")
    mixed.execute("INSERT INTO job (payload, run_at) VALUES ('never', statement_timestamp() + interval '1 h')")
    with idle(mixed).running() as server:
        await_listening(server)
        mixed.execute(f"INSERT INTO job (payload, run_at) VALUES ('after', {due}), ('soon', now() + interval '1 s')")
        wait_until(lambda: mixed.states() == {"completed": 3, "pending": 1})
    assert mixed.execute("SELECT count(*) FROM job WHERE finished_at < run_at") == 0
    assert server.told()["claimed"] == 3


def test_a_job_is_tried_again_when_it_is_due(mixed: Bench) -> None:
    mixed.enqueue()
    tries = []

    async def work(io: Any, job: Any) -> None:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise sqlaqueue.Retry(0.7)
        if len(tries) == 2:
            raise sqlaqueue.Snooze(0.5)

    with mixed.consumer(work, poll_interval=LATER).running() as server:
        await_listening(server)
        wait_until(lambda: mixed.states() == {"completed": 1})
    first, second, third = tries
    assert second - first >= 0.7
    assert third - second >= 0.5


def test_a_released_job_is_claimed_at_once(mixed: Bench) -> None:
    mixed.enqueue()
    tries = []

    async def work(io: Any, job: Any) -> None:
        tries.append(job.id)
        if len(tries) == 1:
            raise sqlaqueue.Snooze

    with mixed.consumer(work, poll_interval=LATER).running() as server:
        await_listening(server)
        wait_until(lambda: mixed.states() == {"completed": 1})


# -- many Consumers -----------------------------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize(
    ("strategy", "most"), [("update_status", 2), pytest.param("batch_select", 3, marks=pytest.mark.thorough)]
)
def test_fifty_idle_consumers_are_not_all_woken(
    supply: Any, strategy: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim, and a second one after the first job of each; a strategy that holds a transaction writes its journal too."""
    # On a busy machine the notification that a job is claimed arrives late.
    monkeypatch.setattr(polls, "STAGGER", 5.0)
    monkeypatch.setattr(pace, "HEARTBEAT", LATER)
    bench = supply.take(strategy, "sync")
    engine = sa.create_engine(bench.database.url(), pool_size=110)
    statements: list[str] = []
    handled = threading.Semaphore(0)
    consumers = [
        Consumer(bench.Job, lambda session, job: handled.release(), sessionmaker(engine), poll_interval=LATER)
        for _ in range(50)
    ]
    threads = [threading.Thread(target=consumer.run, daemon=True) for consumer in consumers]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(one._context is not None and one._context.polls.peers.count == 50 for one in consumers))
        wait_until(lambda: bench.execute("SELECT count(*) FROM sqlaqueue_consumer WHERE listening") == 50)
        wait_until(lambda: not any(one._context.polls.wants_upcoming() for one in consumers))

        @sa.event.listens_for(engine, "before_cursor_execute")
        def _count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            statements.append(statement)

        for _ in range(100):
            bench.enqueue()
            assert handled.acquire(timeout=30)
        wait_until(lambda: bench.states() == {"completed": 100})
        settled = sum(
            one.startswith(("WITH sqlaqueue_ended AS", "DELETE FROM sqlaqueue_crash_journal")) for one in statements
        )
        assert len(statements) - settled <= most * 100
    finally:
        for consumer in consumers:
            consumer.stop()
        for thread in threads:
            thread.join()
        engine.dispose()


def test_a_look_for_unclaimable_jobs_has_others_poll(supply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It locks due jobs for a moment, so that a claim of another Consumer may have missed them."""
    monkeypatch.setattr(leases, "TRY_AGAIN_AFTER", 0.2)
    bench, begun, gate = supply.take("batch_select", "sync"), threading.Event(), threading.Event()

    async def work(_: Any, __: Any) -> None:
        begun.set()
        gate.wait(30)

    bench.enqueue()
    payloads = list[str]()
    with bench.consumer(work, poll_interval=LATER, batch_size=8).running(), listener(bench) as connection:
        assert begun.wait(30)
        bench.enqueue()
        wait_until(lambda: "poll" in payloads or payloads.extend(received(connection, "poll")))
        gate.set()


def test_a_busy_consumer_is_replaced_by_another(mixed: Bench) -> None:
    """The first one to poll may be busy: then the next one does."""
    go_on = threading.Event()
    working = threading.Semaphore(0)

    async def work(io: Any, job: Any) -> None:
        working.release()
        await io.wait(go_on)

    servers = [mixed.consumer(work, poll_interval=LATER, batch_size=1) for _ in range(3)]
    with servers[0].running(), servers[1].running(), servers[2].running():
        await_listening(*servers)
        try:
            for _ in servers:
                mixed.enqueue()
                assert working.acquire(timeout=30), "no Consumer has claimed the job"
        finally:
            go_on.set()
        wait_until(lambda: mixed.states() == {"completed": 3})


def test_all_consumers_claim_some_of_many_jobs(mixed: Bench) -> None:
    together = threading.Barrier(3)

    async def work(io: Any, job: Any) -> None:
        # Each Consumer has a thread of its own, and its loop nothing else to do.
        together.wait(30)

    servers = [mixed.consumer(work, poll_interval=LATER, batch_size=1) for _ in range(3)]
    with servers[0].running(), servers[1].running(), servers[2].running():
        await_listening(*servers)
        mixed.enqueue(3)
        wait_until(lambda: mixed.states() == {"completed": 3})


def test_one_connection_listens_for_a_process(supply: Any) -> None:
    bench = supply.take("update_status", "sync")
    engine = sa.create_engine(bench.database.url(), pool_size=20)
    consumers = [Consumer(bench.Job, lambda *_: None, sessionmaker(engine), poll_interval=LATER) for _ in range(3)]
    threads = [threading.Thread(target=consumer.run, daemon=True) for consumer in consumers]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(one._context is not None and one._context.polls.peers.count == 3 for one in consumers))
    assert listening_connections(bench) == 1
    for consumer in consumers:
        consumer.stop()
    for thread in threads:
        thread.join()
    wait_until(lambda: listening_connections(bench) == 0)
    engine.dispose()
