"""The keys of a batch are one parameter, whatever their type."""

from __future__ import annotations

import asyncio
import random
import string
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, QueueConfig, QueueMixin, admin, cancel, claim, complete, extend, release, requeue
from sqlaqueue.mapping.mixin import spec_of
from tests.models import shared
from tests.programs import wait_until
from tests.sent_statements import sent_statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.servers import Database

DRIVERS = ("psycopg", "asyncpg", "psycopg2")


class Doubled(sa.types.TypeDecorator[int]):
    """A number that is another one in the database."""

    impl = sa.Integer
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else 2 * value

    def process_result_value(self, value: int | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else value // 2


KEYS: dict[str, tuple[Any, Sequence[Any]]] = {
    "smallint": (sa.SmallInteger, [-3, 0, 7]),
    "bigint": (sa.BigInteger, [-(2**40), 1, 2**60]),
    "uuid": (sa.Uuid, [uuid.UUID(int=number) for number in (0, 5, 2**127)]),
    "uuid as text": (lambda: sa.Uuid(as_uuid=False), [str(uuid.UUID(int=number)) for number in (0, 5, 2**127)]),
    "text": (sa.Text, ["a,b", '{"c"}', "NULL"]),
    "decorated": (Doubled, [1, 2, 4]),
}


@shared
def make_model(type_: Any, strategy: str = "update_status", **options: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    if strategy == "rows_are_messages":
        strategy, options["rows_are_messages"] = "delete_returning", True
    config = QueueConfig(strategy=strategy, **options)
    key = mapped_column(type_(), primary_key=True, autoincrement=False)
    return type("Job", (QueueMixin, Base), {"__tablename__": "job", "__queue__": config, "key": key})


def settle_some(session: Session, model: Any, keys: Sequence[Any]) -> list[Any]:
    """Claim all, complete two and release one; return what the statements returned."""
    session.add_all([model(key=key) for key in keys])
    session.commit()
    first, *others = sorted(session.scalars(claim(model, 10)), key=lambda job: keys.index(job.key))
    returned = [*session.scalars(complete(others)), *session.scalars(release(first))]
    session.commit()
    return returned


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_runs_end_by_keys_of_any_type(database: Database, driver: str, kind: str) -> None:
    type_, keys = KEYS[kind]
    model = make_model(type_)
    engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
    model.metadata.create_all(engine)

    async def settle_in_async_code() -> list[Any]:
        async_engine = create_async_engine(database.url(driver), poolclass=sa.NullPool)
        async with AsyncSession(async_engine) as session:
            return await session.run_sync(settle_some, model, keys)

    if driver == "asyncpg":
        returned = asyncio.run(settle_in_async_code())
    else:
        with Session(sa.create_engine(database.url(driver), poolclass=sa.NullPool)) as session:
            returned = settle_some(session, model, keys)
    assert sorted(returned, key=keys.index) == [*keys]
    with Session(engine) as session:
        states = {job.key: job.status for job in session.scalars(sa.select(model))}
    assert states == {keys[0]: "pending", keys[1]: "completed", keys[2]: "completed"}


@pytest.mark.parametrize("given", ["2", 2])
def test_a_number_can_be_given_as_text(engine: sa.Engine, given: Any) -> None:
    model = make_model(sa.Integer)
    model.metadata.create_all(engine)
    spec = spec_of(model)
    with Session(engine) as session:
        session.add_all([model(key=number) for number in range(1, 4)])
        session.flush()
        assert session.scalars(sa.select(model.key).where(spec.key_in(spec.keys, [(given,)]))).all() == [2]


@pytest.mark.parametrize("given", ["1,2", "1}", "", None])
def test_a_value_that_is_no_number_matches_no_job(engine: sa.Engine, given: Any) -> None:
    """It matches no job at all, and raises no error."""
    model = make_model(sa.Integer)
    model.metadata.create_all(engine)
    spec = spec_of(model)
    with Session(engine) as session, pytest.raises(StatementError):
        session.scalars(sa.select(model.key).where(spec.key_in(spec.keys, [(given,)])))


@pytest.mark.parametrize("given", ["00000000-0000-0000-0000-000000000001", uuid.UUID(int=1)])
def test_a_uuid_can_be_given_as_text(engine: sa.Engine, given: Any) -> None:
    model = make_model(sa.Uuid)
    model.metadata.create_all(engine)
    spec = spec_of(model)
    with Session(engine) as session:
        session.add_all([model(key=uuid.UUID(int=number)) for number in range(3)])
        session.flush()
        found = session.scalars(sa.select(model.key).where(spec.key_in(spec.keys, [(given,)]))).all()
        assert found == [uuid.UUID(int=1)]


@pytest.mark.parametrize("kind", KEYS)
def test_the_keys_are_a_constant_for_the_planner(database: Database, kind: str) -> None:
    """It then looks up each row of a sequential scan in a hash table, and does not compare it with each key."""
    type_, keys = KEYS[kind]
    model = make_model(type_, "batch_select")
    engine = sa.create_engine(database.url())
    try:
        model.metadata.create_all(engine)
        with Session(engine) as session:
            session.add_all([model(key=key) for key in keys])
            session.flush()
            jobs = session.scalars(claim(model, 10)).all()
            with sent_statements(engine) as sent:
                session.execute(extend(jobs))
            statement, parameters = sent[-1]
            cursor = session.connection().connection.cursor()
            cursor.execute(f"EXPLAIN {statement}", parameters)
            plan = "\n".join(line for (line,) in cursor.fetchall())
    finally:
        engine.dispose()
    assert "ANY ('{" in plan


@pytest.mark.parametrize("strategy", ["update_status", "batch_select", "delete_returning", "rows_are_messages"])
def test_a_key_may_be_as_long_as_an_index_allows(database: Database, strategy: str) -> None:
    """A running job with it is cancelled, another one fails: the side tables have a digest of the key."""
    long = "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=2650))
    keys = [f"{long}{end}" for end in ("cancelled", "fails")]
    model = make_model(sa.Text, strategy, name="a queue with a long name", attempt_history=60, max_attempts=1)
    engine = sa.create_engine(database.url())
    sessions = sessionmaker(engine)
    started, cancelled = threading.Semaphore(0), threading.Event()

    def work(session: Session, job: Any) -> None:
        started.release()
        assert cancelled.wait(30)
        raise ValueError("refused")

    ended: list[tuple[str, Any]] = []
    try:
        model.metadata.create_all(engine)
        with sessions() as session:
            session.add_all([model(key=key) for key in keys])
            session.commit()
        consumer: Consumer[Any] = Consumer(model, work, sessions, concurrency=2, batch_size=1)
        for event in ("cancelled", "failed"):
            consumer.on(event, lambda done: ended.append((done.name, done.key)))
        with consumer:
            assert started.acquire(timeout=30)
            assert started.acquire(timeout=30)
            with sessions() as session:
                session.execute(cancel(sa.select(model).where(model.key == keys[0])))
                session.commit()
            wait_until(lambda: any(run.cancelled for run in consumer._context.in_flight.busy()))
            cancelled.set()
            wait_until(lambda: len(ended) == 2)
        assert sorted(ended) == [("cancelled", (keys[0],)), ("failed", (keys[1],))]
        with sessions() as session:
            found = [admin.job(session, model, (key,)) for key in keys]
            assert [(info[0].key, info[0].state) for info in found if info] == [
                ((keys[0],), "cancelled"),
                ((keys[1],), "failed"),
            ]
            assert [attempt.outcome for attempt in admin.attempts(session, model, (keys[1],))] == ["failed"]
            assert len(session.scalars(requeue(model)).all()) == 2
    finally:
        engine.dispose()
