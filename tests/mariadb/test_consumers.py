"""Consumers on MariaDB, in one process and in several, some of which are killed; and the command line."""

import asyncio
import contextlib
import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue
from sqlaqueue import AsyncConsumer, Constant, Consumer, Retry, async_wait, cancel
from sqlaqueue.cli import main
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.outcomes import FinishedRun
from sqlaqueue.consumer.settle import Settler
from tests.consumer.models import for_async, for_sync
from tests.faults.checker import Row, Tables, violations
from tests.faults.history import with_event
from tests.faults.processes import Actor, Process, Processes
from tests.faults.roles import record_events
from tests.mariadb.conftest import Prepared
from tests.mariadb.models import Base, Effect, Held, Job, Message
from tests.mariadb.server import MariaDBServer
from tests.programs import DEADLINE, wait_until


def test_a_drain(engine: sa.Engine, sessions: sessionmaker[Session]) -> None:
    seen: list[int] = []

    def handle(session: Session, job: Job) -> None:
        seen.append(job.id)
        session.add(Effect(job=job.id, note=""))
        if job.id % 10 == 0 and job.attempts == 1:
            raise Retry(delay=0)

    with sessions() as session:
        session.add_all([Job(id=n) for n in range(1, 101)])
        session.commit()
    Consumer(Job, handle, sessions, concurrency=4).drain()
    with sessions() as session:
        assert sorted(session.scalars(sa.select(Effect.job))) == [*range(1, 101)]
        assert {*session.scalars(sa.select(Job.status))} == {"completed"}
    assert len(seen) == 110


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_handlers_at_a_strict_isolation_level(prepared: Prepared, engine: sa.Engine, level: Any) -> None:
    """The Consumer's own transactions are at READ COMMITTED nevertheless."""
    own = prepared(isolation_level=level)
    levels = set()

    def handle(session: Session, job: Job) -> None:
        levels.add(session.scalar(sa.text("SELECT @@tx_isolation")))
        job.payload = "changed"

    with Session(own) as session:
        session.add_all([Job(id=n) for n in range(1, 9)])
        session.commit()
    Consumer(Job, handle, sessionmaker(own), concurrency=2).drain()
    assert levels == {level.replace(" ", "-")}
    with Session(engine) as session:
        assert session.execute(sa.select(Job.status, Job.payload).distinct()).all() == [("completed", "changed")]


def test_an_async_drain(url: Callable[[str], str], engine: sa.Engine) -> None:
    seen: list[int] = []

    async def handle(_: Any, job: Job) -> None:
        seen.append(job.id)

    async def drain() -> None:
        own = sqlaqueue.prepare(create_async_engine(url("mariadb+asyncmy")))
        await AsyncConsumer(Job, handle, async_sessionmaker(own), concurrency=4).drain()
        await own.dispose()

    with Session(engine) as session:
        session.add_all([Job(id=n) for n in range(1, 101)])
        session.commit()
    asyncio.run(drain())
    assert sorted(seen) == [*range(1, 101)]


def test_an_idle_consumer_of_the_process_is_woken(engine: sa.Engine, sessions: sessionmaker[Session]) -> None:
    """Its next poll would be long after the deadline of the test."""
    done = threading.Event()
    consumer = Consumer(Job, lambda _session, _job: done.set(), sessions, poll_interval=10 * DEADLINE)
    polled = threading.Event()
    thread = threading.Thread(target=consumer.run)
    sa.event.listen(engine, "commit", lambda _: polled.set())
    thread.start()
    assert polled.wait(DEADLINE)
    time.sleep(0.5)
    with sessions() as session:
        session.add(Job(id=1))
        session.commit()
    assert done.wait(DEADLINE)
    consumer.stop()
    thread.join(DEADLINE)
    assert not thread.is_alive()


async def test_an_idle_async_consumer_of_the_process_is_woken(async_engine: AsyncEngine, engine: sa.Engine) -> None:
    """By a session of asyncmy, and by one of PyMySQL in a thread. Its next poll would be long after the deadline."""
    done: asyncio.Queue[int] = asyncio.Queue()

    async def handle(_: Any, job: Job) -> None:
        done.put_nowait(job.id)

    async def add_async(key: int) -> None:
        async with async_sessionmaker(async_engine)() as session:
            session.add(Job(id=key))
            await session.commit()

    def add(key: int) -> None:
        with Session(engine) as session:
            session.add(Job(id=key))
            session.commit()

    consumer = AsyncConsumer(Job, handle, async_sessionmaker(async_engine), poll_interval=10 * DEADLINE)
    await add_async(1)
    running = asyncio.create_task(consumer.run())
    assert await asyncio.wait_for(done.get(), DEADLINE) == 1
    # It polls once more, and finds nothing.
    await asyncio.sleep(0.5)
    await add_async(2)
    assert await asyncio.wait_for(done.get(), DEADLINE) == 2
    await asyncio.sleep(0.5)
    await asyncio.to_thread(add, 3)
    assert await asyncio.wait_for(done.get(), DEADLINE) == 3
    consumer.stop()
    await asyncio.wait_for(running, DEADLINE)


MODELS: dict[str, Any] = {"job": Job, "held": Held, "message": Message}
"""The queues of the workers: one with leases, one whose claims hold a transaction, and one whose claims delete rows."""


def run_worker(actor: Actor, *, url: str, model: str, poll_interval: float = 0.05) -> None:
    pace.RESCUE = 0.2
    # A handler that loses its connection has failed, and would be tried again after 15 s or more.
    options: dict[str, Any] = {"concurrency": 4, "poll_interval": poll_interval, "retry": Constant(0.1)}
    queue = MODELS[model]
    if queue is Job:
        options["lease"] = 1
    recorder = actor.recorder

    async def handle(io: Any, job: Any) -> None:
        run = uuid.uuid4().hex[:8]
        recorder.record("start", job.id, run=run)
        if job.payload == "flaky" and job.attempts == 1:
            recorder.record("raise", job.id, run=run)
            raise RuntimeError("the first attempt fails")
        io.add(Effect(job=job.id, note=run))
        await io.flush()
        until = time.monotonic() + 0.01
        await io.wait_for(lambda: time.monotonic() > until)
        recorder.record("return", job.id, run=run)

    async def run_async() -> None:
        engine = sqlaqueue.prepare(create_async_engine(url, pool_size=10))
        consumer = AsyncConsumer(queue, for_async(handle), async_sessionmaker(engine), **options)
        record_events(consumer, recorder, options)
        await consumer.run()
        await engine.dispose()

    if "asyncmy" in url:
        asyncio.run(run_async())
        return
    engine = sqlaqueue.prepare(sa.create_engine(url, pool_size=10))
    consumer = Consumer(queue, for_sync(handle), sessionmaker(engine), **options)
    record_events(consumer, recorder, options)
    consumer.run()
    engine.dispose()


class Workers(Processes):
    """Worker processes and the history of what they do."""

    def __init__(self, directory: Path, engine: sa.Engine, url: Callable[[str], str], model: str = "job") -> None:
        super().__init__(directory, random.Random(0))
        self.engine, self.url, self.model, self.queue = engine, url, model, MODELS[model]

    def enqueue(self, keys: range, payload: str | None = None) -> None:
        with Session(self.engine) as session:
            for key in keys:
                self.recorder.record("enqueueing", key, max_attempts=3)
            session.add_all([self.queue(id=key, payload=payload, max_attempts=3) for key in keys])
            session.commit()
        for key in keys:
            self.recorder.record("enqueued", key)

    def start_workers(self, *drivers: str, **options: float) -> list[Process]:
        started = [
            self.start(run_worker, "worker", url=self.url(driver), model=self.model, **options) for driver in drivers
        ]
        self.wait_for(len(started), "ready")
        return started

    def count(self, *events: str) -> int:
        return len(with_event(self.records(), *events))

    def wait_for(self, number: int, *events: str) -> None:
        self.wait_until(lambda: self.count(*events) >= number, f"{number} of {events}")

    def finish(self) -> dict[str, list[str]]:
        """Wait until all jobs have ended, stop the processes and return the violations of the guarantees."""
        queue = self.queue
        keeps_rows = queue is not Message
        unfinished = sa.select(sa.func.count(queue.id))
        if keeps_rows:
            unfinished = unfinished.where(queue.status.in_(["pending", "processing"]))
        with Session(self.engine) as session:
            self.wait_until(lambda: (session.rollback(), session.scalar(unfinished))[1] == 0, "the end of all jobs")
            self.stop()
            status = queue.status if keeps_rows else sa.literal("pending")
            found = session.execute(sa.select(queue.id, status, queue.attempts))
            rows = {key: Row(state, attempts) for key, state, attempts in found}
            effects = [(key, note) for key, note in session.execute(sa.select(Effect.job, Effect.note))]
        return violations(self.records(), Tables(rows, effects, keeps_completed=keeps_rows))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("driver", ["mariadb+pymysql", "mariadb+asyncmy"])
def test_of_several_processes_one_is_killed(
    tmp_path: Path, engine: sa.Engine, url: Callable[[str], str], driver: str, model: str
) -> None:
    with Workers(tmp_path, engine, url, model) as workers:
        first, _ = workers.start_workers(driver, driver)
        workers.enqueue(range(1, 71))
        workers.enqueue(range(71, 81), "flaky")
        workers.wait_for(20, "return")
        first.kill()
        assert not workers.finish()
        assert workers.count("completed") >= 60
        assert not any("ProgrammingError" in process.output for process in workers.processes)


@pytest.mark.parametrize("driver", ["mariadb+pymysql", "mariadb+asyncmy"])
def test_an_idle_consumer_of_another_process_is_woken(
    mariadb: MariaDBServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, driver: str
) -> None:
    """Its next poll would be long after the deadline of the test. The thread that looks survives the server's end."""
    with MariaDBServer(tmp_path_factory.mktemp("woken"), mariadb.template) as server, server.database() as name:
        engine = sqlaqueue.prepare(sa.create_engine(server.url(name)))
        Base.metadata.create_all(engine)
        with Workers(tmp_path, engine, lambda driver: server.url(name, driver)) as workers:
            workers.start_workers(driver, poll_interval=10 * DEADLINE)
            for key in range(1, 9):
                workers.enqueue(range(key, key + 1))
                workers.wait_for(key, "completed")
                if key == 4:
                    server.kill()
                    server.start()
                    engine.dispose()
            assert not workers.finish()
        engine.dispose()


def test_the_thread_that_looks_for_jobs_has_one_connection(
    mariadb: MariaDBServer, engine: sa.Engine, sessions: sessionmaker[Session]
) -> None:
    """It is outside of the pool, has no open transaction, and is closed when the last Consumer has ended."""
    connections = "SELECT count(*) FROM information_schema.processlist WHERE db LIKE 'test%'"
    open_transactions = (
        "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_started < NOW() - INTERVAL 1 SECOND"
    )
    engine.dispose()
    with Consumer(Job, lambda *_: None, sessions, poll_interval=10 * DEADLINE):
        time.sleep(2)
        pool: Any = engine.pool
        assert pool.checkedout() == 0
        assert mariadb.scalar(connections) == pool.checkedin() + 1
        assert mariadb.scalar(open_transactions) == 0
    wait_until(lambda: mariadb.scalar(connections) == pool.checkedin(), "the end of the connection")


def test_the_server_is_killed_under_load(
    mariadb: MariaDBServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What was committed is there after its recovery, and everything that has not ended is done again."""
    with MariaDBServer(tmp_path_factory.mktemp("killed"), mariadb.template) as server, server.database() as name:
        engine = sqlaqueue.prepare(sa.create_engine(server.url(name)))
        Base.metadata.create_all(engine)
        with Workers(tmp_path, engine, lambda driver: server.url(name, driver)) as workers:
            workers.start_workers("mariadb+pymysql", "mariadb+asyncmy")
            workers.enqueue(range(1, 91))
            for number in (20, 50):
                workers.wait_for(number, "return")
                workers.record_fault("SIGKILL of the server")
                server.kill()
                server.start()
                engine.dispose()
            assert not workers.finish()
        engine.dispose()


def test_a_job_that_lost_its_connection_runs_again(
    engine: sa.Engine, sessions: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits by itself: claims that look for such jobs between its end and its settlement do not see it yet."""
    monkeypatch.setattr(pace, "RECONCILE", 10 * DEADLINE)
    runs, settle = list[int](), Settler.settle

    def settle_late(
        self: Settler, session: Session, finished: Sequence[FinishedRun], **options: bool
    ) -> list[FinishedRun]:
        context: Any = consumer._context
        if any(one.outcome.quarantine for one in finished):
            # Not for longer: where the other worker does not claim just then, the job runs again all the same.
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not context.quarantine.may_wait, seconds=5)
        return settle(self, session, finished, **options)

    def handle(session: Session, job: Job) -> None:
        runs.append(job.id)
        if len(runs) == 1:
            session.execute(sa.text("KILL CONNECTION_ID()"))

    monkeypatch.setattr(Settler, "settle", settle_late)
    with sessions() as session:
        session.add(Job(id=1))
        session.commit()
    consumer = Consumer(Job, handle, sessions, concurrency=2, poll_interval=0.05, lease=600)
    with consumer:
        wait_until(lambda: len(runs) == 2, "its second run")


BAD_JOBS = {
    "a value that cannot be loaded": [f"UPDATE job SET data = '{'9' * 5000}' WHERE id = 5"],
    "a trigger that refuses": [
        """CREATE TRIGGER refuse BEFORE UPDATE ON job FOR EACH ROW
        IF OLD.id = 5 THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'; END IF"""
    ],
}


@pytest.mark.parametrize("what", BAD_JOBS)
def test_a_job_that_cannot_be_claimed_leaves_the_others_alone(
    engine: sa.Engine, sessions: sessionmaker[Session], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with sessions() as session:
        session.add_all([Job(id=n) for n in range(1, 21)])
        session.commit()
    with engine.begin() as connection:
        for statement in BAD_JOBS[what]:
            connection.exec_driver_sql(statement)
    try:
        assert Consumer(Job, lambda *_: None, sessions, concurrency=4).drain() == 19
        with sessions() as session:
            assert [*session.scalars(sa.select(Job.id).where(Job.status == "pending"))] == [5]
        named = [record.job_key for record in caplog.records if getattr(record, "event", None) == "job_unclaimable"]
        assert named == [5]
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TRIGGER IF EXISTS refuse")


# -- maintenance and operators -----------------------------------------------------------------------------------------


async def test_a_cancellation_is_announced_within_the_process(
    async_engine: AsyncEngine, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the announcement, the Consumer would look for requests after the deadline of the test."""
    for interval in ("HEARTBEAT", "RESCUE"):
        monkeypatch.setattr(pace, interval, 10 * DEADLINE)

    begun = asyncio.Event()

    async def handle(_: AsyncSession, __: Job) -> None:
        begun.set()
        await asyncio.sleep(10 * DEADLINE)

    sessions = async_sessionmaker(async_engine)
    consumer = AsyncConsumer(Job, handle, sessions, lease=30 * DEADLINE, poll_interval=10 * DEADLINE)
    run = asyncio.create_task(consumer.run())
    async with sessions() as session:
        session.add(Job(id=1))
        await session.commit()
        await asyncio.wait_for(begun.wait(), DEADLINE)
        await session.execute(cancel(sa.select(Job).where(Job.id == 1)))
        await session.commit()
    result = await async_wait(sessions, Job, 1, timeout=DEADLINE)
    assert result.state == "cancelled"
    consumer.stop()
    await run


def test_retention_deletes_what_is_old(
    engine: sa.Engine, sessions: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing younger, not even by an hour; the next batch begins with what has become old since."""
    monkeypatch.setattr(pace, "RETENTION", 0.2)
    with sessions() as session:
        session.add_all([Job(id=n) for n in range(1, 21)])
        session.commit()
        Consumer(Job, lambda *_: None, sessions).drain()
        becomes_old = timedelta(hours=24) - timedelta(seconds=2)
        age = sa.case((Job.id > 5, timedelta(hours=25)), (Job.id == 1, becomes_old), else_=timedelta(hours=23))
        session.execute(sa.update(Job).values(finished_at=sa.func.now() - age))
        session.commit()
        with Consumer(Job, lambda *_: None, sessions, poll_interval=0.1):
            wait_until(lambda: (session.rollback(), session.scalar(sa.select(sa.func.count(Job.id))))[1] == 4)
        assert session.scalars(sa.select(Job.id)).all() == [2, 3, 4, 5]


# -- the command line --------------------------------------------------------------------------------------------------


QUEUE = "tests.mariadb.models:Job"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("driver", ["mariadb", "mysql+pymysql", "mariadb+asyncmy"])
def test_what_commands_show_and_change(
    url: Callable[[str], str], engine: sa.Engine, sessions: sessionmaker[Session], driver: str
) -> None:
    with sessions() as session:
        session.add_all([Job(id=n) for n in range(1, 5)])
        session.commit()
    address = ["--url", url(driver)]
    (shown,) = json.loads(run("stats", QUEUE, "--json", *address))
    assert shown["due"] == 4
    assert "pending" in run("jobs", QUEUE, *address)
    assert "pending" in run("why", QUEUE, "2", *address)
    run("cancel", QUEUE, "--key", "2", "--yes", *address)
    with sessions() as session:
        assert session.get_one(Job, 2).status == "cancelled"


def test_an_unknown_driver_is_refused() -> None:
    result = CliRunner().invoke(main, ["stats", QUEUE, "--url", "mysql+mysqldb://localhost/shop"])
    assert "the driver 'mysqldb' is not supported; write it as mariadb+pymysql://" in result.output
