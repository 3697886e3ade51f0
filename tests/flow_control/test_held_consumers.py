"""Consumers of queues with limits, rates, an order or turns under strategies whose transaction holds the jobs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Constant, Consumer, Limit, Order, Rate, Retry, admin
from tests.flow_control.models import HELD, create, insert, make_job, of_customers
from tests.flow_control.running import Handlers, consumers, unfinished, wait_for
from tests.servers import Database


@pytest.fixture(params=HELD)
def held(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The configuration of a strategy."""
    return HELD[request.param]


def test_workers_of_one_thread_run_as_many_jobs_as_the_limit_is(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_job(limits=[Limit(4)], **held), Handlers(wait=True)
    create(pool, job)
    insert(pool, job, of_customers(*range(12)))
    with consumers(pool, job, handlers, 5, concurrency=1):
        wait_for(lambda: len(handlers.begun) == 4)
        handlers.let_go()
        wait_for(lambda: not unfinished(pool, job))
    assert max(handlers.most.values()) == 1


def test_freed_slots_are_taken_without_polling(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_job(limits=[Limit(1, per="customer_id")], **held), Handlers()
    create(pool, job)
    with consumers(pool, job, handlers, 2, concurrency=2, poll_interval=600):
        insert(pool, job, of_customers(*[1] * 10, *[2] * 10))
        wait_for(lambda: not unfinished(pool, job))
    assert handlers.most == {1: 1, 2: 1}


def test_jobs_of_a_key_run_in_order_with_retries_and_several_consumers(pool: sa.Engine, held: Any) -> None:
    job = make_job(order=Order("customer_id", on_failure="continue"), retry=lambda *_: timedelta(seconds=0.02), **held)
    handlers = Handlers()
    create(pool, job)
    insert(pool, job, of_customers(*list(range(4)) * 5))
    seen: set[int] = set()

    def handle(session: Session, one: Any) -> None:
        handlers(session, one)
        if one.id % 6 == 0 and one.id not in seen:
            seen.add(one.id)
            raise Retry

    with consumers(pool, job, handle, 3, concurrency=2, poll_interval=600):
        wait_for(lambda: not unfinished(pool, job))
    assert set(handlers.most.values()) == {1}
    for keys in handlers.begun.values():
        assert keys == sorted(keys)
        assert len(set(keys)) == 5


def test_a_rate_spreads_the_beginnings_over_all_consumers(pool: sa.Engine, held: Any) -> None:
    job, handlers = make_job(rates=[Rate(50, every=1, burst=1)], **held), Handlers()
    create(pool, job)
    insert(pool, job, of_customers(*range(20)))
    with consumers(pool, job, handlers, 3, concurrency=2, poll_interval=600):
        wait_for(lambda: not unfinished(pool, job))
    moments = sorted(handlers.moments)
    assert len(moments) == 20
    assert moments[-1] - moments[0] > 19 / 50 - 0.1


def test_a_batch_begins_with_the_jobs_that_the_rate_allows(engine: sa.Engine, held: Any) -> None:
    job = make_job(rates=[Rate(3, every=3600, burst=3)], **held)
    create(engine, job)
    insert(engine, job, of_customers(*range(5)))
    called: list[int] = []

    def handle(session: Session, jobs: Any) -> None:
        called.extend(one.customer_id for one in jobs)

    with Consumer(job, handle, sessionmaker(engine), batch=True, batch_size=5, signals=False):
        wait_for(lambda: unfinished(engine, job) == 2)
    assert sorted(called) == [0, 1, 2]


def test_a_beginning_stays_used_when_the_transaction_is_rolled_back(engine: sa.Engine, held: Any) -> None:
    job = make_job(rates=[Rate(2, every=3600, burst=2)], retry=Constant(0), **held)
    create(engine, job)
    insert(engine, job, of_customers(1))
    called: list[int] = []

    def handle(session: Session, one: Any) -> None:
        called.append(one.customer_id)
        raise Retry

    with Consumer(job, handle, sessionmaker(engine), signals=False, poll_interval=0.05):
        wait_for(lambda: len(called) == 2)
        time.sleep(0.3)
    assert len(called) == 2


def test_an_attempt_counts_though_the_rate_is_used_up(engine: sa.Engine, held: Any) -> None:
    # The first loss of the connection counts no attempt, and the job runs once more by itself.
    job = make_job(rates=[Rate(2, every=3600, burst=2)], max_attempts=1, **held)
    create(engine, job)
    insert(engine, job, of_customers(1))

    def handle(session: Session, one: Any) -> None:
        session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    def failed() -> int:
        with Session(engine) as session:
            return admin.stats(session, job).states.get("failed", 0)

    with Consumer(job, handle, sessionmaker(engine), signals=False):
        wait_for(lambda: failed() == 1)


async def test_async_consumers_obey(shared: Database, engine: sa.Engine, held: Any) -> None:
    job = make_job(
        limits=[Limit(2, per="customer_id")],
        order=Order("document_id", on_failure="continue"),
        rates=[Rate(1000, every=1)],
        **held,
    )
    create(engine, job)
    insert(engine, job, [{"customer_id": number % 3, "document_id": number % 10} for number in range(24)])
    running: Counter[int] = Counter()
    begun: dict[int, list[int]] = defaultdict(list)
    most = 0

    async def handle(session: Any, one: Any) -> None:
        nonlocal most
        running[one.customer_id] += 1
        most = max(most, *running.values())
        begun[one.document_id].append(one.id)
        await session.execute(sa.text("SELECT pg_sleep(0.002)"))
        running[one.customer_id] -= 1

    many = create_async_engine(shared.url("asyncpg"), pool_size=20)
    await AsyncConsumer(job, handle, async_sessionmaker(many), concurrency=8).drain()
    await many.dispose()
    assert unfinished(engine, job) == 0
    assert most <= 2
    assert all(keys == sorted(keys) for keys in begun.values())
