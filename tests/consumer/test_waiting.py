"""A caller that waits for a job receives its result, or a timeout, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from asyncpg.exceptions import InternalClientError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue
from sqlaqueue import JobFailed, JobResult, WaitTimeout, async_wait, cancel, claim, fail, wait
from sqlaqueue.consumer import pace
from sqlaqueue.exc import StatementError
from sqlaqueue.waiting import wait as wait_module
from tests.consumer.bench import LATER, Bench, Gate, Server, notifications
from tests.consumer.conftest import MIXED
from tests.programs import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers import Database
    from tests.servers import Server as PostgresServer


class Waiter:
    """Calls ``wait()`` or ``async_wait()`` in a thread."""

    def __init__(self, bench: Bench, job: Any, **options: Any) -> None:
        self.bench, self.job, self.options = bench, job, options
        self.result: JobResult[Any] | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            if self.bench.api == "sync":
                engine = sa.create_engine(self.bench.database.url(), poolclass=sa.NullPool)
                self.result = wait(sessionmaker(engine), self.job, **self.options)
            else:
                self.result = asyncio.run(self._wait_async())
        except BaseException as error:  # noqa: BLE001 - end() raises it
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
        assert not self._thread.is_alive(), "still waiting"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


@contextlib.contextmanager
def serving(bench: Bench, gate: Gate, **options: Any) -> Iterator[Server]:
    with bench.consumer(gate, **options).running() as server:
        wait_until(lambda: server.context.polls.peers.listening, "that the Consumer listens")
        yield server


def remembers(server: Server, key: int) -> bool:
    """Return whether a Consumer remembers that a caller waits for a job."""
    return str(key) in server.context.waiters._until


def enqueue_for_later(bench: Bench) -> int:
    """Add a job that make_due() makes due: a Consumer that holds a transaction receives notifications while idle."""
    bench.execute("INSERT INTO job (run_at) VALUES (now() + interval '1 h')")
    (key,) = bench.rows()
    return key


def make_due(bench: Bench) -> None:
    bench.execute("UPDATE job SET run_at = now()")


@pytest.fixture(params=[*MIXED, ("own_message", "sync")], ids="-".join)
def mixed(request: pytest.FixtureRequest, supply: Any) -> Bench:
    """Each strategy, also with rows that are messages, sync and async."""
    return supply.take(*request.param)


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is listening, a waiting caller polls only after notifications."""
    monkeypatch.setattr(pace, "RESCUE", LATER)
    monkeypatch.setattr(wait_module, "MAX_DELAY", LATER)
    not_settled = wait_module.WaitState.not_settled

    def no_next_poll(self: wait_module.WaitState) -> None:
        not_settled(self)
        if self.listening:
            self._poll_at = self._now() + LATER

    monkeypatch.setattr(wait_module.WaitState, "not_settled", no_next_poll)


@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize(
    ("raised", "state"),
    [(None, "completed"), (sqlaqueue.Fail("broken"), "failed"), (sqlaqueue.Cancel("unwanted"), "cancelled")],
    ids=["completed", "failed", "cancelled"],
)
def test_the_caller_is_woken_when_the_job_is_settled(mixed: Bench, raised: Exception | None, state: str) -> None:
    gate = Gate(*([raised] if raised else []))
    with serving(mixed, gate) as server, notifications(mixed, "settled") as received:
        (key,) = mixed.enqueue(payload="x")
        gate.await_call()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        assert received() == []
        gate.let_go()
        result = waiter.end()
        wait_until(lambda: received() == [f'settled ["{key}"]'])
        assert not remembers(server, key)
    assert result.state == state
    assert result.error == {"completed": None, "failed": "Fail: broken", "cancelled": "unwanted"}[state]
    if mixed.has_status:
        assert result.job is not None
        assert (result.job.id, result.job.status, result.job.payload) == (key, state, "x")
        assert result.job.finished_at is not None
        assert sa.inspect(result.job).detached
    else:
        assert result.job is None


@pytest.mark.usefixtures("no_polling")
def test_a_retried_attempt_does_not_end_the_wait(mixed: Bench) -> None:
    gate = Gate(ValueError("again"), sqlaqueue.Snooze(0))
    with serving(mixed, gate) as server, notifications(mixed, "settled") as received:
        (key,) = mixed.enqueue()
        gate.await_call()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        for _ in range(2):
            gate.let_go()
            gate.await_call()
            assert waiter.is_waiting
            assert received() == []
        gate.let_go()
        assert waiter.end().state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_no_notification_for_jobs_without_a_waiting_caller(mixed: Bench) -> None:
    gate = Gate()
    with serving(mixed, gate, batch_size=1) as server, notifications(mixed, "settled") as received:
        key, other = mixed.enqueue(2)
        gate.await_call()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        gate.let_go()
        gate.let_go()
        wait_until(lambda: mixed.states()["pending"] == mixed.states()["processing"] == 0)
        waiter.end()
        assert received() == [f'settled ["{key}"]']
        assert other


@pytest.mark.usefixtures("no_polling")
def test_many_callers_wait_for_many_jobs(sync_leased: Bench) -> None:
    """One connection listens for all callers."""
    engine = sa.create_engine(sync_leased.database.url(), pool_size=5)
    sessions, results = sessionmaker(engine), []
    gate = Gate()
    with serving(sync_leased, gate, concurrency=4) as server:
        keys = sync_leased.enqueue(4)
        threads = [
            threading.Thread(
                target=lambda key=key: results.append(wait(sessions, (sync_leased.Job, key), timeout=60).state)
            )
            for key in keys * 25
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(remembers(server, key) for key in keys))
        listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        wait_until(lambda: sync_leased.execute(listening) == 2)
        for _ in keys:
            gate.let_go()
        for thread in threads:
            thread.join(30)
    assert results == ["completed"] * 100
    engine.dispose()


def test_a_finished_job_returns_immediately(mixed: Bench) -> None:
    (key,) = mixed.enqueue()
    mixed.consumer().drain()
    assert Waiter(mixed, (mixed.Job, key), timeout=0).end().state == "completed"


def test_polling_finds_jobs_settled_without_a_notification(mixed: Bench) -> None:
    """They are settled by SQL, or by a Consumer that does not receive announcements."""
    gone, cancelled = mixed.enqueue(2)
    waiters = [Waiter(mixed, (mixed.Job, key), timeout=60) for key in (gone, cancelled)]
    with mixed.sessions() as session:
        session.execute(sa.delete(mixed.Job).where(mixed.Job.id == gone))
        session.execute(cancel(sa.select(mixed.Job).where(mixed.Job.id == cancelled)))
        session.commit()
    first, second = (waiter.end() for waiter in waiters)
    assert (first.state, first.job) == ("gone" if mixed.has_status else "completed", None)
    assert second.state == "cancelled"


def test_without_notifications_the_caller_polls(server: PostgresServer) -> None:
    with server.database() as database:
        bench = Bench(database, "update_status", notify=False)
        bench.create()
        (key,) = bench.enqueue()
        waiter = Waiter(bench, (bench.Job, key), timeout=60)
        bench.consumer().drain()
        assert waiter.end().state == "completed"


def test_a_job_deleted_when_completed(database: Database) -> None:
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
        with pytest.raises(WaitTimeout, match=r"Task 1,a b has not finished within 0 s"):
            wait(sessions, task, timeout=0)
        sqlaqueue.Consumer(Task, lambda session, task: None, sessions).drain()
        assert wait(sessions, task) == JobResult("completed", None)
        with pytest.raises(
            StatementError, match=r"wait\(..., Task, 1\): this is not a primary key, which is \(left, right\)"
        ):
            wait(sessions, (Task, 1))
    engine.dispose()


@pytest.mark.once
def test_an_unknown_status_value(sync_leased: Bench) -> None:
    (key,) = sync_leased.enqueue()
    sync_leased.execute("UPDATE job SET status = 'archived'")
    result = wait(sync_leased.sessions, (sync_leased.Job, key))
    assert result.state == "gone"
    assert result.job.status == "archived"


def test_check_raises_unless_the_job_is_completed(mixed: Bench) -> None:
    (key,) = mixed.enqueue()
    with mixed.sessions() as session:
        session.execute(fail(session.scalars(claim(mixed.Job, 1)).all(), error="no such address"))
        session.commit()
    with pytest.raises(JobFailed, match=f"^Job {key} has failed: no such address$") as raised:
        Waiter(mixed, (mixed.Job, key), check=True).end()
    assert raised.value.result.state == "failed"
    assert Waiter(mixed, (mixed.Job, key)).end().state == "failed"


@pytest.mark.parametrize("timeout", [0, 0.3, timedelta(seconds=0.3)])
def test_the_timeout_raises(mixed: Bench, timeout: Any) -> None:
    (key,) = mixed.enqueue()
    with pytest.raises(TimeoutError, match=f"Job {key} has not finished within 0") as raised:
        Waiter(mixed, (mixed.Job, key), timeout=timeout).end()
    assert isinstance(raised.value, sqlaqueue.SqlaqueueError)


def test_a_waiting_task_can_be_cancelled(async_leased: Bench) -> None:
    (key,) = async_leased.enqueue()

    async def cancelled() -> None:
        engine = create_async_engine(async_leased.database.url("asyncpg"))
        task = asyncio.create_task(async_wait(async_sessionmaker(engine), (async_leased.Job, key)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.dispose()

    asyncio.run(cancelled())


# -- races, lost connections and dead workers during a wait --------------------------------------------------------


@pytest.mark.usefixtures("no_polling")
def test_a_job_settled_between_the_first_poll_and_the_notification(
    sync_leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = sync_leased.enqueue()
    notify = sqlaqueue.waiting.wait.notify_consumers

    def drained_before(session: Session, waiter: Any) -> None:
        sync_leased.consumer().drain()
        notify(session, waiter)

    monkeypatch.setattr(sqlaqueue.waiting.wait, "notify_consumers", drained_before)
    # Without a poll after the notification the caller would never return.
    monkeypatch.setattr(wait_module, "FIRST_DELAY", LATER)
    assert wait(sync_leased.sessions, (sync_leased.Job, key), timeout=60).state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_a_consumer_started_later_receives_an_announcement(mixed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_module, "NOTIFY_INTERVAL", 0.2)
    key = enqueue_for_later(mixed)
    waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
    gate = Gate()
    with serving(mixed, gate) as server:
        wait_until(lambda: remembers(server, key))
        make_due(mixed)
        gate.let_go()
        assert waiter.end().state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_connections_lost_during_a_wait(mixed: Bench) -> None:
    gate = Gate()
    with serving(mixed, gate) as server:
        key = enqueue_for_later(mixed)
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        mixed.database.kill_backends()
        make_due(mixed)
        gate.await_call()
        gate.let_go()
        assert waiter.end().state == "completed"


def test_an_internal_error_of_asyncpg_is_retried(sync_leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that asyncpg raises for a connection closed between two statements; SQLAlchemy does not wrap it.

    It is simulated, as it depends on timing: the server's last message has been read, the end of the socket has not.
    """
    notify, errors = (
        sqlaqueue.waiting.wait.notify_consumers,
        [InternalClientError("another operation is in progress")],
    )

    def notify_with_error(session: Session, waiter: Any) -> None:
        if errors:
            raise errors.pop()
        notify(session, waiter)

    monkeypatch.setattr(sqlaqueue.waiting.wait, "notify_consumers", notify_with_error)
    (key,) = sync_leased.enqueue()
    waiter = Waiter(sync_leased, (sync_leased.Job, key), timeout=60)
    wait_until(lambda: not errors)
    sync_leased.consumer().drain()
    assert waiter.end().state == "completed"


def test_a_rescued_job_that_fails_for_good_ends_the_wait(sync_leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.1)
    (key,) = sync_leased.enqueue(max_attempts=1)
    with sync_leased.sessions() as session:
        session.scalars(claim(sync_leased.Job, 1)).all()
        session.commit()
    with serving(sync_leased, Gate()) as server:
        waiter = Waiter(sync_leased, (sync_leased.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        with notifications(sync_leased, "settled") as received:
            sync_leased.execute("UPDATE job SET lease_expires_at = now()")
            result = waiter.end()
            assert received() == [f'settled ["{key}"]']
    assert result.state == "failed"
    assert result.error is not None
    assert "lease expired" in result.error
