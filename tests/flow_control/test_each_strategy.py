"""Consumers and AsyncConsumers of queues under flow control, under every strategy that has it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, Fair, Limit, Order, QueueConfig, QueueMixin, Rate
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


CONTROLS: dict[str, dict[str, Any]] = {
    "limit": {"limits": [Limit(2, per="customer_id")]},
    "limit of the queue": {"limits": [Limit(2)]},
    "order": {"order": Order("customer_id", on_failure="continue")},
    "turns": {"fair": Fair("customer_id")},
    "rate": {"rates": [Rate(1000, every=1)]},
}


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["update_status", *HELD])
@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
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


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["update_status", *HELD])
@pytest.mark.parametrize("control", [*CONTROLS, "all"])
def test_columns_have_other_names_than_their_attributes(engine: sa.Engine, strategy: str, control: str) -> None:
    config: Any = CONTROLS["limit"] | CONTROLS["order"] | CONTROLS["rate"] if control == "all" else CONTROLS[control]
    columns = {"started_at": "started_at", "priority": "level", **HELD.get(strategy, {}).get("columns", {})}

    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(**{**HELD.get(strategy, {}), **config, "columns": columns})
        id: Mapped[int] = mapped_column("the id", primary_key=True)
        level: Mapped[int] = mapped_column("its level", default=0)
        customer_id: Mapped[int | None] = mapped_column("the customer")

    begun = list[int]()
    create(engine, Job)
    insert(engine, Job, of_customers(1, 1, 1, 2, 3))
    Consumer(Job, lambda _, one: begun.append(one.customer_id), sessionmaker(engine)).drain()
    assert sorted(begun) == [1, 1, 1, 2, 3]
