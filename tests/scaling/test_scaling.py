"""A queue on a partitioned table, whose old partitions are dropped, and one whose sessions read from a standby."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    AsyncConsumer,
    ConcurrencyLimit,
    Consumer,
    QueueConfig,
    QueueMixin,
    Retry,
    Unique,
    cancel,
    claim,
    complete,
    consumers,
    copy_in,
    enqueue,
    extend,
    fail,
    is_paused,
    pause,
    purge,
    reconcile,
    release,
    requeue,
    rescue,
    resume,
    retry,
)
from sqlaqueue.admin import JobFilter, QueueAdmin, doctor
from sqlaqueue.sessions import is_write
from tests.conftest import SERVERS
from tests.consumer.bench import Bench
from tests.programs import wait_until
from tests.servers import Database, Pair, Server, pair_of
from tests.strategies.conftest import explain, nodes_of

pytestmark = pytest.mark.once

STRATEGIES = ["update_status", pytest.param("batch_select", marks=pytest.mark.thorough), "delete_returning"]
OLD = datetime(2026, 1, 15, tzinfo=UTC)
NEW = datetime(2026, 2, 15, tzinfo=UTC)
PARTITIONS = (
    "CREATE TABLE job_01 PARTITION OF job FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')",
    "CREATE TABLE job_02 PARTITION OF job FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')",
    "CREATE TABLE job_03 PARTITION OF job FOR VALUES FROM ('2026-03-01') TO (MAXVALUE)",
)


def make(strategy: str, **options: Any) -> tuple[Any, Any]:
    """Return a queue partitioned by the time of creation, which is a part of its key, and a table for effects."""

    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __table_args__ = {"postgresql_partition_by": "RANGE (created_at)"}  # noqa: RUF012 - as SQLAlchemy wants it
        __queue__ = QueueConfig(strategy=strategy, **{"columns": {"created_at": "created_at"}, **options})
        id: Mapped[int] = mapped_column(sa.BigInteger, sa.Identity(), primary_key=True)
        created_at: Mapped[datetime] = mapped_column(
            sa.DateTime(timezone=True), server_default=sa.func.now(), primary_key=True
        )
        name: Mapped[str]

    class Effect(Base):
        __tablename__ = "effect"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]

    return Job, Effect


class Queue:
    """The tables of one test."""

    def __init__(self, database: Database, strategy: str, **options: Any) -> None:
        self.Job, self.Effect = make(strategy, **options)
        self.database, self.strategy = database, strategy
        self.engine = sa.create_engine(database.url(), pool_size=10)
        self.sessions = sessionmaker(self.engine)
        self.Job.metadata.create_all(self.engine)
        self.execute(*PARTITIONS)

    def execute(self, *statements: str) -> Any:
        """Execute statements, each in a transaction of its own, and return the rows of the last one."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            results = [connection.exec_driver_sql(each) for each in statements]
            return results[-1].all() if results[-1].returns_rows else None

    def enqueue(self, created_at: datetime, *names: str, **values: Any) -> None:
        with self.sessions.begin() as session:
            session.add_all(self.Job(name=name, created_at=created_at, **values) for name in names)

    def states(self) -> Counter[tuple[str, str]]:
        """Return how many jobs of each partition are in which state."""
        counted = self.execute("SELECT tableoid::regclass::text, status, count(*) FROM job GROUP BY 1, 2")
        return Counter({(partition, status): number for partition, status, number in counted})

    def effects(self) -> Counter[str]:
        return Counter(name for (name,) in self.execute("SELECT name FROM effect"))

    def consumer(self, handler: Callable[[Session, Any], Any] | None = None, **options: Any) -> Consumer:
        def insert(session: Session, job: Any) -> None:
            if handler is not None:
                handler(session, job)
            session.add(self.Effect(name=job.name))

        return Consumer(self.Job, insert, self.sessions, **options)


MakeQueue = Callable[..., Queue]


@pytest.fixture
def make_queue(database: Database) -> Iterator[MakeQueue]:
    with contextlib.ExitStack() as stack:

        def make(strategy: str, **options: Any) -> Queue:
            queue = Queue(database, strategy, **options)
            stack.callback(queue.engine.dispose)
            return queue

        yield make


@pytest.fixture(params=STRATEGIES)
def queue(make_queue: MakeQueue, request: pytest.FixtureRequest) -> Queue:
    return make_queue(request.param)


# -- claims, settlements, rescues ------------------------------------------------------------------------------------


def test_jobs_of_all_partitions_run(queue: Queue) -> None:
    """In claim order over the partitions, with retries and failures, and each once."""
    queue.enqueue(NEW, "third", "fails", priority=2)
    queue.enqueue(OLD, "second", "again", priority=1)
    queue.enqueue(NEW + timedelta(days=30), "first", priority=0)
    order: list[str] = []

    def handler(session: Session, job: Any) -> None:
        order.append(job.name)
        if job.name == "fails":
            raise ValueError
        if job.name == "again" and job.attempts == 1:
            raise Retry(delay=0)

    queue.consumer(handler, batch_size=1, retry=lambda *_: None).drain()
    assert [name for name in order if name not in {"fails", "again"}] == ["first", "second", "third"]
    assert order.count("again") == 2
    assert queue.effects() == Counter(["first", "second", "third", "again"])
    assert queue.states() == {
        ("job_01", "completed"): 2,
        ("job_02", "completed"): 1,
        ("job_02", "failed"): 1,
        ("job_03", "completed"): 1,
    }


def test_a_dead_worker(make_queue: MakeQueue) -> None:
    """Its jobs of each partition are rescued, and its settlement is refused."""
    queue = make_queue("update_status")
    queue.enqueue(OLD, "old")
    queue.enqueue(NEW, "new")
    with queue.sessions(expire_on_commit=False) as session:
        jobs = session.scalars(claim(queue.Job, 2)).all()
        session.commit()
        queue.execute("UPDATE job SET lease_expires_at = now()")
        assert sorted(session.scalars(rescue(queue.Job)).all()) == sorted((job.id, job.created_at) for job in jobs)
        session.commit()
        assert session.scalars(complete(jobs)).all() == []
        session.commit()
    queue.consumer().drain()
    assert queue.effects() == Counter(["old", "new"])


def test_rows_that_are_their_own_messages(make_queue: MakeQueue) -> None:
    """A claim deletes them; one that failed comes back to its partition."""
    columns = {"created_at": "created_at", "status": None}
    queue = make_queue("delete_returning", columns=columns, rows_are_messages=True)
    with queue.sessions.begin() as session:
        rows = [{"name": "old", "created_at": OLD}, {"name": "new", "created_at": NEW}]
        assert copy_in(session, queue.Job, rows) == 2
    failing = True

    def handler(session: Session, job: Any) -> None:
        if failing and job.name == "old":
            raise ValueError

    queue.consumer(handler, retry=lambda *_: None).drain()
    assert queue.effects() == Counter(["new"])
    failing = False
    with queue.sessions() as session:
        assert QueueAdmin(session, queue.Job).requeue() == 1
    assert queue.execute("SELECT name FROM job_01") == [("old",)]
    queue.consumer(handler).drain()
    assert queue.effects() == Counter(["new", "old"])
    assert queue.execute("SELECT count(*) FROM job") == [(0,)]


def test_new_partitions_wake_idle_consumers(queue: Queue) -> None:
    """A partition made or attached later has the triggers of its parent, for inserts and for updates."""
    consumer = queue.consumer(poll_interval=60)
    with consumer:
        wait_until(lambda: queue.execute("SELECT listening FROM sqlaqueue_consumer") == [(True,)])
        queue.execute(
            "ALTER TABLE job DETACH PARTITION job_03",
            "CREATE TABLE job_04 PARTITION OF job FOR VALUES FROM ('2026-04-01') TO (MAXVALUE)",
            "ALTER TABLE job ATTACH PARTITION job_03 FOR VALUES FROM ('2026-03-01') TO ('2026-04-01')",
        )
        queue.enqueue(NEW + timedelta(days=60), "created")
        queue.enqueue(NEW + timedelta(days=30), "attached")
        wait_until(lambda: queue.effects() == Counter(["created", "attached"]))
        queue.execute("UPDATE job SET status = 'pending' WHERE status = 'completed'")
        wait_until(lambda: queue.effects() == Counter(["created", "attached"] * 2))


def test_each_partition_serves_a_claim_by_its_index(queue: Queue) -> None:
    """A claim merges the indexes of the partitions, and finds the rows that it changes in their own partition."""
    queue.execute(
        "INSERT INTO job (name, created_at, status, priority) SELECT i, '2026-01-01'::timestamptz + i * interval "
        "'5 minutes', CASE WHEN mod(i, 20) = 0 THEN 'pending' ELSE 'completed' END, mod(i, 3) "
        "FROM generate_series(1, 24000) i"
    )
    for analyze in (False, True):
        if analyze:
            queue.execute("VACUUM ANALYZE")
        plan = explain(queue.engine, claim(queue.Job, 5), {})
        nodes = [node for node in nodes_of(plan) if node["Actual Loops"] > 0]
        scanned = [node for node in nodes if str(node.get("Relation Name", "")).startswith("job")]
        scanned = [node for node in scanned if node["Node Type"] != "ModifyTable"]
        assert {node["Node Type"] for node in scanned} <= {"Index Scan", "Index Only Scan"}
        if queue.strategy != "delete_returning":
            merged = next(node for node in nodes if node["Node Type"] == "Merge Append")
            assert sorted(part["Relation Name"] for part in merged["Plans"]) == ["job_01", "job_02", "job_03"]
        assert sum(node["Actual Rows"] * node["Actual Loops"] for node in scanned) <= 40


def test_limits_and_the_doctor(make_queue: MakeQueue) -> None:
    queue = make_queue("update_status", flow_control=[ConcurrencyLimit(1, per="name")])
    queue.enqueue(OLD, "a", "a")
    queue.enqueue(NEW, "a", "b")
    with queue.sessions() as session:
        # One for each key, over the partitions.
        assert sorted(job.name for job in session.scalars(claim(queue.Job, 4))) == ["a", "b"]
        session.rollback()
        about_server = {"fsync_off", "full_page_writes_off"}
        found = doctor(session, queue.Job, deep=True)
        assert [each for each in found if each.code not in about_server] == []
    queue.consumer(concurrency=3).drain()
    assert queue.effects() == Counter(["a", "a", "a", "b"])


# -- old partitions as retention ---------------------------------------------------------------------------------------


def unfinished(queue: Queue, partition: str) -> int:
    """Return what the documented query returns."""
    return int(queue.execute(f"SELECT count(*) FROM {partition} WHERE status IN ('pending', 'processing')")[0][0])


def reconcile_messages(queue: Queue) -> None:
    with queue.sessions.begin() as session:
        session.execute(reconcile(queue.Job))


def test_drop_of_a_partition_while_consumers_run(queue: Queue) -> None:
    """Two Consumers are at work in the newer partitions; the old one is detached, checked and dropped."""
    queue.enqueue(OLD, *("old" for _ in range(20)))
    queue.enqueue(NEW, *(str(number) for number in range(150)))
    old_ones, dropped = threading.Event(), threading.Event()

    def handler(session: Session, job: Any) -> None:
        if job.name == "140":
            old_ones.set()
            assert dropped.wait(30)

    consumers = [queue.consumer(handler, concurrency=2, batch_size=4) for _ in range(2)]
    with consumers[0], consumers[1]:
        wait_until(lambda: unfinished(queue, "job_01") == 0)
        # The gate is closed while job 140 runs: a strategy that holds a transaction keeps DETACH from its last step.
        assert old_ones.wait(30)
        detach = threading.Thread(target=queue.execute, args=["ALTER TABLE job DETACH PARTITION job_01 CONCURRENTLY"])
        detach.start()
        queue.enqueue(NEW, "enqueued meanwhile")
        wait_until(lambda: queue.effects()["enqueued meanwhile"] == 1)
        dropped.set()
        detach.join(30)
        assert not detach.is_alive()
        assert unfinished(queue, "job_01") == 0
        queue.execute("DROP TABLE job_01")
        queue.enqueue(NEW, "enqueued after")
        wait_until(lambda: queue.effects()["enqueued after"] == 1)
        wait_until(lambda: {status for _, status in queue.states()} == {"completed"})
    assert queue.states() == {("job_02", "completed"): 152}
    assert queue.effects()["old"] == 20


def test_unfinished_jobs_of_a_detached_partition(queue: Queue) -> None:
    """They are out of the queue, do not run, and are back where they were once the partition is attached again."""
    queue.enqueue(OLD, "old")
    queue.enqueue(NEW, "new")
    queue.execute("ALTER TABLE job DETACH PARTITION job_01")
    assert unfinished(queue, "job_01") == 1
    queue.consumer().drain()
    assert queue.effects() == Counter(["new"])
    reconcile_messages(queue)
    queue.execute("ALTER TABLE job ATTACH PARTITION job_01 FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')")
    # Their messages were orphans, which are deleted at any time.
    reconcile_messages(queue)
    queue.consumer().drain()
    assert queue.effects() == Counter(["new", "old"])
    assert queue.states() == {("job_01", "completed"): 1, ("job_02", "completed"): 1}


def test_a_job_that_runs_while_its_partition_is_dropped(make_queue: MakeQueue) -> None:
    """Under a lease nothing protects it: its result is refused, its writes are rolled back, and other jobs run."""
    queue = make_queue("update_status")
    queue.enqueue(OLD, "old")
    running, dropped, events = threading.Event(), threading.Event(), []

    def handler(session: Session, job: Any) -> None:
        if job.name == "old":
            running.set()
            assert dropped.wait(30)

    consumer = queue.consumer(handler)
    consumer.on("lease_lost", lambda event: events.append(event.name))
    with consumer:
        assert running.wait(30)
        queue.execute("DROP TABLE job_01")
        dropped.set()
        queue.enqueue(NEW, "new")
        wait_until(lambda: queue.effects() == Counter(["new"]))
    assert events == ["lease_lost"]


def test_a_held_job_keeps_its_partition(make_queue: MakeQueue) -> None:
    """Under a strategy that holds a transaction, DROP TABLE waits for the jobs that run."""
    queue = make_queue("batch_select")
    queue.enqueue(OLD, "old")
    running, go_on = threading.Event(), threading.Event()

    def handler(session: Session, job: Any) -> None:
        running.set()
        assert go_on.wait(30)

    with queue.consumer(handler):
        assert running.wait(30)
        with pytest.raises(sa.exc.OperationalError, match="lock timeout"):
            queue.execute("SET lock_timeout = '100ms'", "DROP TABLE job_01")
        go_on.set()
        wait_until(lambda: queue.effects() == Counter(["old"]))
    queue.execute("RESET lock_timeout", "DROP TABLE job_01")


def test_messages_of_a_dropped_partition(make_queue: MakeQueue) -> None:
    """No trigger sees the drop. The messages that are left claim nothing, and reconcile() deletes them."""
    queue = make_queue("delete_returning")
    queue.enqueue(OLD, "old", "old")
    queue.execute("DROP TABLE job_01")
    queue.enqueue(NEW, "new")
    assert queue.execute("SELECT count(*) FROM sqlaqueue_message_job") == [(3,)]
    queue.consumer().drain()
    assert queue.effects() == Counter(["new"])
    reconcile_messages(queue)
    assert queue.execute("SELECT count(*) FROM sqlaqueue_message_job") == [(0,)]


# -- sessions that read from a real standby ------------------------------------------------------------------------

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


@pytest.fixture(params=STRATEGIES)
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
            writes = isinstance(clause, sa.Update | sa.Delete) if by_type else is_write(clause)
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
        "cancel": cancel(pending.where(model.id == -1)),
        "requeue": requeue(pending.where(model.id == -1)),
        "purge": purge(model, states=("completed",), older_than=timedelta(days=1)),
        "rescue": rescue(model),
        "reconcile": reconcile(model),
        "pause": pause(model),
        "resume": resume(model),
    }


VERBS_OF_RUN = {
    "extend": lambda job: extend(job, lease=60),
    "release": release,
    "retry": lambda job: retry(job, error="again"),
    "fail": lambda job: fail(job, error="no"),
    "complete": complete,
}


def test_every_verb_is_a_write(bench: Bench, engines: tuple[sa.Engine, sa.Engine]) -> None:
    """With is_write() in get_bind(), each of them reaches the primary, and what reads does not."""
    session_class, model = routing(*engines), bench.Job
    for name, verb in verbs_without_run(model).items():
        assert is_write(verb), name
        with session_class() as session:
            session.execute(verb)
            session.commit()
    for name, make in VERBS_OF_RUN.items():
        [key] = bench.enqueue(1, priority=-1)
        with session_class(expire_on_commit=False) as session:
            job = session.scalars(claim(model, 1)).one()
            verb = make(job)
            assert is_write(verb), name
            assert session.scalars(verb).all() == [key], name
            session.commit()
        bench.execute("DELETE FROM job")
    for read in (sa.select(model), is_paused(model), consumers(model), None):
        assert not is_write(read)
    with session_class() as session:
        assert session.scalar(sa.text("SELECT pg_is_in_recovery()")) is True


def test_functions_need_no_hint(bench: Bench, engines: tuple[sa.Engine, sa.Engine], stale: None) -> None:
    """They ask for the engine of an UPDATE, whatever get_bind() knows, and read nothing from the replica."""
    model = bench.Job
    with routing(*engines, by_type=True)(expire_on_commit=False) as session:
        assert copy_in(session, model, [{"payload": "a"}, {"payload": "b"}]) == 2
        session.commit()
        admin = QueueAdmin(session, model)
        admin.pause()
        assert bench.execute(is_paused(model))
        # What only reads goes where the session reads.
        assert not admin.is_paused()
        admin.resume()
        assert len(admin.cancel(sa.select(model)).cancelled) == 2
        assert bench.states() == {"cancelled": 2}
        everything = JobFilter(states=("cancelled",))
        assert admin.requeue(everything) == 2
        assert bench.states() == {"pending": 2}
        assert len(admin.cancel(sa.select(model)).cancelled) == 2
        assert admin.purge(everything) == 2
        admin.rescue()
        admin.reconcile()
    assert bench.states() == {}


def test_unique_jobs_are_enqueued_beside_a_stale_replica(
    pair: Pair, bench: Bench, engines: tuple[sa.Engine, sa.Engine], stale: None
) -> None:
    """A duplicate that the replica does not have yet is found."""

    class Base(DeclarativeBase):
        pass

    class Reminder(QueueMixin, Base):
        __tablename__ = "reminder"
        __queue__ = QueueConfig(strategy=bench.strategy, unique=Unique("customer"))
        id: Mapped[int] = mapped_column(primary_key=True)
        customer: Mapped[str]

    Base.metadata.create_all(engines[0])
    with routing(*engines, by_type=True)(expire_on_commit=False) as session:
        [first] = enqueue(session, [Reminder(customer="ada")])
        session.commit()
        [second] = enqueue(session, [Reminder(customer="ada")])
        session.commit()
    assert (first.created, second.created) == (True, False)
    assert first.job.id == second.job.id


def test_an_error_names_the_fix(pair: Pair, bench: Bench, engines: tuple[sa.Engine, sa.Engine]) -> None:
    bench.enqueue(1)
    pair.wait_for_standby()
    with routing(*engines, by_type=True)() as session:
        verbs = {**verbs_without_run(bench.Job), "claim": claim(bench.Job, 1)}
        for name, verb in verbs.items():
            if isinstance(verb, sa.UpdateBase) or name in NOTHING_TO_DO[bench.strategy]:
                continue
            with pytest.raises(sa.exc.InternalError, match="read-only") as refused:
                session.execute(verb)
            assert "sqlaqueue.sessions.is_write(clause)" in "\n".join(refused.value.__notes__), name
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
            await session.execute(claim(bench.Job, 1))
        assert "sqlaqueue.sessions.is_write(clause)" in "\n".join(refused.value.__notes__)
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
