"""Sessions that read from a real standby: what claims and other verbs do there, and Consumers with such sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlaqueue as q
from sqlaqueue import AsyncConsumer, Consumer, admin
from tests.conftest import SERVERS
from tests.consumer.bench import Bench
from tests.servers import Pair, Server, pair_of

pytestmark = pytest.mark.once

NOTHING_TO_DO = {
    "update_status": {"reconcile"},
    "batch_select": {"reconcile", "rescue"},
    "delete_returning": {"rescue"},
}
"""The verbs that read nothing and write nothing under a strategy."""


@pytest.fixture(scope="module")
def pair(pytestconfig: pytest.Config, postgres_version: int) -> Iterator[Pair]:
    with pytestconfig.stash[SERVERS].own(postgres_version) as primary, pair_of(primary) as pair:
        yield pair


@pytest.fixture(params=["update_status", pytest.param("batch_select", marks=pytest.mark.thorough), "delete_returning"])
def bench(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A queue on the primary, in a database of its own, which the standby has too."""
    with pair.primary.database() as database:
        bench = Bench(database, request.param)
        bench.create()
        pair.wait_for_standby()
        yield bench


@pytest.fixture
def stale(pair: Pair) -> Iterator[None]:
    """Let the standby show nothing of what the primary does from now on."""
    with psycopg.connect(pair.standby.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_wal_replay_pause()")
        yield
        connection.execute("SELECT pg_wal_replay_resume()")


def url_on(server: Server, bench: Bench, driver: Any = "psycopg") -> str:
    return server.url(driver, bench.database.name)


def routing(primary: sa.Engine, replica: sa.Engine, *, by_type: bool = False) -> type[Session]:
    """Return a session class that reads from a replica.

    :param by_type: only an UPDATE or a DELETE is a write, as in SQLAlchemy's documentation.
    """

    class RoutingSession(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Any:
            writes = isinstance(clause, sa.Update | sa.Delete) if by_type else q.is_write(clause)
            return primary if self._flushing or writes else replica

    return RoutingSession


@pytest.fixture
def engines(pair: Pair, bench: Bench) -> Iterator[tuple[sa.Engine, sa.Engine]]:
    made = [sa.create_engine(url_on(server, bench), pool_size=10) for server in (pair.primary, pair.standby)]
    yield made[0], made[1]
    for engine in made:
        engine.dispose()


def verbs_without_run(model: Any) -> dict[str, Any]:
    """Return the verbs that take a class or a select()."""
    pending = sa.select(model)
    return {
        "cancel": q.cancel(pending.where(model.id == -1)),
        "requeue": q.requeue(pending.where(model.id == -1)),
        "purge": q.purge(model, states=("completed",), older_than=timedelta(days=1)),
        "rescue": q.rescue(model),
        "reconcile": q.reconcile(model),
        "pause": q.pause(model),
        "resume": q.resume(model),
    }


VERBS_OF_RUN = {
    "extend": lambda job: q.extend(job, lease=60),
    "release": q.release,
    "retry": lambda job: q.retry(job, error="again"),
    "fail": lambda job: q.fail(job, error="no"),
    "complete": q.complete,
}


def test_every_verb_is_a_write(bench: Bench, engines: tuple[sa.Engine, sa.Engine]) -> None:
    """With is_write() in get_bind(), each of them reaches the primary, and what reads does not."""
    session_class, model = routing(*engines), bench.Job
    for name, verb in verbs_without_run(model).items():
        assert q.is_write(verb), name
        with session_class() as session:
            session.execute(verb)
            session.commit()
    for name, make in VERBS_OF_RUN.items():
        [key] = bench.enqueue(1, priority=-1)
        with session_class(expire_on_commit=False) as session:
            job = session.scalars(q.claim(model, 1)).one()
            verb = make(job)
            assert q.is_write(verb), name
            assert session.scalars(verb).all() == [key], name
            session.commit()
        bench.execute("DELETE FROM job")
    for read in (sa.select(model), q.paused(model), q.consumers(model), None):
        assert not q.is_write(read)
    with session_class() as session:
        assert session.scalar(sa.text("SELECT pg_is_in_recovery()")) is True


def test_functions_need_no_hint(bench: Bench, engines: tuple[sa.Engine, sa.Engine], stale: None) -> None:
    """They ask for the engine of an UPDATE, whatever get_bind() knows, and read nothing from the replica."""
    model = bench.Job
    with routing(*engines, by_type=True)(expire_on_commit=False) as session:
        assert q.copy_in(session, model, [{"payload": "a"}, {"payload": "b"}]) == 2
        session.commit()
        admin.pause(session, model)
        assert bench.execute(q.paused(model))
        # What only reads goes where the session reads.
        assert not admin.paused(session, model)
        admin.resume(session, model)
        assert len(admin.cancel(session, sa.select(model)).cancelled) == 2
        assert bench.states() == {"cancelled": 2}
        everything = admin.JobFilter(states=("cancelled",))
        assert admin.requeue(session, model, everything) == 2
        assert bench.states() == {"pending": 2}
        assert len(admin.cancel(session, sa.select(model)).cancelled) == 2
        assert admin.purge(session, model, everything) == 2
        admin.rescue(session, model)
        admin.reconcile(session, model)
    assert bench.states() == {}


def test_unique_jobs_are_enqueued_beside_a_stale_replica(
    pair: Pair, bench: Bench, engines: tuple[sa.Engine, sa.Engine], stale: None
) -> None:
    """A twin that the replica does not have yet is found."""

    class Base(DeclarativeBase):
        pass

    class Reminder(q.QueueMixin, Base):
        __tablename__ = "reminder"
        __queue__ = q.QueueConfig(strategy=bench.strategy, unique=q.Unique("customer"))
        id: Mapped[int] = mapped_column(primary_key=True)
        customer: Mapped[str]

    Base.metadata.create_all(engines[0])
    with routing(*engines, by_type=True)(expire_on_commit=False) as session:
        [first] = q.enqueue(session, [Reminder(customer="ada")])
        session.commit()
        [second] = q.enqueue(session, [Reminder(customer="ada")])
        session.commit()
    assert (first.created, second.created) == (True, False)
    assert first.job.id == second.job.id


def test_an_error_names_the_fix(pair: Pair, bench: Bench, engines: tuple[sa.Engine, sa.Engine]) -> None:
    bench.enqueue(1)
    pair.wait_for_standby()
    with routing(*engines, by_type=True)() as session:
        verbs = {**verbs_without_run(bench.Job), "claim": q.claim(bench.Job, 1)}
        for name, verb in verbs.items():
            if isinstance(verb, sa.UpdateBase) or name in NOTHING_TO_DO[bench.strategy]:
                continue
            with pytest.raises(sa.exc.InternalError, match="read-only") as refused:
                session.execute(verb)
            assert "sqlaqueue.is_write(clause)" in "\n".join(refused.value.__notes__), name
            session.rollback()
        # The error of another statement is none of the library's.
        with pytest.raises(sa.exc.InternalError, match="read-only") as other:
            session.execute(sa.text("DELETE FROM job"))
        assert not hasattr(other.value, "__notes__")
    assert bench.states() == {"pending": 1}


async def test_an_error_names_the_fix_in_async_code(pair: Pair, bench: Bench) -> None:
    engine = create_async_engine(url_on(pair.standby, bench, "asyncpg"))
    async with AsyncSession(engine) as session:
        with pytest.raises(sa.exc.DBAPIError, match="read-only") as refused:
            await session.execute(q.claim(bench.Job, 1))
        assert "sqlaqueue.is_write(clause)" in "\n".join(refused.value.__notes__)
    await engine.dispose()


def test_consumers_do_not_depend_on_a_stale_replica(
    bench: Bench, engines: tuple[sa.Engine, sa.Engine], stale: None
) -> None:
    """The jobs are unknown to the replica, from which handlers read; runs are claimed, refreshed and settled."""
    keys, seen, in_recovery = bench.enqueue(4, payload="here"), [], set()

    def handler(session: Session, job: Any) -> None:
        seen.append((job.id, job.payload, job.attempts))
        in_recovery.add(session.scalar(sa.text("SELECT pg_is_in_recovery()")))
        session.add(bench.Effect(job=job.id))
        if job.id == keys[0] and job.attempts == 1:
            raise RuntimeError("once more")

    factory = sessionmaker(class_=routing(*engines, by_type=True))
    consumer = Consumer(bench.Job, handler, factory, concurrency=2, retry=lambda *_: 0)
    assert consumer.drain() >= 4
    assert sorted(seen) == sorted([(key, "here", 1) for key in keys] + [(keys[0], "here", 2)])
    assert in_recovery == {True}
    assert bench.states() == {"completed": 4}
    assert bench.effects() == dict.fromkeys(keys, 1)


def test_async_consumers_do_not_either(pair: Pair, bench: Bench, stale: None) -> None:
    keys = bench.enqueue(3, payload="here")

    async def handler(session: AsyncSession, job: Any) -> None:
        assert job.payload == "here"
        assert await session.scalar(sa.text("SELECT pg_is_in_recovery()"))
        session.add(bench.Effect(job=job.id))

    async def drain() -> None:
        made = [create_async_engine(url_on(server, bench, "asyncpg")) for server in (pair.primary, pair.standby)]
        session_class = routing(made[0].sync_engine, made[1].sync_engine, by_type=True)
        factory = async_sessionmaker(sync_session_class=session_class)
        assert await AsyncConsumer(bench.Job, handler, factory).drain() == 3
        for engine in made:
            await engine.dispose()

    asyncio.run(drain())
    assert bench.states() == {"completed": 3}
    assert bench.effects() == dict.fromkeys(keys, 1)
