"""Unusual sessions and factories: they work, or are refused before any job runs, with an error that names the fix."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import AssertionPool, NullPool, SingletonThreadPool, StaticPool

from sqlaqueue import AsyncConsumer, Consumer, claim, wait
from sqlaqueue.exc import ConfigurationError
from tests.consumer.bench import Bench, Server, nothing
from tests.consumer.models import for_async, for_sync
from tests.programs import wait_until

READ_ONLY = "default_transaction_read_only"


def replica_of(bench: Bench) -> sa.Engine:
    """Return an engine with read-only transactions, as of a replica."""
    if bench.api == "sync":
        return sa.create_engine(
            bench.database.url(), poolclass=NullPool, connect_args={"options": f"-c {READ_ONLY}=on"}
        )
    given: Any = {"server_settings": {READ_ONLY: "on"}}
    made: AsyncEngine = create_async_engine(bench.database.url("asyncpg"), poolclass=NullPool, connect_args=given)
    return made.sync_engine


def routed(bench: Bench, handler: Any = nothing, *, writes: Any = (sa.Update, sa.Delete), **options: Any) -> Server:
    """Return a Consumer with sessions that write to one engine and read from another, as in SQLAlchemy's recipe."""
    replica = replica_of(bench)

    class RoutingSession(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None, **_: Any) -> Any:
            if self._flushing or isinstance(clause, writes):
                return server.sync_engine
            return replica

    server = bench.consumer(handler, session={"class_": RoutingSession}, **options)
    return server


def test_a_session_that_reads_from_a_replica(bench: Bench) -> None:
    """Claims, checks, completions and releases use the primary; a handler may read from the replica."""
    keys = bench.enqueue(6)
    seen: set[str] = set()

    async def work(io: Any, job: Any) -> None:
        seen.add(await io.scalar(sa.select(sa.func.current_setting("transaction_read_only"))))
        io.add(bench.Effect(job=job.id))
        if job.id == keys[0]:
            raise ValueError

    server = routed(bench, work, retry=lambda *_: None, engine={"pool_size": 3}, lease=1)
    assert server.drain() == 6
    assert bench.states() == {"completed": 5, "failed": 1}
    assert bench.effects() == dict.fromkeys(keys[1:], 1)
    assert seen == {"on"}
    bench.assert_tidy()


def test_jobs_of_a_dead_worker_with_a_replica(leased: Bench, frequent_rescues: None) -> None:
    """A rescue uses the primary as well."""
    [key] = leased.enqueue(1)
    with leased.sessions() as session:
        assert session.scalars(claim(leased.Job, 1)).one().id == key
        session.commit()
    leased.execute("UPDATE job SET lease_expires_at = now() - interval '1 s'")
    server = routed(leased)
    handled = threading.Event()
    server.consumer.on("completed", lambda _: handled.set())
    with server.running():
        assert handled.wait(20)
    assert "read-only" not in str(server.error)


def test_writes_that_are_routed_to_a_replica_are_refused(bench: Bench) -> None:
    bench.enqueue(1)
    server = routed(bench, writes=())
    with pytest.raises(ConfigurationError, match=r"RoutingSession.get_bind\(\) sends the writes of Job to .*read-only"):
        server.drain()
    assert bench.states() == {"pending": 1}


@pytest.mark.once
def test_waiting_in_a_session_that_reads_from_a_replica(supply: Any) -> None:
    """Announcements need the primary, and the rows of a replica may be old."""
    bench = supply.take("update_status", "sync")
    [key] = bench.enqueue(1)
    server = routed(bench)
    with server.running():
        assert wait(server.session, (bench.Job, key), timeout=20).state == "completed"


def test_sessions_without_autobegin(bench: Bench) -> None:
    """A handler may begin a transaction or leave it to autobegin."""
    bench.enqueue(3)

    async def work(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id))

    assert bench.consumer(work, session={"autobegin": False}).drain() == 3
    assert set(bench.effects().values()) == {1}
    bench.assert_tidy()


@pytest.mark.once
@pytest.mark.parametrize("poolclass", [StaticPool, SingletonThreadPool, AssertionPool])
def test_a_pool_that_shares_a_connection_is_refused(supply: Any, poolclass: Any) -> None:
    bench = supply.take("update_status", "sync")
    server = bench.consumer(engine={"poolclass": poolclass})
    with pytest.raises(
        ConfigurationError, match=rf"Consumer\(Job, ...\): the engine's {poolclass.__name__} .*NullPool"
    ):
        server.drain()


@pytest.mark.once
def test_an_engine_that_shares_a_connection_is_refused(supply: Any) -> None:
    """Whichever class its pool has."""
    bench = supply.take("update_status", "sync")
    bench.enqueue(2)
    with bench.engine.connect() as kept:
        driver = kept.connection.driver_connection
        server = bench.consumer(engine={"creator": lambda: driver})
        with pytest.raises(ConfigurationError, match="does not give each session a connection of its own"):
            server.drain()
    assert bench.states() == {"pending": 2}


@pytest.mark.once
def test_sessions_of_one_connection_are_refused(supply: Any) -> None:
    """The transaction of the given connection is not changed."""
    bench = supply.take("update_status", "sync")
    with bench.engine.connect() as connection, connection.begin() as transaction:
        make = sessionmaker(bind=connection, join_transaction_mode="create_savepoint")
        with make.begin() as session:
            session.add(bench.Job())
        with pytest.raises(ConfigurationError, match=r"bound to one connection.*sessionmaker\(engine\).* In a test"):
            Consumer(bench.Job, for_sync(nothing), make).drain()
        assert transaction.is_active
        assert connection.scalar(sa.select(sa.func.count()).select_from(bench.Job)) == 1

    async def refused() -> None:
        engine = create_async_engine(bench.database.url("asyncpg"), poolclass=NullPool)
        async with engine.connect() as held:
            await AsyncConsumer(bench.Job, for_async(nothing), async_sessionmaker(bind=held)).drain()

    with pytest.raises(ConfigurationError, match="bound to one connection"):
        asyncio.run(refused())


@pytest.mark.everywhere
def test_an_engine_with_execution_options(supply: Any) -> None:
    """Its connections refuse listeners in the older versions of SQLAlchemy, and commits are refused all the same."""
    bench = supply.take("batch_select", "sync")
    good, bad = bench.enqueue(2, max_attempts=1)
    engine = sa.create_engine(bench.database.url())

    def work(session: Session, job: Any) -> None:
        session.execute(bench.effect(job.id))
        if job.id == bad:
            session.connection().commit()

    tenant = engine.execution_options(schema_translate_map={"tenant": None})
    Consumer(bench.Job, work, sessionmaker(tenant)).drain()
    engine.dispose()
    assert bench.states() == {"completed": 1, "failed": 1}
    assert bench.effects() == {good: 1}
    assert "HandlerMisuseError" in bench.row(bad).last_error


class _OfThisThread:
    """Raises in threads and tasks other than the one that made it, like a session of a web request."""

    def __init__(self) -> None:
        self._mine = self._here()

    @staticmethod
    def _here() -> Any:
        try:
            return asyncio.current_task()
        except RuntimeError:
            return threading.get_ident()

    def check(self) -> None:
        if self._here() != self._mine:
            msg = "working outside of the application"
            raise RuntimeError(msg)


@pytest.mark.parametrize(("fails", "verb"), [("making", "drain"), ("routing", "run")])
def test_a_factory_that_works_in_one_thread_only_is_refused(bench: Bench, fails: str, verb: str) -> None:
    """Trying again cannot help, so the first error is raised."""
    bench.enqueue(1)
    guards = list[_OfThisThread]()

    class Bound(Session):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            if not guards:
                guards.append(_OfThisThread())
            if fails == "making":
                guards[0].check()
            super().__init__(*arguments, **options)

        def get_bind(self, *arguments: Any, **options: Any) -> Any:
            guards[0].check()
            return super().get_bind(*arguments, **options)

    server = bench.consumer(session={"class_": Bound})
    with pytest.raises(RuntimeError, match="outside of the application"):
        getattr(server, verb)()
    assert bench.states() == {"pending": 1}


def test_a_factory_that_fails_after_a_claim_is_tried_again(leased: Bench) -> None:
    """After a successful claim the error is taken for a temporary one."""
    leased.enqueue(1)
    failures: list[int] = []

    class Moody(Session):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            if done.is_set() and len(failures) < 2:
                failures.append(1)
                raise RuntimeError
            super().__init__(*arguments, **options)

    done = threading.Event()
    server = leased.consumer(session={"class_": Moody})
    server.consumer.on("completed", lambda _: done.set())
    with server.running():
        assert done.wait(20)
        leased.enqueue(2)
        wait_until(lambda: leased.states() == {"completed": 3})
    assert len(failures) == 2
