"""A waiting caller receives the result of the job, or a timeout."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

import sqlaqueue
from sqlaqueue import JobFailed, JobResult, WaitTimeout, async_wait, cancel, claim, fail, wait
from sqlaqueue.exc import StatementError
from tests.consumer.bench import Bench
from tests.consumer.waiting.waiter import Gate, Waiter, remembers, serving, settled_notifications
from tests.programs import wait_until
from tests.servers import Database
from tests.servers import Server as PostgresServer


@pytest.mark.each_value
@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize(
    ("raised", "state"),
    [(None, "completed"), (sqlaqueue.Fail("broken"), "failed"), (sqlaqueue.Cancel("unwanted"), "cancelled")],
    ids=["completed", "failed", "cancelled"],
)
def test_the_caller_is_woken_when_the_job_is_settled(mixed: Bench, raised: Exception | None, state: str) -> None:
    gate = Gate(*([raised] if raised else []))
    with serving(mixed, gate) as server, settled_notifications(mixed) as received:
        (key,) = mixed.enqueue(payload="x")
        gate.await_start()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        assert received() == []
        gate.go_on.release()
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
    with serving(mixed, gate) as server, settled_notifications(mixed) as received:
        (key,) = mixed.enqueue()
        gate.await_start()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        for _ in range(2):
            gate.go_on.release()
            gate.await_start()
            assert waiter.is_waiting
            assert received() == []
        gate.go_on.release()
        assert waiter.end().state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_no_notification_for_jobs_without_a_waiting_caller(mixed: Bench) -> None:
    gate = Gate()
    with serving(mixed, gate, batch_size=1) as server, settled_notifications(mixed) as received:
        key, other = mixed.enqueue(2)
        gate.await_start()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        gate.go_on.release()
        gate.go_on.release()
        wait_until(lambda: mixed.states()["pending"] == mixed.states()["processing"] == 0)
        waiter.end()
        assert received() == [f'settled ["{key}"]']
        assert other


@pytest.mark.usefixtures("no_polling")
def test_many_callers_wait_for_many_jobs(leased: Bench) -> None:
    """One connection listens for all callers."""
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
        wait_until(lambda: all(remembers(server, key) for key in keys))
        listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        wait_until(lambda: leased.execute(listening) == 2)
        for _ in keys:
            gate.go_on.release()
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
def test_an_unknown_status_value(leased: Bench) -> None:
    (key,) = leased.enqueue()
    leased.execute("UPDATE job SET status = 'archived'")
    result = wait(leased.sessions, (leased.Job, key))
    assert result.state == "gone"
    assert result.job.status == "archived"


# -- check and timeout ------------------------------------------------------------------------------------------------


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


def test_a_waiting_task_can_be_cancelled(supply: Any) -> None:
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
