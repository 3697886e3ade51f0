"""A Consumer that serves the values of a column in turn; without Citus, its statements are limited in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, Distribution, Fair, Limit, QueueConfig, QueueMixin, Unique, claim
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.pace import ShardTurns
from sqlaqueue.exc import ConfigurationError
from tests.programs import wait_until
from tests.servers import Database
from tests.shared_database import engine as engine  # noqa: PLC0414 - a fixture
from tests.shared_database import shared as shared  # noqa: PLC0414 - a fixture

TENANTS = 3
SHARDS = Distribution("tenant", range(TENANTS))


class Base(DeclarativeBase):
    pass


class Task(QueueMixin, Base):
    __tablename__ = "task"
    __queue__ = QueueConfig(strategy="update_status", notify=False)
    tenant: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


def nothing(session: Session, job: Any) -> None:
    """Handle a job by doing nothing."""


@pytest.fixture
def sessions(engine: sa.Engine) -> Iterator[sessionmaker[Session]]:
    Base.metadata.create_all(engine)
    return sessionmaker(engine)


def enqueue(sessions: sessionmaker[Session], **numbers: int) -> None:
    """Add jobs of tenants: ``t0=5`` adds five of the tenant 0."""
    with sessions() as session:
        session.add_all(Task(tenant=int(name[1:]), id=each) for name, n in numbers.items() for each in range(n))
        session.commit()


def test_each_value_is_served_after_at_most_one_claim_of_each_other(sessions: sessionmaker[Session]) -> None:
    enqueue(sessions, t0=10, t1=1, t2=1)
    ran, polled = list[int](), list[int]()
    consumer = Consumer(Task, lambda session, job: ran.append(job.tenant), sessions, batch_size=2, distribution=SHARDS)
    consumer.on("polled", lambda event: polled.append(event.jobs))
    assert consumer.drain() == 12
    assert max(ran.index(1), ran.index(2)) < 2 + TENANTS - 1
    assert max(polled) <= 2, "a claim is of one value"


async def test_the_values_of_an_async_consumer(sessions: sessionmaker[Session], shared: Database) -> None:
    enqueue(sessions, t0=4, t1=1, t2=1)
    ran: list[int] = []

    async def run(session: AsyncSession, job: Any) -> None:
        ran.append(job.tenant)

    engine = create_async_engine(shared.url("asyncpg"))
    consumer = AsyncConsumer(Task, run, async_sessionmaker(engine), batch_size=2, distribution=SHARDS)
    assert await consumer.drain() == 6
    assert max(ran.index(1), ran.index(2)) < 2 + TENANTS - 1
    await engine.dispose()


def test_values_that_are_not_served_are_left_alone(sessions: sessionmaker[Session]) -> None:
    enqueue(sessions, t0=2, t1=2, t2=2)
    assert Consumer(Task, nothing, sessions, distribution=Distribution("tenant", {0, 2})).drain() == 4
    with sessions() as session:
        assert set(session.scalars(sa.select(Task.tenant).where(Task.status == "pending"))) == {1}


def test_values_of_a_function_are_asked_for_at_each_claim(sessions: sessionmaker[Session]) -> None:
    enqueue(sessions, t0=1, t1=1)
    values: list[int] = []
    consumer = Consumer(Task, nothing, sessions, distribution=Distribution("tenant", lambda: values))
    assert consumer.drain() == 0
    values.append(1)
    assert consumer.drain() == 1


def test_rescues_are_limited_to_the_values(sessions: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.1)
    enqueue(sessions, t0=1, t1=1)
    with sessions() as session:
        assert len(session.scalars(claim(Task, 2)).all()) == 2
        session.execute(sa.update(Task).values(lease_expires_at=sa.func.now()))
        session.commit()
    with (
        Consumer(Task, nothing, sessions, poll_interval=0.05, distribution=Distribution("tenant", [1])),
        sessions() as s,
    ):
        wait_until(lambda: s.scalar(sa.select(Task.status).where(Task.tenant == 1)) == "completed")
        assert s.scalar(sa.select(Task.status).where(Task.tenant == 0)) == "processing"


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
        ("tenant", "give a sqlaqueue.Distribution"),
        (Distribution("tennant", [1]), "must be one of several that make the primary key of Task, which is tenant, id"),
        (Distribution("status", [1]), "must be one of several that make the primary key"),
    ],
)
def test_wrong_distributions(distribution: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Consumer(Task, nothing, sessionmaker(), distribution=distribution)


@pytest.mark.parametrize("values", [[], "abc", 5])
def test_wrong_values(values: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Distribution\('tenant'"):
        Distribution("tenant", values)


@pytest.mark.parametrize(
    ("option", "config"),
    [
        ("strategy='batch_select'", {"strategy": "batch_select"}),
        ("unique", {"unique": Unique("tenant")}),
        ("limits and fair", {"limits": [Limit(1)], "fair": Fair("tenant")}),
        ("retention", {"retention": {"completed": 3600}}),
        ("attempt_history", {"attempt_history": 3600}),
    ],
)
def test_options_that_need_several_shards(option: str, config: dict[str, Any]) -> None:
    class Other(DeclarativeBase):
        pass

    class Job(QueueMixin, Other):
        __tablename__ = "job"
        __queue__ = QueueConfig(**{"strategy": "update_status", "notify": False, **config})
        tenant: Mapped[int] = mapped_column(primary_key=True)
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(ConfigurationError, match=f"Job has {option} in its QueueConfig"):
        Consumer(Job, nothing, sessionmaker(), distribution=SHARDS)
