"""Unusual sessions, isolation levels and event hooks: they work, or are refused with an error that names the fix."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import ORMExecuteState, Session, sessionmaker, with_loader_criteria
from sqlalchemy.pool import AssertionPool, NullPool, SingletonThreadPool, StaticPool

from sqlaqueue import (
    AsyncConsumer,
    Cancel,
    Consumer,
    Fail,
    Retry,
    Snooze,
    cancel,
    claim,
    complete,
    extend,
    fail,
    purge,
    release,
    requeue,
    retry,
    wait,
)
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
    bench.expect({"completed": 5, "failed": 1}, effects=keys[1:])
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
def test_waiting_in_a_session_that_reads_from_a_replica(sync_leased: Bench) -> None:
    """Announcements need the primary, and the rows of a replica may be old."""
    [key] = sync_leased.enqueue(1)
    server = routed(sync_leased)
    with server.running():
        assert wait(server.session, (sync_leased.Job, key), timeout=20).state == "completed"


def test_sessions_without_autobegin(bench: Bench) -> None:
    """A handler may begin a transaction or leave it to autobegin."""
    bench.enqueue(3)
    assert bench.consumer(bench.work, session={"autobegin": False}).drain() == 3
    bench.expect(effects=1)


@pytest.mark.once
@pytest.mark.parametrize("poolclass", [StaticPool, SingletonThreadPool, AssertionPool])
def test_a_pool_that_shares_a_connection_is_refused(sync_leased: Bench, poolclass: Any) -> None:
    server = sync_leased.consumer(engine={"poolclass": poolclass})
    with pytest.raises(
        ConfigurationError, match=rf"Consumer\(Job, ...\): the engine's {poolclass.__name__} .*NullPool"
    ):
        server.drain()


@pytest.mark.once
def test_an_engine_that_shares_a_connection_is_refused(sync_leased: Bench) -> None:
    """Whichever class its pool has."""
    sync_leased.enqueue(2)
    with sync_leased.engine.connect() as kept:
        driver = kept.connection.driver_connection
        server = sync_leased.consumer(engine={"creator": lambda: driver})
        with pytest.raises(ConfigurationError, match="does not give each session a connection of its own"):
            server.drain()
    assert sync_leased.states() == {"pending": 2}


@pytest.mark.once
def test_sessions_of_one_connection_are_refused(sync_leased: Bench) -> None:
    """The transaction of the given connection is not changed."""
    with sync_leased.engine.connect() as connection, connection.begin() as transaction:
        make = sessionmaker(bind=connection, join_transaction_mode="create_savepoint")
        with make.begin() as session:
            session.add(sync_leased.Job())
        with pytest.raises(ConfigurationError, match=r"bound to one connection.*sessionmaker\(engine\).* In a test"):
            Consumer(sync_leased.Job, for_sync(nothing), make).drain()
        assert transaction.is_active
        assert connection.scalar(sa.select(sa.func.count()).select_from(sync_leased.Job)) == 1

    async def refused() -> None:
        engine = create_async_engine(sync_leased.database.url("asyncpg"), poolclass=NullPool)
        async with engine.connect() as held:
            await AsyncConsumer(sync_leased.Job, for_async(nothing), async_sessionmaker(bind=held)).drain()

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
    bench.expect({"completed": 1, "failed": 1}, effects={good: 1})
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


# -- strict isolation levels, by default or chosen by a handler: runs are settled as at READ COMMITTED -------------
LEVEL = sa.text("SELECT current_setting('transaction_isolation')")
LEASE = 1.0


@contextlib.contextmanager
def strict_by_default(bench: Bench, where: str, level: str) -> Iterator[dict[str, Any]]:
    """Yield engine options with a strict level, or set it as the default of the database."""
    if where != "database":
        yield {"engine": {"isolation_level": level}, "factory": {"execution_options": {"isolation_level": level}}}[
            where
        ]
        return
    name = bench.database.name
    bench.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = '{level.lower()}'")
    bench.database.kill_backends()
    try:
        yield {}
    finally:
        bench.execute(f'ALTER DATABASE "{name}" RESET default_transaction_isolation')
        bench.database.kill_backends()


def past_its_lease(bench: Bench) -> None:
    end = bench.execute(f"SELECT clock_timestamp() + interval '{1.2 * LEASE} s'")
    wait_until(lambda: bench.execute("SELECT clock_timestamp() > :end", end=end))


DEFAULTS = [
    pytest.param("database", "SERIALIZABLE"),
    pytest.param("engine", "REPEATABLE READ"),
    pytest.param("factory", "SERIALIZABLE", marks=pytest.mark.thorough),
    pytest.param("database", "REPEATABLE READ", marks=pytest.mark.thorough),
]


@pytest.mark.usefixtures("frequent_rescues")
@pytest.mark.once
@pytest.mark.parametrize(("where", "level"), DEFAULTS)
def test_a_strict_default_changes_no_result(bench: Bench, where: str, level: str) -> None:
    """No job runs twice or loses an attempt. Handlers under a lease have that level, for longer than the lease."""
    keys = bench.enqueue(5)
    patient, levels = threading.Event(), set[str]()
    begun = threading.Semaphore(0)

    async def work(io: Any, job: Any) -> None:
        levels.add(await io.scalar(LEVEL))
        await io.execute(bench.effect(job.id))
        if job.id in keys[:2]:
            begun.release()
            await io.wait(patient)

    with strict_by_default(bench, where, level) as engine:
        server = bench.consumer(work, concurrency=2, batch_size=2, lease=LEASE, engine=engine)
        with server.running():
            if not bench.held:
                assert all(begun.acquire(timeout=30) for _ in range(2))
                past_its_lease(bench)
            patient.set()
            wait_until(lambda: bench.states() == {"completed": 5})
    assert levels == {"read committed" if bench.held else level.lower()}
    assert server.told() == {"claimed": 5, "completed": 5}
    bench.expect(attempts=1, effects=1)


@pytest.mark.usefixtures("frequent_rescues")
@pytest.mark.once
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_handler_chooses_a_strict_level(leased: Bench, level: str) -> None:
    """Several run at once for longer than their leases, and each is settled at the first try."""
    keys = leased.enqueue(3)
    begun, patient = threading.Semaphore(0), threading.Event()

    async def work(io: Any, job: Any) -> None:
        await io.choose(level)
        assert await io.scalar(LEVEL) == level.lower()
        await io.execute(leased.effect(job.id))
        begun.release()
        await io.wait(patient)

    server = leased.consumer(work, concurrency=3, lease=LEASE)
    with server.running():
        assert all(begun.acquire(timeout=30) for _ in keys)
        past_its_lease(leased)
        patient.set()
        wait_until(lambda: leased.states() == {"completed": 3})
    assert server.told() == {"claimed": 3, "completed": 3}
    assert leased.effects() == dict.fromkeys(keys, 1)
    assert leased.execute("SHOW enable_seqscan") == "on"


@pytest.mark.usefixtures("frequent_rescues")
@pytest.mark.once
def test_handlers_whose_transactions_conflict_run_again(leased: Bench) -> None:
    """Each reads what the other writes, so one of them fails. It is retried after a delay, and costs no attempt."""
    keys = leased.enqueue(2)
    seen = list[int]()

    async def work(io: Any, job: Any) -> None:
        await io.choose("SERIALIZABLE")
        await io.scalar(sa.text("SELECT count(*) FROM effect"))
        await io.execute(leased.effect(job.id))
        seen.append(job.id)
        if len(seen) <= 2:
            await io.wait_for(lambda: len(seen) >= 2)

    server = leased.consumer(work, concurrency=2)
    with server.running():
        wait_until(lambda: leased.states() == {"completed": 2})
    leased.expect(attempts=dict.fromkeys(keys, 1), effects=keys)
    assert not server.told("failed", "retried", "lease_lost")
    [released] = [event for event in server.events if event.name == "released"]
    assert released.delay


# -- sessions with event hooks that record each statement, as applications use for logs and traces -----------------
_make_dialect: Any = postgresql.dialect
DIALECT = _make_dialect()
HOOKS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "text for PostgreSQL": lambda statement: str(statement.compile(dialect=DIALECT)),
    "text with its values": lambda statement: str(
        statement.compile(dialect=DIALECT, compile_kwargs={"literal_binds": True})
    ),
}


def writing(hooks: list[Callable[[Any], str]], written: list[str], refused: list[Exception]) -> type[Session]:
    """Return a class of sessions that write down what they execute."""

    class Writing(Session):
        pass

    @sa.event.listens_for(Writing, "do_orm_execute")
    def _write(state: ORMExecuteState) -> None:
        try:
            written.extend(hook(state.statement) for hook in hooks)
        except Exception as error:  # noqa: BLE001 - the Consumer would retry for ever; the test checks it
            refused.append(error)

    return Writing


@pytest.mark.parametrize("strategy", ["update_status", "delete_returning", "batch_select", "own_message"])
def test_a_consumer_works_with_sessions_that_record_statements(bench: Bench) -> None:
    bench.enqueue(6)
    written: list[str] = []
    refused: list[Exception] = []
    ends: dict[int, BaseException] = {2: Fail("no"), 3: Snooze(60), 4: Cancel("off"), 5: Retry(60), 6: ValueError("no")}
    server = bench.consumer(bench.doing(ends), session={"class_": writing([*HOOKS.values()], written, refused)})
    assert server.drain() == 7
    assert refused == []
    assert sorted(server.told("completed", "failed", "cancelled")) == [1, 2, 4, 6]
    assert any("sqlaqueue_consumer" in text for text in written)
    assert any("DELETE FROM sqlaqueue_control" in text for text in written)


def hiding(model: Any, *, aliases: bool) -> type[Session]:
    """Return a class of sessions that add a condition to every statement, as a soft delete does."""

    class Hiding(Session):
        pass

    @sa.event.listens_for(Hiding, "do_orm_execute")
    def _hide(state: ORMExecuteState) -> None:
        visible = model.payload.is_distinct_from("hidden")
        state.statement = state.statement.options(with_loader_criteria(model, visible, include_aliases=aliases))

    return Hiding


@pytest.mark.parametrize("aliases", [False, True])
def test_a_consumer_settles_jobs_that_a_condition_on_all_statements_hides(bench: Bench, *, aliases: bool) -> None:
    """A handler that hides its own job has not lost it."""
    keys, calls = bench.enqueue(6, max_attempts=2), Counter[int]()
    ends: dict[int, BaseException] = {keys[1]: ValueError("once"), keys[2]: Fail("no"), keys[3]: Cancel("off")}

    async def handle(io: Any, job: Any) -> None:
        calls[job.id] += 1
        job.payload = "hidden"
        await io.flush()
        if job.id in ends and calls[job.id] == 1:
            raise ends[job.id]

    server = bench.consumer(handle, session={"class_": hiding(bench.Job, aliases=aliases)}, batch_size=3)
    server.drain()
    assert bench.states() == {"completed": 4, "failed": 1, "cancelled": 1}
    assert calls == {key: 2 if key == keys[1] else 1 for key in keys}
    assert not server.told("lease_lost")
    bench.assert_tidy()


SETTLING: dict[str, Callable[[Any], Any]] = {
    "complete": complete,
    "fail": fail,
    "retry": retry,
    "release": release,
    "extend": extend,
}


@pytest.mark.parametrize("aliases", [False, True])
def test_verbs_of_claimed_jobs_find_those_that_a_condition_on_all_statements_hides(
    sync_bench: Bench, *, aliases: bool
) -> None:
    for name, verb in SETTLING.items():
        if name == "extend" and sync_bench.held:
            continue
        with hiding(sync_bench.Job, aliases=aliases)(sync_bench.engine) as session:
            session.add_all([sync_bench.Job() for _ in range(2)])
            session.flush()
            jobs = session.scalars(claim(sync_bench.Job, 2)).all()
            assert len(jobs) == 2, name
            for job in jobs:
                job.payload = "hidden"
            assert len(session.scalars(verb(jobs)).all()) == 2, name
            session.rollback()


@pytest.mark.parametrize("aliases", [False, True])
def test_statements_that_choose_jobs_obey_a_condition_that_includes_aliases(
    sync_bench: Bench, *, aliases: bool
) -> None:
    Job = sync_bench.Job  # noqa: N806 - a class
    chooses: dict[str, Any] = {
        "pending": [claim(Job, 5), cancel(sa.select(Job))],
        "failed": [requeue(sa.select(Job)), purge(Job)],
    }
    for state, verbs in chooses.items():
        for verb in verbs:
            sync_bench.clear()
            [hidden, shown] = [
                *sync_bench.enqueue(1, payload="hidden", status=state),
                *sync_bench.enqueue(1, status=state),
            ]
            with hiding(Job, aliases=aliases)(sync_bench.engine) as session:
                changed = {getattr(each, "id", each) for each in session.scalars(verb).all()}
                # SQLAlchemy adds it to an UPDATE or DELETE of the class, even without aliases.
                assert changed - {hidden} == {shown}, verb
                assert not (aliases and hidden in changed), verb
                session.rollback()
