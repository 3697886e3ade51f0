"""Consumers and AsyncConsumers of queues under flow control, under every strategy that has it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, Fair, Limit, Order, Rate
from tests.flow_control.models import HELD, create, insert, make_job, of_customers
from tests.flow_control.running import unfinished
from tests.servers import Database


@pytest.mark.parametrize("kind", ["update_status", *HELD])
async def test_async_consumers_obey(shared: Database, engine: sa.Engine, kind: str) -> None:
    job = make_job(
        limits=[Limit(2, per="customer_id")],
        order=Order("document_id", on_failure="continue"),
        rates=[Rate(1000, every=1)],
        **HELD.get(kind, {}),
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


@pytest.mark.parametrize("strategy", ["update_status", *HELD])
@pytest.mark.parametrize(
    "control",
    [
        {"limits": [Limit(2, per="customer_id")]},
        {"limits": [Limit(2)]},
        {"order": Order("customer_id", on_failure="continue")},
        {"fair": Fair("customer_id")},
        {"rates": [Rate(1000, every=1)]},
    ],
    ids=["limit", "limit of the queue", "order", "turns", "rate"],
)
def test_a_consumer_needs_no_other_kind_of_control(engine: sa.Engine, strategy: str, control: Any) -> None:
    """It claims quarantined jobs as well, by a statement of its own."""
    job, begun = make_job(**control, **HELD.get(strategy, {})), list[int]()
    create(engine, job)
    insert(engine, job, of_customers(1, 1, 1, 2, 3))

    def handle(_: Session, one: Any) -> None:
        begun.append(one.customer_id)

    Consumer(job, handle, sessionmaker(engine)).drain()
    assert sorted(begun) == [1, 1, 1, 2, 3]
    if "fair" in control:
        assert sorted(begun[:3]) == [1, 2, 3]
