"""What happens to runs and failed jobs that come back beside a duplicate: in Consumers, by verbs and by functions."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    Consumer,
    JobEvent,
    QueueConfig,
    QueueMixin,
    Retry,
    Snooze,
    Unique,
    cancel,
    claim,
    complete,
    enqueue,
    extend,
    fail,
    release,
    requeue,
    rescue,
    retry,
)
from sqlaqueue.admin import JobFilter, QueueAdmin
from sqlaqueue.admin.changes import requeue_some
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.maintenance import leases as rescue_task
from sqlaqueue.consumer.settle import LOCK_TIMEOUT
from tests.models import insert, read
from tests.programs import wait_until
from tests.unique.models import KEEPING_ROWS, KINDS, create, make_job


@pytest.fixture
def job(engine: sa.Engine) -> Any:
    return create(engine, make_job("update_status", Unique("key", states=("pending",))))


@pytest.fixture
def other(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect() as connection:
        yield connection
        connection.rollback()


def insert_duplicate(connection: sa.Connection, job: Any, number: int, key: str, delay: float = 0) -> None:
    """Insert a job, due after some seconds."""
    run_at = datetime.now(UTC) + timedelta(seconds=delay)
    connection.execute(sa.insert(job.__table__).values(id=number, key=key, run_at=run_at))


@pytest.mark.parametrize("signal", [Retry(0), Snooze(0), ValueError("again")])
def test_a_retry_beside_a_duplicate_is_cancelled(engine: sa.Engine, job: Any, signal: Exception) -> None:
    events: list[JobEvent] = []
    seen: list[int] = []

    def handle(session: Session, each: Any) -> None:
        seen.append(each.id)
        if each.id < 3:
            with engine.begin() as connection:
                insert_duplicate(connection, job, each.id + 10, each.key)
            raise signal

    insert(engine, job, [{"id": number, "key": str(number)} for number in (1, 2, 3)])
    consumer = Consumer(job, handle, sessionmaker(engine), batch_size=3)
    consumer.on("cancelled", events.append)
    consumer.drain()
    assert read(engine, job) == {1: "cancelled", 2: "cancelled", 3: "completed", 11: "completed", 12: "completed"}
    assert sorted(seen) == [1, 2, 3, 11, 12]
    assert {each.key: str(each.error) for each in events} == {(1,): "duplicate of job 11", (2,): "duplicate of job 12"}


@pytest.mark.parametrize("commits", [True, False])
def test_a_retry_waits_for_a_duplicate_that_is_not_committed(
    engine: sa.Engine, job: Any, other: sa.Connection, commits: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile the run keeps its lease, other runs are settled, and nothing is logged as an error."""
    begun = threading.Event()

    def handle(session: Session, each: Any) -> None:
        if each.id == 1 and each.attempts == 1:
            insert_duplicate(other, job, 11, "1", delay=3600)
            begun.set()
            raise Retry(3600)
        if each.id == 2 and each.attempts == 1:
            raise Retry(3600)

    insert(engine, job, [{"id": number, "key": str(number)} for number in (1, 2, 3)])
    with Consumer(job, handle, sessionmaker(engine), batch_size=3, lease=2, poll_interval=0.1):
        begun.wait(10)
        wait_until(lambda: read(engine, job)[2] == "pending")
        wait_until(lambda: read(engine, job)[3] == "completed")
        # Longer than the lease.
        time.sleep(3)
        assert read(engine, job)[1] == "processing"
        other.commit() if commits else other.rollback()
        wait_until(lambda: read(engine, job)[1] == ("cancelled" if commits else "pending"))
    with engine.connect() as connection:
        assert connection.scalar(sa.select(job.attempts).where(job.id == 1)) == 1
    assert "LockNotAvailable" not in caplog.text


@pytest.mark.parametrize("commits", [True, False])
def test_a_rescue_does_not_wait_for_a_duplicate_that_is_not_committed(
    engine: sa.Engine, job: Any, other: sa.Connection, commits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.2)
    with Session(engine) as session:
        session.add_all([job(id=number, key=str(number)) for number in (1, 2, 3)])
        session.commit()
        session.execute(extend(session.scalars(claim(job, 3)).all(), lease=0))
        session.commit()
    insert_duplicate(other, job, 12, "2", delay=3600)
    done: list[int] = []
    consumer = Consumer(job, lambda session, each: done.append(each.id), sessionmaker(engine), poll_interval=0.1)
    with consumer:
        wait_until(lambda: sorted(done) == [1, 3])
        assert read(engine, job)[2] == "processing"
        other.commit() if commits else other.rollback()
        wait_until(lambda: sorted(done) == ([1, 3] if commits else [1, 2, 3]))
        wait_until(lambda: read(engine, job)[2] == ("cancelled" if commits else "completed"))


def test_a_job_that_waits_for_its_duplicate_runs_after_it(engine: sa.Engine) -> None:
    job = create(engine, make_job("update_status", Unique("key", states=("pending",), on_return="wait")))
    order: list[tuple[int, int]] = []

    def handle(session: Session, each: Any) -> None:
        order.append((each.id, each.attempts))
        if len(order) == 1:
            with engine.begin() as connection:
                insert_duplicate(connection, job, 11, "1")
            raise Retry(0)

    insert(engine, job, [{"id": 1, "key": "1"}])
    with Consumer(job, handle, sessionmaker(engine), batch_size=1, poll_interval=0.1):
        wait_until(lambda: order == [(1, 1), (11, 1), (1, 2)])
        wait_until(lambda: read(engine, job) == {1: "completed", 11: "completed"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_enqueues_its_successor(engine: sa.Engine, kind: str) -> None:
    """A running job is its own duplicate, unless it does not count while it runs, or its row is deleted."""
    job = create(engine, make_job(kind))
    created = []

    def handle(session: Session, each: Any) -> None:
        if not created:
            created.append(enqueue(session, job(key="a"))[0].created)

    with Session(engine) as session, session.begin():
        session.add(job(key="a"))
        session.flush()
        if kind == "existing_messages":
            session.execute(job.metadata.tables["message"].insert().values(job_id=1))
    Consumer(job, handle, sessionmaker(engine)).drain()
    assert created == [kind == "rows_are_messages"]


def test_a_job_of_a_batch_that_comes_back_beside_a_successor(engine: sa.Engine, session: Session) -> None:
    """The claim has deleted the rows of a batch, so a handler can enqueue a duplicate of another job of it."""
    job = create(engine, make_job("rows_are_messages"))
    session.add_all([job(id=1, key="a"), job(id=2, key="b")])
    session.commit()
    jobs = session.scalars(claim(job, 2)).all()
    [(duplicate, created)] = enqueue(session, job(id=9, key="b", note="duplicate"))
    assert created
    assert sorted(session.execute(retry(jobs)).all()) == [(1, None), (2, str(duplicate.id))]
    session.commit()
    assert sorted(session.scalars(sa.select(job.id))) == [1, duplicate.id]
    (letter,) = QueueAdmin(session, job).jobs(JobFilter(states=("cancelled",)))
    assert (letter.key, letter.last_error) == (2, f"duplicate of job {duplicate.id}")


def test_admin_requeue_names_duplicates_and_waits_for_none(
    engine: sa.Engine, session: Session, other: sa.Connection
) -> None:
    job = create(engine, make_job("update_status"))
    for number, key in enumerate("abca", 1):
        session.add(job(id=number, key=key))
        session.commit()
        session.execute(fail(session.scalars(claim(job, 1)).all(), error="failed"))
        session.commit()
    insert_duplicate(other, job, 12, "b")
    done = QueueAdmin(session, job).requeue()
    assert (done, done.duplicates, done.left) == (2, {1: "4"}, [2])
    assert read(engine, job) == {1: "cancelled", 2: "failed", 3: "pending", 4: "pending"}
    other.commit()
    done = QueueAdmin(session, job).requeue(session.get_one(job, 2))
    assert (done, done.duplicates, done.left) == (0, {2: "12"}, [])
    assert read(engine, job)[2] == "cancelled"


@pytest.mark.parametrize(("size", "back"), [(1, 1), (2, 2), (3, 3)])
def test_of_the_duplicates_in_a_batch_the_newest_becomes_pending(
    engine: sa.Engine, session: Session, size: int, back: int
) -> None:
    job = create(engine, make_job("update_status"))
    fail_jobs(session, job, *(job(id=number, key="a") for number in (1, 2, 3)))
    done = QueueAdmin(session, job).requeue(batch_size=size)
    assert (done, done.duplicates) == (1, {number: str(back) for number in {1, 2, 3} - {back}})


def test_admin_rescue_waits_for_no_duplicate(
    engine: sa.Engine, session: Session, job: Any, other: sa.Connection
) -> None:
    session.add_all([job(id=number, key=str(number)) for number in (1, 2)])
    session.commit()
    session.execute(extend(session.scalars(claim(job, 3)).all(), lease=0))
    session.commit()
    insert_duplicate(other, job, 12, "2", delay=3600)
    assert QueueAdmin(session, job).rescue() == 1
    assert read(engine, job) == {1: "pending", 2: "processing"}
    other.commit()
    assert QueueAdmin(session, job).rescue() == 1
    assert read(engine, job) == {1: "pending", 2: "cancelled", 12: "pending"}


@pytest.mark.parametrize("change", [QueueAdmin.requeue, QueueAdmin.rescue])
def test_a_duplicate_that_is_committed_while_it_is_waited_for(
    engine: sa.Engine, job: Any, other: sa.Connection, change: Callable[[QueueAdmin], int]
) -> None:
    """The UPDATE violates the index then; repeated, it sees the duplicate."""
    with Session(engine) as session, engine.connect() as observer, ThreadPoolExecutor(1) as thread:
        session.add(job(id=1, key="1"))
        session.commit()
        claimed = session.scalars(claim(job, 1)).all()
        session.execute(fail(claimed) if change is QueueAdmin.requeue else extend(claimed, lease=0))
        session.commit()
        insert_duplicate(other, job, 11, "1")
        pid = session.scalar(sa.select(sa.func.pg_backend_pid()))
        session.connection()
        call = thread.submit(change, QueueAdmin(session, job))
        wait_until(lambda: observer.scalar(sa.select(sa.func.cardinality(sa.func.pg_blocking_pids(pid)))))
        other.commit()
        call.result(20)
    assert read(engine, job) == {1: "cancelled", 11: "pending"}


def test_a_dead_letter_whose_duplicate_is_committed_while_it_is_waited_for(
    engine: sa.Engine, other: sa.Connection
) -> None:
    """The statement does not know the duplicate's key: the letter and the caller's settings stay as they are."""
    job = create(engine, make_job("rows_are_messages"))
    with Session(engine) as session, engine.connect() as observer, ThreadPoolExecutor(1) as thread:
        session.add(job(id=1, key="1"))
        session.commit()
        session.execute(fail(session.scalars(claim(job, 1)).all(), error="failed"))
        session.commit()
        insert_duplicate(other, job, 11, "1")
        pid = session.scalar(sa.select(sa.func.pg_backend_pid()))
        session.execute(sa.text("SET LOCAL lock_timeout = '7s'"))
        call = thread.submit(requeue_some, session, job, JobFilter(), [(1,)])
        wait_until(lambda: observer.scalar(sa.select(sa.func.cardinality(sa.func.pg_blocking_pids(pid)))))
        other.commit()
        done = call.result(20)
        assert (done, done.duplicates, done.left) == (0, {}, [1])
        assert session.scalar(sa.text("SHOW lock_timeout")) == "7s"
        assert [info.last_error for info in QueueAdmin(session, job).jobs(JobFilter(states=("failed",)))] == ["failed"]


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
    insert_duplicate(other, job, 11, "1")
    with Consumer(job, lambda session, each: None, sessionmaker(engine), poll_interval=0.1):
        wait_until(lambda: len(waits) > 1)
    # Those of one job each wait for less.
    assert set(waits) == {LOCK_TIMEOUT}


# -- runs that end beside a duplicate, where jobs are unique only while they wait: retry, release and rescue -----------

END_RUN: dict[str, Callable[[Session, Any, Any], Any]] = {
    "retry": lambda session, _, jobs: session.execute(retry(jobs, error="again")).all(),
    "release": lambda session, _, jobs: session.execute(release(jobs, delay=1)).all(),
    "rescue": lambda session, returning, jobs: (
        session.execute(extend(jobs, lease=0)) and session.execute(rescue(returning)).all()
    ),
}


@pytest.fixture(params=["cancel", "wait"])
def on_return(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def returning(engine: sa.Engine, on_return: Any) -> Any:
    return create(engine, make_job("update_status", Unique("key", states=("pending",), on_return=on_return)))


@pytest.mark.parametrize("end", END_RUN)
def test_a_run_ends_beside_a_duplicate(session: Session, returning: Any, on_return: str, end: str) -> None:
    session.add_all([returning(id=1, key="a"), returning(id=2, key="b")])
    session.commit()
    claimed = session.scalars(claim(returning, 2)).all()
    session.commit()
    session.add(returning(id=3, key="a"))
    session.commit()
    assert sorted(END_RUN[end](session, returning, claimed)) == [(1, "3"), (2, None)]
    session.commit()
    first, second = claimed
    assert (second.status, second.lease_expires_at) == ("pending", None)
    if on_return == "cancel":
        error = "duplicate of job 3\nagain" if end == "retry" else "duplicate of job 3"
        assert (first.status, first.last_error, first.lease_token) == ("cancelled", error, None)
        return
    assert first.status == "processing"
    assert session.execute(rescue(returning)).all() == []
    session.commit()
    (duplicate,) = session.scalars(claim(sa.select(returning).where(returning.id == 3), 1)).all()
    session.commit()
    before = (first.attempts, first.last_error)
    assert session.execute(rescue(returning)).all() == [(1, None)]
    session.commit()
    assert (first.status, first.attempts, first.last_error) == ("pending", *before)
    assert session.scalars(complete(duplicate)).all() == [3]
    session.commit()


def test_two_runs_of_duplicates_that_end_together(engine: sa.Engine, returning: Any, on_return: str) -> None:
    with Session(engine) as session:
        runs = []
        for number in (1, 2, 3):
            session.add(returning(id=number, key="a"))
            session.commit()
            runs += session.scalars(claim(returning, 1)).all()
            session.commit()
        assert sorted(session.execute(retry(runs)).all()) == [(1, "3"), (2, "3"), (3, None)]
        session.commit()
    left = "cancelled" if on_return == "cancel" else "processing"
    assert read(engine, returning) == {1: left, 2: left, 3: "pending"}


def test_cancel_of_a_job_that_waits_for_its_duplicate(engine: sa.Engine) -> None:
    returning = create(engine, make_job("update_status", Unique("key", states=("pending",), on_return="wait")))
    with Session(engine) as session:
        session.add(returning(id=1, key="a"))
        session.commit()
        claimed = session.scalars(claim(returning, 1)).all()
        session.commit()
        session.add(returning(id=2, key="a"))
        session.commit()
        session.execute(retry(claimed))
        session.commit()
        assert session.scalars(cancel(sa.select(returning).where(returning.id == 1))).all() == [1]
        session.commit()
    assert read(engine, returning) == {1: "cancelled", 2: "pending"}


def test_a_poisonous_run_fails_beside_a_duplicate(engine: sa.Engine) -> None:
    """A run that is rescued for the last time fails, and takes no place from its duplicate."""
    returning = create(engine, make_job("update_status", Unique("key", states=("pending",)), max_attempts=1))
    with Session(engine) as session:
        for number in (1, 2):
            session.add(returning(id=number, key="a"))
            session.commit()
            session.execute(extend(session.scalars(claim(returning, 1)).all(), lease=0))
            session.commit()
        session.execute(sa.update(returning).where(returning.id == 1).values(max_attempts=2))
        session.commit()
        assert sorted(session.execute(rescue(returning)).all()) == [(1, None), (2, None)]
        session.commit()
    assert read(engine, returning) == {1: "pending", 2: "failed"}


def test_a_run_without_attempts_fails_although_it_has_a_duplicate(engine: sa.Engine, returning: Any) -> None:
    with Session(engine) as session:
        session.add(returning(id=1, key="a", max_attempts=1))
        session.commit()
        session.execute(extend(session.scalars(claim(returning, 1)).all(), lease=0))
        session.add(returning(id=2, key="a"))
        session.commit()
        assert session.execute(rescue(returning)).all() == [(1, None)]
        session.commit()
    assert read(engine, returning) == {1: "failed", 2: "pending"}


# -- ``requeue()`` of jobs that have a duplicate by now ----------------------------------------------------------------


def fail_jobs(session: Session, job: Any, *jobs: Any) -> None:
    """Enqueue each of the jobs and let it fail, one after the other."""
    for each in jobs:
        session.add(each)
        session.flush()
        if "message" in job.metadata.tables:
            session.execute(job.metadata.tables["message"].insert().values(job_id=each.id))
        session.commit()
        claimed = session.scalars(claim(job, 1)).all()
        session.execute(fail(claimed, error="failed"))
        session.commit()


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unique", [Unique("key"), None], ids=["unique", "plain"])
def test_a_job_without_a_duplicate_comes_back(
    engine: sa.Engine, session: Session, kind: str, unique: Unique | None
) -> None:
    job = create(engine, make_job(kind, unique))
    fail_jobs(session, job, job(id=1, key="a"))
    nothing, found = session.execute(requeue([])), session.execute(requeue(job))
    assert [*found.keys()] == [*nothing.keys()] == ["key", "came_back"]
    assert (nothing.all(), found.all()) == ([], [(1, True)])
    session.commit()
    assert [each.id for each in session.scalars(claim(job, 9))] == [1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nulls_distinct", [True, False])
def test_the_newest_of_failed_duplicates_comes_back(
    engine: sa.Engine, session: Session, kind: str, nulls_distinct: Any
) -> None:
    job = create(engine, make_job(kind, Unique("key", nulls_distinct=nulls_distinct)))
    fail_jobs(session, job, job(id=1, key="a"), job(id=2, key="a"), job(id=3, key="b"), job(id=4), job(id=5))
    found = session.execute(requeue(job)).all()
    session.commit()
    assert sorted(found) == [(1, False), (2, True), (3, True), (4, nulls_distinct), (5, True)]
    assert {each.id for each in session.scalars(claim(job, 9))} == {2, 3, 5} | ({4} if nulls_distinct else set())
    session.rollback()
    ended = QueueAdmin(session, job).jobs(JobFilter(states=("cancelled",)))
    assert {(info.key, info.last_error) for info in ended} >= {(1, "duplicate of job 2\nfailed")}
    assert session.execute(requeue(sa.select(job).where(job.id == 1))).all() == [(1, False)]


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_a_duplicate_that_waits_cancels_the_requeued_job(engine: sa.Engine, kind: str) -> None:
    job = create(engine, make_job(kind))
    with Session(engine) as session:
        fail_jobs(session, job, job(id=1, key="a"))
        session.add_all([job(id=2, key="a"), job(id=3, key="b")])
        session.commit()
        older = session.get_one(job, 1)
        assert session.execute(requeue(older)).all() == [(1, False)]
        session.commit()
        assert (older.status, older.last_error, older.attempts) == ("cancelled", "duplicate of job 2\nfailed", 1)
        assert older.finished_at is not None
    assert read(engine, job) == {1: "cancelled", 2: "pending", 3: "pending"}


def test_a_duplicate_whose_key_differs_in_one_part(engine: sa.Engine, session: Session) -> None:
    class Base(DeclarativeBase):
        pass

    class Report(QueueMixin, Base):
        __tablename__ = "report"
        __queue__ = QueueConfig(unique=Unique("kind"))
        year: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        part: Mapped[str] = mapped_column(primary_key=True)
        kind: Mapped[str]

    create(engine, Report)
    session.add_all([Report(year=1, part="a", kind="tax", status="failed"), Report(year=1, part="b", kind="tax")])
    session.commit()
    assert session.execute(requeue(Report)).all() == [((1, "a"), False)]
    session.commit()
    assert session.get_one(Report, (1, "a")).last_error == "duplicate of job 1,b"


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_on_return_wait_leaves_the_requeued_job_as_it_is(engine: sa.Engine, kind: str) -> None:
    job = create(engine, make_job(kind, Unique("key", on_return="wait")))
    with Session(engine) as session:
        fail_jobs(session, job, job(id=1, key="a"), job(id=2, key="c"))
        session.add(job(id=3, key="a"))
        session.commit()
        version = sa.select(sa.literal_column("xmin::text", sa.Text())).select_from(job).where(job.id == 1)
        before = session.scalar(version)
        assert sorted(session.execute(requeue(job)).all()) == [(1, False), (2, True)]
        session.commit()
        assert session.scalar(version) == before, "the row was written"
    assert read(engine, job) == {1: "failed", 2: "pending", 3: "pending"}


def test_an_error_names_one_duplicate_however_often_the_job_is_requeued(engine: sa.Engine, session: Session) -> None:
    job = create(engine, make_job("update_status"))
    fail_jobs(session, job, job(id=1, key="a"))
    session.add(job(id=2, key="a"))
    session.commit()
    for _ in range(2):
        session.execute(requeue(sa.select(job).where(job.id == 1)))
        session.commit()
    assert session.get_one(job, 1).last_error == "duplicate of job 2\nfailed"


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_a_completed_job_stays_completed(engine: sa.Engine, kind: str) -> None:
    job = create(engine, make_job(kind))
    with Session(engine) as session:
        session.add_all([job(id=1, key="a", status="completed"), job(id=2, key="a")])
        session.commit()
        assert session.execute(requeue(job)).all() == [(1, False)]
        session.commit()
    assert read(engine, job) == {1: "completed", 2: "pending"}
