"""Waiting for the end of a job, on a real server. Nobody polls here unless a test is about that."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import sqlaqueue
from sqlaqueue import JobFailed, JobResult, WaitTimeout, async_wait, cancel, claim, complete, fail, wait
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.mapping import spec_of
from sqlaqueue.serving import awaited, pace
from sqlaqueue.strategies.wake_up_triggers import channel_of
from tests.consumer.bench import Bench, Server, wait_until
from tests.servers import Database
from tests.servers import Server as PostgresServer

LATER = 600.0
"""Seconds that no test waits for."""

MIXED = [("update_status", "async"), ("delete_returning", "sync"), ("batch_select", "async"), ("own_message", "sync")]


@pytest.fixture(params=MIXED, ids="-".join)
def mixed(request: pytest.FixtureRequest, supply: Any) -> Bench:
    """Each strategy, rows that are their own messages too, and each colour."""
    return supply.take(*request.param)


@pytest.fixture
def leased(supply: Any) -> Bench:
    return supply.take("update_status", "sync")


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits looks when it begins, and when it is told something; until it hears, as ever."""
    monkeypatch.setattr(pace, "SWEEP", LATER)
    monkeypatch.setattr(awaited, "LONGEST_PAUSE", LATER)
    looked = awaited.Waiting.looked

    def not_again(self: awaited.Waiting) -> None:
        looked(self)
        if self.hears:
            self._look_at = self._now() + LATER

    monkeypatch.setattr(awaited.Waiting, "looked", not_again)


class Waiter:
    """Somebody who waits in a thread, in the colour of a bench."""

    def __init__(self, bench: Bench, job: Any, **options: Any) -> None:
        self.bench, self.job, self.options = bench, job, options
        self.result: JobResult[Any] | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            if self.bench.colour == "sync":
                engine = sa.create_engine(self.bench.database.url(), poolclass=sa.NullPool)
                self.result = wait(sessionmaker(engine), self.job, **self.options)
            else:
                self.result = asyncio.run(self._wait_async())
        except BaseException as error:  # noqa: BLE001 - for the test to see
            self.error = error

    async def _wait_async(self) -> JobResult[Any]:
        engine = create_async_engine(self.bench.database.url("asyncpg"), poolclass=sa.NullPool)
        try:
            return await async_wait(async_sessionmaker(engine), self.job, **self.options)
        finally:
            await engine.dispose()

    @property
    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> JobResult[Any]:
        self._thread.join(30)
        assert not self._thread.is_alive(), "it waits on"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Gate:
    """A handler that waits for its turn, and then does as it is told."""

    def __init__(self, *raised: Exception) -> None:
        self.started, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.raised = [*raised]

    async def __call__(self, hands: Any, job: Any) -> None:
        self.started.release()
        event = threading.Event()
        threading.Thread(target=lambda: (self.go_on.acquire(), event.set()), daemon=True).start()
        await hands.wait(event)
        if self.raised:
            raise self.raised.pop(0)

    def await_start(self) -> None:
        assert self.started.acquire(timeout=60), "the handler was not called"


@contextlib.contextmanager
def serving(bench: Bench, gate: Gate, **options: Any) -> Iterator[Server]:
    async def handle(hands: Any, job: Any) -> None:
        await gate(hands, job)

    with bench.consumer(handle, **{"poll_interval": 0.05} | options).running() as server:
        wait_until(lambda: server.consumer._shift.calls.hears, "that the Consumer hears")
        yield server


def knows(server: Server, key: int) -> bool:
    """Tell whether a Consumer knows that somebody waits for a job."""
    return str(key) in server.consumer._shift.plan.awaited._until


@contextlib.contextmanager
def heard(bench: Bench) -> Iterator[Callable[[], list[str]]]:
    """Give a function that returns what has been said of ends by now."""
    with bench.database.connect() as connection:
        connection.execute(f'LISTEN "{channel_of(spec_of(bench.Job))}"'.encode())

        def said() -> list[str]:
            connection.execute("SELECT 1")
            return [each.payload for each in connection.notifies(timeout=0.1) if each.payload.startswith("ended")]

        yield said


# -- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize(
    ("raised", "state"),
    [(None, "completed"), (sqlaqueue.Fail("broken"), "failed"), (sqlaqueue.Cancel("unwanted"), "cancelled")],
    ids=["completed", "failed", "cancelled"],
)
def test_whoever_waits_is_woken_by_the_end(mixed: Bench, raised: Exception | None, state: str) -> None:
    gate = Gate(*([raised] if raised else []))
    with serving(mixed, gate) as server, heard(mixed) as said:
        (key,) = mixed.enqueue(payload="x")
        gate.await_start()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: knows(server, key))
        assert said() == []
        gate.go_on.release()
        result = waiter.end()
        wait_until(lambda: said() == [f'ended ["{key}"]'])
        assert not knows(server, key)
    assert result.state == state
    assert result.error == {"completed": None, "failed": "broken", "cancelled": "unwanted"}[state]
    if mixed.has_status:
        assert result.job is not None
        assert (result.job.id, result.job.status, result.job.payload) == (key, state, "x")
        assert result.job.finished_at is not None
        assert sa.inspect(result.job).detached
    else:
        assert result.job is None


@pytest.mark.usefixtures("no_polling")
def test_another_attempt_is_no_end(mixed: Bench) -> None:
    gate = Gate(ValueError("again"), sqlaqueue.Snooze(0))
    with serving(mixed, gate) as server, heard(mixed) as said:
        (key,) = mixed.enqueue()
        gate.await_start()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: knows(server, key))
        for _ in range(2):
            gate.go_on.release()
            gate.await_start()
            assert waiter.is_waiting
            assert said() == []
        gate.go_on.release()
        assert waiter.end().state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_nothing_is_said_of_jobs_that_nobody_waits_for(mixed: Bench) -> None:
    gate = Gate()
    with serving(mixed, gate, batch_size=1) as server, heard(mixed) as said:
        key, other = mixed.enqueue(2)
        gate.await_start()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: knows(server, key))
        gate.go_on.release()
        gate.go_on.release()
        wait_until(lambda: mixed.states()["pending"] == mixed.states()["processing"] == 0)
        waiter.end()
        assert said() == [f'ended ["{key}"]']
        assert other


@pytest.mark.usefixtures("no_polling")
def test_many_wait_for_many(leased: Bench) -> None:
    """One connection listens for all of them."""
    engine = sa.create_engine(leased.database.url(), pool_size=5)
    sessions, results = sessionmaker(engine), []
    gate = Gate()
    with serving(leased, gate, concurrency=4) as server:
        keys = leased.enqueue(4)
        threads = [
            threading.Thread(target=lambda key=key: results.append(wait(sessions, (leased.Job, key), timeout=60).state))
            for key in keys * 25
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(knows(server, key) for key in keys))
        listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        wait_until(lambda: leased.execute(listening) == 2)
        for _ in keys:
            gate.go_on.release()
        for thread in threads:
            thread.join(30)
    assert results == ["completed"] * 100
    engine.dispose()


def test_a_job_that_has_ended_is_not_waited_for(mixed: Bench) -> None:
    (key,) = mixed.enqueue()
    mixed.consumer().drain()
    assert Waiter(mixed, (mixed.Job, key), timeout=0).end().state == "completed"


def test_a_job_is_looked_for_where_nobody_says_anything(mixed: Bench) -> None:
    """Somebody ends it who is no Consumer, or does not hear."""
    gone, cancelled = mixed.enqueue(2)
    waiters = [Waiter(mixed, (mixed.Job, key), timeout=60) for key in (gone, cancelled)]
    with mixed.sessions() as session:
        session.execute(sa.delete(mixed.Job).where(mixed.Job.id == gone))
        session.execute(cancel(sa.select(mixed.Job).where(mixed.Job.id == cancelled)))
        session.commit()
    first, second = (waiter.end() for waiter in waiters)
    assert (first.state, first.job) == ("gone" if mixed.has_status else "completed", None)
    assert second.state == "cancelled"


def test_without_notifications_it_looks(server: PostgresServer) -> None:
    with server.database() as database:
        bench = Bench(database, "update_status", notify=False)
        bench.create()
        (key,) = bench.enqueue()
        waiter = Waiter(bench, (bench.Job, key), timeout=60)
        bench.consumer().drain()
        assert waiter.end().state == "completed"


def test_a_job_that_is_deleted_when_completed(database: Database) -> None:
    class Base(sa.orm.DeclarativeBase):
        pass

    class Task(sqlaqueue.QueueMixin, Base):
        __tablename__ = "task"
        __queue__ = sqlaqueue.QueueConfig(on_complete="delete", columns={"last_error": None})
        left: sa.orm.Mapped[int] = sa.orm.mapped_column(primary_key=True)
        right: sa.orm.Mapped[str] = sa.orm.mapped_column(primary_key=True)

    engine = sa.create_engine(database.url())
    Base.metadata.create_all(engine)
    sessions = sessionmaker(engine)
    with sessions() as session:
        task = Task(left=1, right="a b")
        session.add(task)
        session.commit()
        with pytest.raises(WaitTimeout, match=r"Task \(1, 'a b'\) has not ended within 0 s"):
            wait(sessions, task, timeout=0)
        sqlaqueue.Consumer(Task, lambda session, task: None, sessions).drain()
        assert wait(sessions, task) == JobResult("completed", None)
        with pytest.raises(StatementError, match=r"wait\(\(Task, 1\)\): that is not its key, which is \(left, right\)"):
            wait(sessions, (Task, 1))
    engine.dispose()


@pytest.mark.once
def test_a_state_that_is_none_of_the_queue_s(leased: Bench) -> None:
    (key,) = leased.enqueue()
    leased.execute("UPDATE job SET status = 'archived'")
    result = wait(leased.sessions, (leased.Job, key))
    assert result.state == "gone"
    assert result.job.status == "archived"


# -- with check, and in time ----------------------------------------------------------------------------------------------


def test_what_has_not_been_completed_raises_when_asked_to(mixed: Bench) -> None:
    (key,) = mixed.enqueue()
    with mixed.sessions() as session:
        session.execute(fail(session.scalars(claim(mixed.Job, 1)).all(), error="no such address"))
        session.commit()
    with pytest.raises(JobFailed, match=f"^Job {key} has failed: no such address$") as raised:
        Waiter(mixed, (mixed.Job, key), check=True).end()
    assert raised.value.result.state == "failed"
    assert Waiter(mixed, (mixed.Job, key)).end().state == "failed"


@pytest.mark.parametrize("timeout", [0, 0.3, timedelta(seconds=0.3)])
def test_the_time_comes_to_an_end(mixed: Bench, timeout: Any) -> None:
    (key,) = mixed.enqueue()
    with pytest.raises(TimeoutError, match=f"Job {key} has not ended within 0") as raised:
        Waiter(mixed, (mixed.Job, key), timeout=timeout).end()
    assert isinstance(raised.value, sqlaqueue.SqlaqueueError)


def test_a_task_that_waits_can_be_cancelled(supply: Any) -> None:
    bench = supply.take("update_status", "async")
    (key,) = bench.enqueue()

    async def cancelled() -> None:
        engine = create_async_engine(bench.database.url("asyncpg"))
        task = asyncio.create_task(async_wait(async_sessionmaker(engine), (bench.Job, key)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.dispose()

    asyncio.run(cancelled())


# -- races and outages -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_polling")
def test_the_job_ends_between_the_first_look_and_the_announcement(
    leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = leased.enqueue()
    announce = sqlaqueue.serving.waiting.announce

    def drained_before(session: Session, waiter: Any) -> None:
        leased.consumer().drain()
        announce(session, waiter)

    monkeypatch.setattr(sqlaqueue.serving.waiting, "announce", drained_before)
    # Were there no look after the announcement, nobody would ever tell.
    monkeypatch.setattr(awaited, "FIRST_PAUSE", LATER)
    assert wait(leased.sessions, (leased.Job, key), timeout=60).state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_a_consumer_that_comes_later_learns_of_it(mixed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "REPEAT", 0.2)
    key = enqueue_for_later(mixed)
    waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
    gate = Gate()
    with serving(mixed, gate) as server:
        wait_until(lambda: knows(server, key))
        gate.go_on.release()
        assert waiter.end().state == "completed"


def enqueue_for_later(bench: Bench) -> int:
    """Add a job that is due when a Consumer has long begun: one that holds a transaction hears when it is idle."""
    bench.execute("INSERT INTO job (run_at) VALUES (now() + interval '2 s')")
    (key,) = bench.rows()
    return key


@pytest.mark.usefixtures("no_polling")
def test_connections_are_lost_meanwhile(mixed: Bench) -> None:
    gate = Gate()
    with serving(mixed, gate) as server:
        key = enqueue_for_later(mixed)
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: knows(server, key))
        mixed.database.kill_backends()
        gate.await_start()
        gate.go_on.release()
        assert waiter.end().state == "completed"


def test_a_rescued_job_that_fails_for_good_is_an_end(leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SWEEP", 0.1)
    (key,) = leased.enqueue(max_attempts=1)
    with leased.sessions() as session:
        session.scalars(claim(leased.Job, 1)).all()
        session.commit()
    with serving(leased, Gate()) as server:
        waiter = Waiter(leased, (leased.Job, key), timeout=60)
        wait_until(lambda: knows(server, key))
        with heard(leased) as said:
            leased.execute("UPDATE job SET lease_expires_at = now()")
            result = waiter.end()
            assert said() == [f'ended ["{key}"]']
    assert result.state == "failed"
    assert result.error is not None
    assert "lease expired" in result.error


# -- what cannot be waited for -----------------------------------------------------------------------------------------


@pytest.mark.once
def test_what_nobody_else_can_see_is_refused(leased: Bench) -> None:
    with leased.sessions() as session:
        job = leased.Job()
        with pytest.raises(StatementError, match="this Job is not in the database; add it to a session and commit"):
            wait(leased.sessions, job)
        session.add(job)
        with pytest.raises(StatementError, match="is not in the database"):
            wait(leased.sessions, job)
        session.flush()
        open_transaction = r"wait\(\): Job \(1,\) has been written in a transaction that is still open"
        with pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)
        with session.begin_nested(), pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)
        session.commit()
        assert job.id == 1  # a transaction has begun, which has written nothing
        with pytest.raises(WaitTimeout):
            wait(leased.sessions, job, timeout=0)
        job.payload = "x"
        with pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)
        session.flush()
        with pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)
        session.rollback()
        with pytest.raises(WaitTimeout):
            wait(leased.sessions, job, timeout=0)
        session.delete(job)
        with pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)


@pytest.mark.once
def test_a_job_that_was_rolled_back_is_refused(leased: Bench) -> None:
    with leased.sessions() as session:
        job = leased.Job()
        session.add(job)
        session.flush()
        session.rollback()
        with pytest.raises(StatementError, match="is not in the database"):
            wait(leased.sessions, job)


@pytest.mark.parametrize("strategy", ["batch_select", "delete_returning"])
def test_a_job_in_one_s_own_hands_is_refused(supply: Any, strategy: str) -> None:
    bench = supply.take(strategy, "sync")
    bench.enqueue()
    with bench.sessions() as session:
        (job,) = session.scalars(claim(bench.Job, 1)).all()
        with pytest.raises(StatementError, match="is held by a transaction of this program"):
            wait(bench.sessions, job)
        session.execute(complete(job))
        session.commit()
        assert wait(bench.sessions, job).state == "completed"


@pytest.mark.once
def test_what_is_no_job_is_refused(leased: Bench) -> None:
    for nothing in (5, "job", None, [leased.Job, 5], (leased.Job,), (leased.Job, 5, 6)):
        with pytest.raises(StatementError, match="give an instance of a queue class, or the class with a key"):
            wait(leased.sessions, nothing)
    with pytest.raises(StatementError, match=r"\(Job, None\)\): that is not its key, which is \(id\)"):
        wait(leased.sessions, (leased.Job, None))
    with pytest.raises(NotAQueueError, match="Owner is not a queue"):
        wait(leased.sessions, (leased.Owner, 5))
    with pytest.raises(ConfigurationError, match=r"wait\(timeout=...\) must be seconds or a timedelta"):
        wait(leased.sessions, (leased.Job, 5), timeout=-1)
    assert wait(leased.sessions, (leased.Job, 5)) == JobResult("gone", None)


@pytest.mark.once
def test_sessions_of_the_other_colour_are_refused(leased: Bench) -> None:
    made: Any = async_sessionmaker(create_async_engine(leased.database.url("asyncpg")))
    with pytest.raises(ConfigurationError, match="makes AsyncSession; give a sessionmaker, or use async_wait"):
        wait(made, (leased.Job, 5))
    sync: Any = leased.sessions
    with pytest.raises(ConfigurationError, match="makes Session; give an async_sessionmaker, or use wait"):
        asyncio.run(async_wait(sync, (leased.Job, 5)))
    with leased.sessions() as session:
        itself: Any = session
        with pytest.raises(ConfigurationError, match="give what makes sessions, such as a sessionmaker"):
            wait(itself, (leased.Job, 5))


@pytest.mark.once
def test_the_session_of_a_scoped_session_is_left_alone(leased: Bench) -> None:
    scoped = scoped_session(leased.sessions)
    (key,) = leased.enqueue()
    job = scoped().get(leased.Job, key)
    with pytest.raises(WaitTimeout):
        wait(scoped, job, timeout=0)
    assert job in scoped()
    scoped.remove()


@pytest.mark.once
def test_a_replica_is_refused(postgres_server: PostgresServer) -> None:
    """A server in recovery answers like a replica."""
    with postgres_server.database() as database:
        bench = Bench(database, "update_status")
        bench.create()
        (key,) = bench.enqueue()
        postgres_server.stop()
        signal = postgres_server.data / "standby.signal"
        signal.touch()
        try:
            postgres_server.start()
            with pytest.raises(ConfigurationError, match="read from a replica.*give a sessionmaker of the primary's"):
                wait(bench.sessions, (bench.Job, key))
        finally:
            postgres_server.stop()
            signal.unlink()
            postgres_server.start()
