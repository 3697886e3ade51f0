"""Processes on one file, which are killed, fork, fill the disk or are idle: no job is lost, and none runs twice."""

import contextlib
import logging
import os
import posix
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue
from sqlaqueue import Consumer
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.engines import notifications
from sqlaqueue.engines.notifications import subscribe
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.mapping.runs import CLAIM_OPTION
from sqlaqueue.sqlite import transactions
from tests.consumer.models import models, prepared
from tests.consumer.test_crashes import ENDS, children_are_ended, test_children_that_exit_in_the_handler_are_left_alone
from tests.faults.history import with_event
from tests.faults.scenarios import SCENARIOS, attempts, wait_for_handlers
from tests.models import add
from tests.programs import wait_until
from tests.sqlite.conftest import MakeHarness
from tests.sqlite.models import SQLiteBench

__all__ = ["test_children_that_exit_in_the_handler_are_left_alone"]

pytestmark = pytest.mark.once

JOBS = 1000
WRITES = 40
"""Jobs whose effects do not fit on the disk."""


@pytest.mark.parametrize(("api", "processes"), [("sync", 2), ("async", 4)])
def test_processes_drain_a_file(make_harness: MakeHarness, processes: int) -> None:
    with make_harness(timeout=120) as harness:
        workers = [harness.start_worker(batch_size=10, lease=60) for _ in range(processes)]
        harness.wait_until(lambda: all(worker.records("ready") for worker in workers), "all processes poll")
        # A handler in ten writes, so that its transaction competes with those of the library. In several
        # transactions, and until a second process has claimed, as one alone may be fast enough for all jobs.
        keys: list[int] = []
        while len(keys) < JOBS or (sum(bool(each.records("start")) for each in workers) < 2 and len(keys) < 20 * JOBS):
            keys += harness.enqueue(*(["work", *["quiet"] * 9] * (JOBS // 200)), priority=0)
        harness.wait_until(
            lambda: len(with_event(harness.records(), "completed")) == len(keys), "all jobs are completed"
        )
        harness.finish()
        starts = Counter(record.key for record in with_event(harness.records(), "start"))
        assert starts == dict.fromkeys(keys, 1)
        assert sum(bool(worker.records("start")) for worker in workers) > 1, "one process has run all jobs"
        assert [worker.output for worker in workers if "OperationalError" in worker.output] == []


# -- processes that are killed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario", ["no_faults", "killed_at_random", "handler_exits_process", "requeued_by_plain_sql"]
)
def test_guarantees_hold_under_faults(make_harness: MakeHarness, scenario: str) -> None:
    with make_harness() as harness:
        SCENARIOS[scenario](harness)


def test_a_worker_is_killed_while_its_handlers_run(make_harness: MakeHarness) -> None:
    """Its jobs were claimed together: they are rescued, run by another process, and no attempt is counted."""
    with make_harness() as harness:
        # A handler that had written would have the write lock until it returns.
        keys = harness.enqueue(*["quiet gated"] * 4)
        killed = harness.start_worker(concurrency=2, batch_size=2)
        wait_for_handlers(harness, killed, 2)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        other = harness.start_worker(concurrency=2, batch_size=2)
        harness.open_gate()
        assert attempts(harness, harness.finish()) == {1}
        rescued = {record.key for record in other.records("rescued")}
        assert {record.key for record in killed.records("at gate")} <= rescued <= set(keys)


def test_a_worker_is_killed_while_it_has_the_write_lock(make_harness: MakeHarness) -> None:
    """What its handler wrote is gone, and the lock is free at once."""
    with make_harness() as harness:
        harness.enqueue("gated", "work", "work")
        killed = harness.start_worker()
        wait_for_handlers(harness, killed)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        harness.enqueue("work")
        harness.open_gate()
        harness.start_worker()
        harness.finish()


def test_a_paused_worker_changes_nothing_when_it_resumes(make_harness: MakeHarness, bench: SQLiteBench) -> None:
    """Its jobs were rescued and run by another process in the meantime."""
    with make_harness() as harness:
        harness.enqueue("quiet gated")
        paused = harness.start_worker()
        wait_for_handlers(harness, paused)
        with contextlib.closing(sqlite3.connect(bench.file.path, timeout=30, isolation_level=None)) as other:
            # Not while its heartbeat has the write lock: no process could write until it resumes.
            other.execute("BEGIN IMMEDIATE")
            paused.send_signal(signal.SIGSTOP)
            other.execute("ROLLBACK")
        harness.open_gate()
        harness.start_worker()
        harness.wait_until_finished()
        paused.send_signal(signal.SIGCONT)
        harness.wait_until(lambda: paused.records("lease_lost"), "the paused worker loses its lease")
        harness.finish()
        assert not paused.records("completed")


# -- processes that fork while a Consumer runs: a child has nothing of its parent's ------------------------------------


def test_a_child_that_returns_from_the_handler_is_ended(bench: SQLiteBench) -> None:
    # SQLAlchemy 2.1 waits for the thread of aiosqlite first, which the child has not, so the loop goes on and ends it.
    waits = bench.api == "async" and not sa.__version__.startswith("2.0.")
    children_are_ended(bench, ENDS | {"statement": 0 if waits else 1})


def code_of_child(work: Callable[[], None]) -> int:
    """Do something in a forked child, for ten seconds at the most, and return its exit code."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(10)
            work()
            code = 0
        finally:
            # Not os._exit(), which coverage extends by a write to a SQLite file of its own. That may wait without end
            # for a lock of the SQLite library that a thread of the parent had at the fork.
            posix._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def enqueue_and_drain(path: Path) -> None:
    """Do so with an engine and a Consumer of this process, and count the jobs that it has run."""
    engine, (base, job, *_) = prepared(sa.create_engine(f"sqlite:///{path}")), models("update_status")
    base.metadata.create_all(engine)
    add(engine, *(job(payload="child") for _ in range(3)))
    ran: list[Any] = []
    mine = sa.select(job).where(job.payload == "child")
    Consumer(mine, lambda session, job: ran.append(job.id), sessionmaker(engine)).drain()
    assert len(ran) == 3


def is_refused(work: Callable[[], Any], path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"forked while process {os.getppid()} had connections to {path}"):
        work()


@pytest.mark.parametrize("api", ["sync"])
def test_a_file_that_the_parent_has_open_is_refused(bench: SQLiteBench) -> None:
    """SQLite would take the parent's locks for the child's own. The parent's Consumer goes on."""
    ran: list[Any] = []
    path = bench.file.path
    session = bench.sessions()
    session.add(bench.Owner(name="of an open transaction"))

    def work() -> None:
        is_refused(lambda: enqueue_and_drain(path), path)
        is_refused(bench.states, path)
        is_refused(session.commit, path)

    with Consumer(bench.Job, lambda session, job: ran.append(job.id), bench.sessions, poll_interval=3600):
        for number in range(1, 4):
            assert code_of_child(work) == 0
            bench.enqueue()
            wait_until(lambda number=number: len(ran) == number, "the parent's Consumer is woken")
        session.flush()
        assert code_of_child(work) == 0
        session.commit()
    assert bench.states() == {"completed": 3}


@pytest.mark.parametrize("api", ["sync"])
def test_a_file_that_creator_opens_is_refused(bench: SQLiteBench) -> None:
    """On either side: the URL does not name it."""
    path = bench.file.path

    def creating() -> sa.Engine:
        return prepared(sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(path), poolclass=sa.NullPool))

    def connect(engine: sa.Engine) -> None:
        with engine.connect() as connection:
            connection.execute(sa.select(bench.Job)).all()

    engine = creating()
    bench.engine.dispose()
    with engine.connect() as connection:
        connection.execute(sa.select(bench.Job)).all()
        assert code_of_child(lambda: is_refused(lambda: connect(bench.engine), path)) == 0
        assert code_of_child(lambda: is_refused(lambda: connect(creating()), path)) == 0
        assert code_of_child(lambda: is_refused(lambda: connect(engine), path)) == 0
    assert code_of_child(lambda: connect(engine)) == 0


@pytest.mark.parametrize("api", ["sync"])
def test_a_file_that_the_parent_has_closed_is_not_refused(bench: SQLiteBench) -> None:
    bench.enqueue()
    with bench.engine.connect() as connection:
        connection.detach()
    bench.engine.dispose()
    assert code_of_child(lambda: enqueue_and_drain(bench.file.path)) == 0
    assert bench.states() == {"pending": 1, "completed": 3}


@pytest.mark.parametrize("lock", [notifications, listener], ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_lock_that_was_held_at_the_fork(tmp_path: Path, lock: Any) -> None:
    """A thread of the parent has it, which the child has not, so nothing would release it there."""
    taken, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock._lock:
            taken.set()
            may_end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()

    def work() -> None:
        enqueue_and_drain(tmp_path / "other.db")
        # That of PostgreSQL is not taken on a file.
        assert lock._lock.acquire(timeout=30)

    try:
        assert code_of_child(work) == 0
    finally:
        may_end.set()
        thread.join()


@pytest.mark.parametrize("api", ["sync"])
def test_subscriptions_stay_with_the_parent(bench: SQLiteBench) -> None:
    """In the child, the end of one does not fail, and nothing is delivered to the parent's subscribers."""

    class Subscriber:
        def receive(self, payload: Any) -> None:
            raise AssertionError

    subscriber: Any = Subscriber()

    def work() -> None:
        listener.unsubscribe(subscriber)
        end = notifications.subscribe(bench.engine, lambda *_: None)
        end()
        end_of_parent()

    listener.subscribe(bench.engine, "sqlaqueue_job", subscriber)
    end_of_parent = notifications.subscribe(bench.engine, lambda *_: None)
    try:
        assert code_of_child(work) == 0
    finally:
        end_of_parent()
        listener.unsubscribe(subscriber)


# -- a full disk -------------------------------------------------------------------------------------------------------


class Disk:
    """The space that the connections of some engines have."""

    pages = 1_000_000

    def limit(self, engine: sa.Engine) -> None:
        """Let each transaction of an engine have the pages that there are now."""

        @event.listens_for(engine, "checkout")
        def checkout(connection: Any, *_: object) -> None:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA max_page_count = {self.pages}")
            cursor.close()


def test_jobs_run_when_there_is_space_again(bench: SQLiteBench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sqlaqueue")

    async def write(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id, "x" * 6000))

    keys = bench.enqueue(WRITES, max_attempts=1_000_000)
    server, disk = bench.consumer(write, batch_size=4, concurrency=1), Disk()
    disk.limit(server.sync_engine)
    disk.pages = bench.execute("PRAGMA page_count") + 12
    with server.running():
        wait_until(lambda: "disk is full" in caplog.text, "an error about the disk")
        assert bench.states()["completed"] < WRITES
        disk.pages = 1_000_000
        # The waits after errors become longer and longer.
        wait_until(lambda: bench.states() == Counter(completed=WRITES), "all jobs are completed", 60)
    assert bench.effects() == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("api", ["sync"])
def test_an_enqueue_without_space_adds_nothing(bench: SQLiteBench) -> None:
    bench.enqueue(2)
    disk = Disk()
    disk.limit(bench.engine)
    disk.pages = bench.execute("PRAGMA page_count")
    with bench.sessions() as session:
        session.add_all([bench.Job(payload="x" * 6000) for _ in range(10)])
        with pytest.raises(sa.exc.OperationalError, match="full"):
            session.commit()
    disk.pages = 1_000_000
    assert len(bench.rows()) == 2
    assert len(bench.enqueue(10, payload="x" * 6000)) == 10


# -- idle workers begin at once, whichever process has committed the job ---------------------------------------------


HOUR = 3600


class Claims:
    def __init__(self, engine: sa.Engine) -> None:
        self.number = 0
        event.listen(engine, "before_cursor_execute", self._count)

    def _count(self, _: Any, __: Any, ___: str, ____: Any, context: Any, *_____: Any) -> None:
        self.number += context is not None and CLAIM_OPTION in context.execution_options


@pytest.fixture(params=["{}/./{}", "file:{}/{}?uri=true", "file://{}/{}?mode=rwc&uri=true"])
def other_engine(request: pytest.FixtureRequest, bench: SQLiteBench) -> Iterator[sa.Engine]:
    """Another engine of this process on the same file, by another spelling of its path."""
    path = bench.file.path
    engine = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{request.param.format(path.parent, path.name)}"))
    yield engine
    engine.dispose()


def test_idle_workers_begin_at_once(bench: SQLiteBench, other_engine: sa.Engine) -> None:
    """They have claimed once and would poll again after an hour."""
    ran: list[int] = []

    async def handle(io: Any, job: Any) -> None:
        ran.append(job.id)

    server = bench.consumer(handle, poll_interval=HOUR, concurrency=3)
    claims = Claims(server.sync_engine)
    with server.running():
        wait_until(lambda: claims.number >= 1, "the first poll")
        idle = claims.number
        for number in range(1, 6):
            add(other_engine, bench.Job())
            wait_until(lambda number=number: len(ran) == number, "the job runs")
        wait_until(lambda: bench.states()["completed"] == 5, "the jobs are completed")
    # For each job a claim that finds it and one that finds no other, not one of each worker.
    assert claims.number - idle <= 5 * 3


@pytest.mark.parametrize("api", ["sync"])
def test_only_commits_of_jobs_wake_workers(bench: SQLiteBench, other_engine: sa.Engine) -> None:
    heard: list[tuple[str, str]] = []
    end = subscribe(bench.engine, lambda *what: heard.append(what))
    with Session(other_engine) as session:
        session.add(bench.Job())
        session.flush()
        session.rollback()
        session.add(bench.Owner(name="of no job"))
        session.commit()
        assert heard == []
        session.add_all([bench.Job(), bench.Job()])
        session.flush()
        session.add(bench.Job())
        session.flush()
        assert heard == []
        session.commit()
    assert len(heard) == 1, "one notification for each transaction"
    end()
    bench.enqueue()
    assert len(heard) == 1


@pytest.mark.parametrize("api", ["sync"])
def test_an_idle_consumer_polls_at_its_interval_only(bench: SQLiteBench) -> None:
    """The file is not read all the time: a Consumer that is idle executes no claim until the next poll."""
    server = bench.consumer(poll_interval=HOUR, concurrency=4)
    claims = Claims(server.sync_engine)

    def is_idle() -> bool:
        before = claims.number
        time.sleep(1)
        return claims.number == before

    with server.running():
        wait_until(lambda: claims.number >= 1, "the first poll")
        # A claim that is refused the lock is repeated, so that there may be more than one for each worker.
        wait_until(is_idle, "no more claims")


def enqueue_elsewhere(
    bench: SQLiteBench, key: int, run_at: str = "2020-01-01 00:00:00.000000", priority: int = 0
) -> None:
    """Insert a job by plain SQL on a connection of no engine, as another process may."""
    with contextlib.closing(sqlite3.connect(bench.file.path, timeout=30)) as connection, connection:
        values = (key, "quiet", run_at, priority)
        connection.execute("INSERT INTO job (id, payload, run_at, priority) VALUES (?, ?, ?, ?)", values)


def test_idle_workers_of_another_process_begin_at_once(make_harness: MakeHarness, bench: SQLiteBench) -> None:
    """They would poll again after an hour: for jobs of a session, of plain SQL, and for one that becomes due."""
    with make_harness() as harness:
        worker = harness.start_worker(poll_interval=HOUR)

        def wait_for_run(key: int) -> None:
            done = lambda: [each for each in worker.records("completed") if each.key == key]  # noqa: E731
            harness.wait_until(done, f"job {key} is completed")

        for _ in range(3):
            (key,) = harness.enqueue("quiet")
            wait_for_run(key)
        enqueue_elsewhere(bench, 1000)
        wait_for_run(1000)
        enqueue_elsewhere(bench, 1001, (datetime.now(UTC) + timedelta(seconds=1)).isoformat(" ")[:26])
        wait_for_run(1001)
        harness.stop()


def watchers() -> int:
    return sum(thread.name == "sqlaqueue-watcher" for thread in threading.enumerate())


def test_one_thread_watches_for_all_consumers_of_a_file(bench: SQLiteBench, other_engine: sa.Engine) -> None:
    """It ends with the last one, whose end waits until the connection is closed."""
    path = str(bench.file.path)
    with bench.consumer().running():
        with Consumer(bench.Job, lambda *_: None, sessionmaker(other_engine)):
            # A connection of its own, beside those of the pools.
            wait_until(lambda: watchers() == 1, "the watcher")
        assert watchers() == 1
    assert watchers() == 0
    bench.engine.dispose()
    other_engine.dispose()
    assert transactions._open[path] == 0


class Idle:
    """A Consumer with capacity that never claims, and what it hears."""

    waits, found, has_polled = 1, False, False

    def __init__(self, bench: SQLiteBench, engine: sa.Engine | None = None) -> None:
        self.heard: list[tuple[str, str]] = []
        self.queue = spec_of(bench.Job)
        self.has_polled = engine is None
        self.end = subscribe(engine or bench.engine, lambda *what: self.heard.append(what), (self.queue, self))

    def wait(self) -> None:
        before = len(self.heard)
        wait_until(lambda: len(self.heard) > before, "a notification")


@pytest.mark.parametrize("api", ["sync"])
def test_a_file_that_is_removed_is_not_created_again(bench: SQLiteBench, caplog: pytest.LogCaptureFixture) -> None:
    """It is watched again when there is one."""
    path = bench.file.path
    enqueue_elsewhere(bench, 1)
    idle = Idle(bench)
    try:
        idle.wait()
        bench.engine.dispose()
        for each in path.parent.glob("jobs.db*"):
            each.rename(path.parent / f"moved-{each.name}")
        wait_until(lambda: "cannot look for jobs of other processes, polling" in caplog.text, "the loss is logged")
        time.sleep(0.5)
        assert not path.exists()
        for each in path.parent.glob("moved-jobs.db*"):
            each.rename(path.parent / each.name.removeprefix("moved-"))
        idle.wait()
    finally:
        watcher = idle.end()
        assert watcher is not None
        watcher.thread.join()


@pytest.mark.parametrize("api", ["sync"])
def test_the_first_connection_is_that_of_the_consumer(bench: SQLiteBench) -> None:
    """Another one at the same time would find a dialect that does not know the version of its server yet."""
    engine, connected = prepared(sa.create_engine(bench.file.url())), list[int]()
    event.listen(engine, "connect", lambda *_: connected.append(1))
    idle = Idle(bench, engine)
    try:
        time.sleep(6 * notifications.LOOK)
        assert connected == []
        idle.has_polled = True
        wait_until(lambda: connected == [1], "the connection of the watcher")
    finally:
        idle.end()
        engine.dispose()


@pytest.mark.parametrize("api", ["sync"])
def test_no_transaction_stays_open(bench: SQLiteBench) -> None:
    """A checkpoint that would wait for readers finds none, and removes the content of the log."""
    enqueue_elsewhere(bench, 1)
    idle = Idle(bench)
    try:
        idle.wait()
        bench.enqueue(3)
        assert bench.engine.raw_connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[:2] == (0, 0)
    finally:
        idle.end()


@pytest.mark.parametrize("api", ["sync"])
def test_jobs_that_nobody_claims_are_looked_for_less_often(bench: SQLiteBench) -> None:
    """They belong to others, or the queue is paused. Once a poll finds some, it is as often as before."""
    enqueue_elsewhere(bench, 1)
    idle = Idle(bench)
    watched = notifications._WatchedQueue(bench.engine, idle.queue)
    watched.consumers.append((bench.engine, idle, lambda *_: None))
    with contextlib.closing(bench.engine.raw_connection()) as connection:
        pauses = []
        for found in [*[False] * 8, True, False]:
            idle.found, watched.next_look = found, 0
            watched.look(connection.cursor())
            pauses.append(watched.pause)
    assert pauses[0] == notifications.LOOK
    assert pauses == [*sorted(pauses[:8]), 0, notifications.LOOK]
    assert pauses[7] == 1
    idle.end()


@pytest.mark.parametrize("api", ["sync"])
def test_a_due_job_behind_later_ones_is_found(bench: SQLiteBench) -> None:
    """Each priority has later jobs; the due one has the last priority."""
    watched = notifications._WatchedQueue(bench.engine, spec_of(bench.Job))
    with contextlib.closing(bench.engine.raw_connection()) as connection:
        assert not watched.is_due(connection.cursor())
        for key in range(1, 13):
            enqueue_elsewhere(bench, key, "2999-01-01 00:00:00.000000", priority=key % 4)
        assert not watched.is_due(connection.cursor())
        enqueue_elsewhere(bench, 20, priority=3)
        assert watched.is_due(connection.cursor())
