"""Consumers of queues whose jobs are unique only while they wait: runs that end beside a twin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, JobEvent, Retry, Snooze, Unique, admin, claim, enqueue, extend, fail, retry
from sqlaqueue.consumer.maintenance import leases as rescue_task
from sqlaqueue.consumer.settle import LOCK_TIMEOUT
from tests.unique.models import KINDS, create, make_job, status_of


@pytest.fixture
def job(engine: sa.Engine) -> Any:
    made = make_job("update_status", Unique("key", states=("pending",)))
    create(engine, made)
    return made


@pytest.fixture
def other(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Return the connection of another transaction."""
    with engine.connect() as connection:
        yield connection
        connection.rollback()


def insert_twin(connection: sa.Connection, job: Any, number: int, key: str, delay: float = 0) -> None:
    """Insert a job, due after some seconds."""
    run_at = datetime.now(UTC) + timedelta(seconds=delay)
    connection.execute(sa.insert(job.__table__).values(id=number, key=key, run_at=run_at))


def eventually(condition: Callable[[], Any], timeout: float = 15) -> None:
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize("signal", [Retry(0), Snooze(0), ValueError("again")])
def test_a_retry_beside_a_twin_is_cancelled(engine: sa.Engine, job: Any, signal: Exception) -> None:
    events: list[JobEvent] = []
    seen: list[int] = []

    def handle(session: Session, each: Any) -> None:
        seen.append(each.id)
        if each.id < 3:
            with engine.begin() as connection:
                insert_twin(connection, job, each.id + 10, each.key)
            raise signal

    with Session(engine) as session:
        session.add_all([job(id=number, key=str(number)) for number in (1, 2, 3)])
        session.commit()
    consumer = Consumer(job, handle, sessionmaker(engine), batch_size=3)
    consumer.on("cancelled", events.append)
    consumer.drain()
    assert status_of(engine, job) == {1: "cancelled", 2: "cancelled", 3: "completed", 11: "completed", 12: "completed"}
    assert sorted(seen) == [1, 2, 3, 11, 12]
    assert {each.key: str(each.error) for each in events} == {(1,): "twin: 11", (2,): "twin: 12"}


@pytest.mark.parametrize("commits", [True, False])
def test_a_retry_waits_for_a_twin_that_is_not_committed(
    engine: sa.Engine, job: Any, other: sa.Connection, commits: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile the run keeps its lease, other runs are settled, and nothing is logged as an error."""
    begun = threading.Event()

    def handle(session: Session, each: Any) -> None:
        if each.id == 1 and each.attempts == 1:
            insert_twin(other, job, 11, "1", delay=3600)
            begun.set()
            raise Retry(3600)
        if each.id == 2 and each.attempts == 1:
            raise Retry(3600)

    with Session(engine) as session:
        session.add_all([job(id=number, key=str(number)) for number in (1, 2, 3)])
        session.commit()
    with Consumer(job, handle, sessionmaker(engine), batch_size=3, lease=2, poll_interval=0.1):
        begun.wait(10)
        eventually(lambda: status_of(engine, job)[2] == "pending")
        eventually(lambda: status_of(engine, job)[3] == "completed")
        # Longer than the lease.
        time.sleep(3)
        assert status_of(engine, job)[1] == "processing"
        other.commit() if commits else other.rollback()
        eventually(lambda: status_of(engine, job)[1] == ("cancelled" if commits else "pending"))
    with engine.connect() as connection:
        assert connection.scalar(sa.select(job.attempts).where(job.id == 1)) == 1
    assert "LockNotAvailable" not in caplog.text


@pytest.mark.parametrize("commits", [True, False])
def test_a_rescue_does_not_wait_for_a_twin_that_is_not_committed(
    engine: sa.Engine, job: Any, other: sa.Connection, commits: Any
) -> None:
    with Session(engine) as session:
        session.add_all([job(id=number, key=str(number)) for number in (1, 2, 3)])
        session.commit()
        session.execute(extend(session.scalars(claim(job, 3)).all(), lease=0))
        session.commit()
    insert_twin(other, job, 12, "2", delay=3600)
    done: list[int] = []
    consumer = Consumer(job, lambda session, each: done.append(each.id), sessionmaker(engine), poll_interval=0.1)
    with consumer:
        eventually(lambda: sorted(done) == [1, 3])
        assert status_of(engine, job)[2] == "processing"
        other.commit() if commits else other.rollback()
        eventually(lambda: sorted(done) == ([1, 3] if commits else [1, 2, 3]))
        eventually(lambda: status_of(engine, job)[2] == ("cancelled" if commits else "completed"))


def test_a_job_that_waits_for_its_twin_runs_after_it(engine: sa.Engine) -> None:
    job = make_job("update_status", Unique("key", states=("pending",), on_return="wait"))
    create(engine, job)
    order: list[tuple[int, int]] = []

    def handle(session: Session, each: Any) -> None:
        order.append((each.id, each.attempts))
        if len(order) == 1:
            with engine.begin() as connection:
                insert_twin(connection, job, 11, "1")
            raise Retry(0)

    with Session(engine) as session:
        session.add(job(id=1, key="1"))
        session.commit()
    with Consumer(job, handle, sessionmaker(engine), batch_size=1, poll_interval=0.1):
        eventually(lambda: order == [(1, 1), (11, 1), (1, 2)])
        eventually(lambda: status_of(engine, job) == {1: "completed", 11: "completed"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_enqueues_its_successor(engine: sa.Engine, kind: str) -> None:
    """A running job is its own twin, unless it does not count while it runs, or its row is deleted."""
    job = make_job(kind)
    create(engine, job)
    created = []

    def handle(session: Session, each: Any) -> None:
        if not created:
            created.append(enqueue(session, job(key="a"))[0].created)

    with Session(engine) as session:
        session.add(job(key="a"))
        session.flush()
        if kind == "existing_messages":
            session.execute(job.metadata.tables["message"].insert().values(job_id=1))
        session.commit()
    Consumer(job, handle, sessionmaker(engine)).drain()
    assert created == [kind == "rows_are_messages"]


def test_a_job_of_a_batch_that_comes_back_beside_a_successor(engine: sa.Engine) -> None:
    """The claim has deleted the rows of a batch, so a handler can enqueue a twin of another job of it."""
    job = make_job("rows_are_messages")
    create(engine, job)
    with Session(engine) as session:
        session.add_all([job(id=1, key="a"), job(id=2, key="b")])
        session.commit()
        jobs = session.scalars(claim(job, 2)).all()
        [(twin, created)] = enqueue(session, job(id=9, key="b", note="twin"))
        assert created
        assert sorted(session.execute(retry(jobs)).all()) == [(1, None), (2, str(twin.id))]
        session.commit()
        assert sorted(session.scalars(sa.select(job.id))) == [1, twin.id]
        (letter,) = admin.jobs(session, job, admin.JobFilter(states=("cancelled",)))
        assert (letter.key, letter.last_error) == ((2,), f"twin: {twin.id}")


def test_admin_requeue_names_twins_and_waits_for_none(engine: sa.Engine, other: sa.Connection) -> None:
    job = make_job("update_status")
    create(engine, job)
    with Session(engine) as session:
        for number, key in enumerate("abca", 1):
            session.add(job(id=number, key=key))
            session.commit()
            session.execute(fail(session.scalars(claim(job, 1)).all(), error="failed"))
            session.commit()
        insert_twin(other, job, 12, "b")
        done = admin.requeue(session, job)
        assert (done, done.twins, done.left) == (2, {1: "4"}, [2])
        assert status_of(engine, job) == {1: "cancelled", 2: "failed", 3: "pending", 4: "pending"}
        other.commit()
        done = admin.requeue(session, session.get_one(job, 2))
        assert (done, done.twins, done.left) == (0, {2: "12"}, [])
        assert status_of(engine, job)[2] == "cancelled"


def test_admin_rescue_waits_for_no_twin(engine: sa.Engine, job: Any, other: sa.Connection) -> None:
    with Session(engine) as session:
        session.add_all([job(id=number, key=str(number)) for number in (1, 2)])
        session.commit()
        session.execute(extend(session.scalars(claim(job, 3)).all(), lease=0))
        session.commit()
        insert_twin(other, job, 12, "2", delay=3600)
        assert admin.rescue(session, job) == 1
        assert status_of(engine, job) == {1: "pending", 2: "processing"}
        other.commit()
        assert admin.rescue(session, job) == 1
        assert status_of(engine, job) == {1: "pending", 2: "cancelled", 12: "pending"}


@pytest.mark.parametrize("change", [admin.requeue, admin.rescue])
def test_a_twin_that_is_committed_while_it_is_waited_for(
    engine: sa.Engine, job: Any, other: sa.Connection, change: Callable[[Session, Any], int]
) -> None:
    """The UPDATE violates the index then; repeated, it sees the twin."""
    with Session(engine) as session, engine.connect() as observer, ThreadPoolExecutor(1) as thread:
        session.add(job(id=1, key="1"))
        session.commit()
        claimed = session.scalars(claim(job, 1)).all()
        session.execute(fail(claimed) if change is admin.requeue else extend(claimed, lease=0))
        session.commit()
        insert_twin(other, job, 11, "1")
        pid = session.scalar(sa.select(sa.func.pg_backend_pid()))
        session.connection()
        call = thread.submit(change, session, job)
        eventually(lambda: observer.scalar(sa.select(sa.func.cardinality(sa.func.pg_blocking_pids(pid)))))
        other.commit()
        call.result(20)
    assert status_of(engine, job) == {1: "cancelled", 11: "pending"}


def test_a_dead_letter_whose_twin_is_committed_while_it_is_waited_for(engine: sa.Engine, other: sa.Connection) -> None:
    """The statement does not know the twin's key, so it leaves the letter as it is, and so the caller's settings."""
    job = make_job("rows_are_messages")
    create(engine, job)
    with Session(engine) as session, engine.connect() as observer, ThreadPoolExecutor(1) as thread:
        session.add(job(id=1, key="1"))
        session.commit()
        session.execute(fail(session.scalars(claim(job, 1)).all(), error="failed"))
        session.commit()
        insert_twin(other, job, 11, "1")
        pid = session.scalar(sa.select(sa.func.pg_backend_pid()))
        session.execute(sa.text("SET LOCAL lock_timeout = '7s'"))
        call = thread.submit(admin.requeue_some, session, job, admin.JobFilter(), [(1,)])
        eventually(lambda: observer.scalar(sa.select(sa.func.cardinality(sa.func.pg_blocking_pids(pid)))))
        other.commit()
        done = call.result(20)
        assert (done, done.twins, done.left) == (0, {}, [1])
        assert session.scalar(sa.text("SHOW lock_timeout")) == "7s"
        assert [info.last_error for info in admin.jobs(session, job, admin.JobFilter(states=("failed",)))] == ["failed"]


def test_rescues_one_by_one_end_after_their_time(
    engine: sa.Engine, job: Any, other: sa.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that rescues also extends leases, so many jobs beside one open transaction must not keep it."""
    waits, rescue = list[str](), rescue_task._rescue

    def counted(*args: Any, lock_timeout: str) -> Any:
        waits.append(lock_timeout)
        return rescue(*args, lock_timeout=lock_timeout)

    monkeypatch.setattr(rescue_task, "_rescue", counted)
    monkeypatch.setattr(rescue_task, "_LONGEST", -1.0)
    with Session(engine) as session:
        session.add(job(id=1, key="1"))
        session.commit()
        session.execute(extend(session.scalars(claim(job, 1)).all(), lease=0))
        session.commit()
    insert_twin(other, job, 11, "1")
    with Consumer(job, lambda session, each: None, sessionmaker(engine), poll_interval=0.1):
        eventually(lambda: len(waits) > 1)
    # Those of one job each wait for less.
    assert set(waits) == {LOCK_TIMEOUT}
