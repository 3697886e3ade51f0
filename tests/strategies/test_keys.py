"""Keys of any type: those of a batch are one parameter, and the triggers find a message by its key."""

import asyncio
import random
import string
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, cancel, claim, complete, extend, release, requeue
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.mapping.mixin import spec_of
from tests.models import create, execute, insert, make_job, read, sent_statements, shared
from tests.programs import wait_until

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
def make_model(make_type: Callable[[], Any], kind: str = "update_status", **config: Any) -> Any:
    return make_job(kind, {"id": mapped_column(make_type(), primary_key=True, autoincrement=False)}, **config)


@pytest.fixture
def numbered(engine: sa.Engine) -> Any:
    return create(engine, make_model(sa.Integer))


def settle_some(session: Session, model: Any, keys: Sequence[Any]) -> list[Any]:
    """Claim all, complete two and release one; return what the statements returned."""
    session.add_all([model(id=key) for key in keys])
    session.commit()
    first, *others = sorted(session.scalars(claim(model, 10)), key=lambda job: keys.index(job.id))
    returned = [*session.scalars(complete(others)), *session.scalars(release(first))]
    session.commit()
    return returned


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_runs_end_by_keys_of_any_type(engine: sa.Engine, driver: str, kind: str) -> None:
    type_, keys = KEYS[kind]
    model = create(engine, make_model(type_))
    url = engine.url.set(drivername=f"postgresql+{driver}")

    async def settle_in_async_code() -> list[Any]:
        async with AsyncSession(create_async_engine(url, poolclass=sa.NullPool)) as session:
            return await session.run_sync(settle_some, model, keys)

    if driver == "asyncpg":
        returned = asyncio.run(settle_in_async_code())
    else:
        with Session(sa.create_engine(url, poolclass=sa.NullPool)) as session:
            returned = settle_some(session, model, keys)
    assert sorted(returned, key=keys.index) == [*keys]
    assert read(engine, model) == {keys[0]: "pending", keys[1]: "completed", keys[2]: "completed"}


@pytest.mark.parametrize("given", ["2", 2])
def test_a_number_can_be_given_as_text(engine: sa.Engine, numbered: Any, given: Any) -> None:
    insert(engine, numbered, [{"id": number} for number in range(1, 4)])
    assert found_by(engine, numbered, given) == [2]


def found_by(engine: sa.Engine, model: Any, key: Any) -> list[Any]:
    spec = spec_of(model)
    with Session(engine) as session:
        return list(session.scalars(sa.select(model.id).where(spec.key_in(spec.keys, [(key,)]))))


@pytest.mark.parametrize("given", ["1,2", "1}", "", None])
def test_a_value_that_is_no_number_is_refused(engine: sa.Engine, numbered: Any, given: Any) -> None:
    with pytest.raises(StatementError):
        found_by(engine, numbered, given)


@pytest.mark.parametrize("given", ["00000000-0000-0000-0000-000000000001", uuid.UUID(int=1)])
def test_a_uuid_can_be_given_as_text(engine: sa.Engine, given: Any) -> None:
    model = create(engine, make_model(sa.Uuid))
    insert(engine, model, [{"id": uuid.UUID(int=number)} for number in range(3)])
    assert found_by(engine, model, given) == [uuid.UUID(int=1)]


@pytest.mark.parametrize("kind", KEYS)
def test_the_keys_are_a_constant_for_the_planner(engine: sa.Engine, kind: str) -> None:
    """It then looks up each row of a sequential scan in a hash table, and does not compare it with each key."""
    type_, keys = KEYS[kind]
    model = create(engine, make_model(type_, "batch_select"))
    insert(engine, model, [{"id": key} for key in keys])
    with Session(engine) as session:
        jobs = session.scalars(claim(model, 10)).all()
        with sent_statements(engine) as sent:
            session.execute(extend(jobs))
        statement, parameters = sent[-1]
        cursor = session.connection().connection.cursor()
        cursor.execute(f"EXPLAIN {statement}", parameters)
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "ANY ('{" in plan


@pytest.mark.parametrize("strategy", ["update_status", "batch_select", "delete_returning", "rows_are_messages"])
def test_a_key_may_be_as_long_as_an_index_allows(engine: sa.Engine, strategy: str) -> None:
    """A running job with it is cancelled, another one fails: the side tables have a digest of the key."""
    long = "".join(random.Random(1).choices(string.ascii_letters + string.digits, k=2650))
    keys = [f"{long}{end}" for end in ("cancelled", "fails")]
    model = make_model(sa.Text, strategy, name="a queue with a long name", attempt_history=60, max_attempts=1)
    model.metadata.create_all(engine)
    insert(engine, model, [{"id": key} for key in keys])
    started, cancelled = threading.Semaphore(0), threading.Event()
    ended: list[tuple[str, Any]] = []

    def work(session: Session, job: Any) -> None:
        started.release()
        assert cancelled.wait(30)
        raise ValueError("refused")

    consumer: Consumer[Any] = Consumer(model, work, sessionmaker(engine), concurrency=2, batch_size=1)
    consumer.on("cancelled", lambda done: ended.append((done.name, done.key)))
    consumer.on("failed", lambda done: ended.append((done.name, done.key)))
    with consumer:
        assert started.acquire(timeout=30)
        assert started.acquire(timeout=30)
        execute(engine, cancel(sa.select(model).where(model.id == keys[0])))
        wait_until(lambda: any(run.cancelled for run in consumer._context.in_flight.busy()))
        cancelled.set()
        wait_until(lambda: len(ended) == 2)
    assert sorted(ended) == [("cancelled", (keys[0],)), ("failed", (keys[1],))]
    with Session(engine) as session:
        found = [QueueAdmin(session, model).job((key,)) for key in keys]
        states = [(info[0].key, info[0].state) for info in found if info]
        assert states == [(keys[0], "cancelled"), (keys[1], "failed")]
        assert [attempt.outcome for attempt in QueueAdmin(session, model).attempts((keys[1],))] == ["failed"]
        assert len(session.scalars(requeue(model)).all()) == 2


# -- the triggers find a message by its key, and by its index once the table has grown ---------------------------------

MANY = 30_000


class Words(sa.types.TypeDecorator[Any]):
    impl = postgresql.ARRAY(sa.Text())
    cache_ok = True


MESSAGE_KEYS: dict[str, tuple[Any, Sequence[Any]]] = {
    "enum": (lambda: sa.Enum("red", "blue", "green", name="colour"), ["red", "blue", "green"]),
    "domain": (sa.Text, ["a", "b", "c"]),
    "uuid": (sa.Uuid, [uuid.UUID(int=number) for number in range(3)]),
    "array": (lambda: postgresql.ARRAY(sa.Integer()), [[1], [1, 2], [3]]),
    "decorated array": (Words, [["a"], ["a", "b"], ["c"]]),
}


@pytest.mark.parametrize("kind", MESSAGE_KEYS)
def test_a_message_is_found_by_a_key_of_any_type(engine: sa.Engine, kind: str) -> None:
    make_type, (first, second, third) = MESSAGE_KEYS[kind]
    model = create(engine, make_model(make_type, "delete_returning", notify=False))
    job, messages = model.__table__, sa.table("sqlaqueue_message_job", sa.column("id", model.__table__.c.id.type))
    with engine.connect() as connection:
        if kind == "domain":
            connection.exec_driver_sql("CREATE DOMAIN code AS text")
            for table in (job, messages):
                connection.exec_driver_sql(f"ALTER TABLE {table.name} ALTER id TYPE code")
        connection.execute(sa.insert(job), [{"id": first}, {"id": second}, {"id": third}])
        connection.execute(sa.delete(job).where(job.c.id == first))
        connection.execute(sa.update(job).where(job.c.id == second).values(status="completed"))
        assert connection.scalars(sa.select(messages.c.id)).all() == [third]


@pytest.mark.parametrize("composite", [False, True], ids=["one column", "two columns"])
@pytest.mark.parametrize("change", ["DELETE FROM job", "UPDATE job SET status = 'processing'"])
def test_a_plan_for_a_small_table_does_not_read_a_large_one(engine: sa.Engine, change: str, *, composite: bool) -> None:
    """A connection keeps the plan of its first call, for which to read one page looks cheaper than an index.

    Compared one by one, these rows would take a hundred times what they may take.
    """
    tenant = {"tenant": mapped_column(sa.Integer, primary_key=True, sort_order=-1)} if composite else {}
    make_job("delete_returning", tenant, notify=False).metadata.create_all(engine)
    columns, values = ("tenant, id", "1, i") if composite else ("id", "i")

    def filled(first: int, last: int) -> str:
        return f"INSERT INTO job ({columns}) SELECT {values} FROM generate_series({first}, {last}) AS i"

    tuples_read = sa.text(
        """SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class
           WHERE relname IN ('sqlaqueue_message_job', 'sqlaqueue_message_job_pkey')"""
    )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        run = connection.exec_driver_sql
        run("ALTER TABLE sqlaqueue_message_job SET (autovacuum_enabled = off)")
        run(filled(1, 2))
        run("VACUUM ANALYZE job")
        run("VACUUM ANALYZE sqlaqueue_message_job")
        run(f"{change} WHERE id = 1")
        run(filled(3, MANY))
        run("SET statement_timeout = '5s'")
        run("BEGIN")
        run(f"{change} WHERE id BETWEEN 3 AND {MANY // 2}")
        # Keys of several columns are joined, by a plan for just so many.
        assert connection.scalar(tuples_read) <= (MANY * 2 if composite else MANY // 2)
        run("COMMIT")
        assert connection.scalar(sa.text("SELECT count(*) FROM sqlaqueue_message_job")) == MANY // 2 + 1
