"""Jobs that come back beside a twin, writes that bypass ``enqueue()``, async sessions, schedules and tables."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue.mariadb
from sqlaqueue import (
    Consumer,
    Retry,
    admin,
    async_enqueue,
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
from sqlaqueue.consumer.core.errors import is_conflict
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.testing import fire_schedules, travel, wait_until
from tests.mariadb.unique_models import EVERY_SECOND, Mail, Order, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.mariadb.server import MariaDBServer

pytestmark = pytest.mark.once

END_RUN: dict[str, Callable[[Session, Any, Any], Any]] = {
    "retry": lambda session, _, jobs: session.execute(retry(jobs, error="again")).all(),
    "release": lambda session, _, jobs: session.execute(release(jobs, delay=1)).all(),
    "rescue": lambda session, job, jobs: session.execute(extend(jobs, lease=0)) and session.execute(rescue(job)).all(),
}


def states(session: Session, model: Any) -> dict[int, str]:
    rows = session.execute(sa.select(model.__table__.c.id, model.__table__.c.status)).all()
    session.rollback()
    return {row[0]: row[1] for row in rows}


@pytest.mark.parametrize("model", [Mail, Waiting])
@pytest.mark.parametrize("end", END_RUN)
def test_a_run_ends_beside_a_twin(unique_engine: sa.Engine, model: Any, end: str) -> None:
    with Session(unique_engine) as session:
        session.add_all([model(id=1, key="a"), model(id=2, key="b")])
        session.commit()
        claimed = session.scalars(claim(model, 2)).all()
        session.commit()
        assert enqueue(session, model(id=3, key="a"))[0].created
        # No twin.
        assert enqueue(session, model(id=4, key="A"))[0].created
        session.commit()
        assert sorted(END_RUN[end](session, model, claimed)) == [(1, "3"), (2, None)]
        session.commit()
        first, second = claimed
        assert (second.status, second.lease_expires_at) == ("pending", None)
        if model is Mail:
            error = "twin: 3\nagain" if end == "retry" else "twin: 3"
            assert (first.status, first.last_error, first.lease_token) == ("cancelled", error, None)
            return
        assert first.status == "processing"
        assert session.execute(rescue(model)).all() == []
        session.commit()
        (twin,) = session.scalars(claim(sa.select(model).where(model.id == 3), 1)).all()
        session.commit()
        assert session.execute(rescue(model)).all() == [(1, None)]
        session.commit()
        assert first.status == "pending"
        assert session.scalars(complete(twin)).all() == [3]
        session.commit()


def test_the_newest_of_failed_twins_comes_back(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        for number, key in enumerate(["a", "a", "A", None, None, "x" * 3000, "x" * 3000 + "y"], start=1):
            session.add(Order(id=number, key=key))
            session.commit()
            session.execute(fail(session.scalars(claim(Order, 1)).all(), error="failed"))
            session.commit()
        assert sorted(session.execute(requeue(Order)).all()) == [(1, "2"), *((number, None) for number in range(2, 8))]
        session.commit()
        ended = admin.jobs(session, Order, admin.JobFilter(states=("cancelled",)))
        assert [(each.key, each.last_error) for each in ended] == [((1,), "twin: 2\nfailed")]
        done = admin.requeue(session, Order, admin.JobFilter(states=("cancelled",)))
        assert (int(done), dict(done.twins)) == (0, {1: "2"})


def test_explain_job_names_the_twin(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        session.add(Order(id=7, key="a"))
        session.commit()
        found = admin.explain_job(session, Order(key="a"))
        assert "7" in str(found)
        assert "twin" in str(admin.explain_job(session, Order(key="a")))


# -- writes that bypass enqueue() --------------------------------------------------------------------------------------


def test_every_way_to_write_a_twin_is_refused(unique_engine: sa.Engine) -> None:
    ways: list[Callable[[Session], Any]] = [
        lambda session: session.execute(sa.insert(Order), [{"key": "b"}, {"key": "a"}]),
        lambda session: session.execute(sa.text("INSERT INTO orders (`key`) VALUES ('a')")),
        lambda session: session.execute(sa.update(Order).where(Order.id == 2).values(key="a")),
        lambda session: session.execute(sa.text("UPDATE orders SET status = 'pending' WHERE id = 3")),
    ]
    with Session(unique_engine) as session:
        session.add_all([Order(id=1, key="a"), Order(id=2, key="c"), Order(id=3, key="a", status="failed")])
        session.commit()
        for way in ways:
            with pytest.raises(IntegrityError, match="ix_orders_queue_unique"):
                way(session)
            session.rollback()
        session.execute(sa.text("UPDATE orders SET `key` = 'A' WHERE id = 2"))
        session.execute(cancel(sa.select(Order).where(Order.id == 1)))
        session.execute(sa.text("UPDATE orders SET status = 'pending' WHERE id = 3"))
        session.commit()
        assert states(session, Order) == {1: "cancelled", 2: "pending", 3: "pending"}


# -- two transactions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("finished_before", [True, False])
def test_enqueue_waits_for_a_twin_that_is_not_committed(
    unique_engine: sa.Engine, commits: Any, finished_before: Any
) -> None:
    result: list[Any] = []

    def enqueue_twin() -> None:
        with Session(unique_engine) as session:
            result.extend((each.job.id, each.created) for each in enqueue(session, [Order(key="b"), Order(key="a")]))
            session.commit()

    with Session(unique_engine) as session:
        if finished_before:
            # The entries of ended jobs are still in the index for a while.
            for number in range(3):
                session.add(Order(id=number + 100, key="a"))
                session.commit()
                session.execute(sa.text("UPDATE orders SET status = 'completed'"))
                session.commit()
        assert enqueue(session, Order(id=1, key="a"))[0].created
        thread = threading.Thread(target=enqueue_twin)
        thread.start()
        waits_for_lock(unique_engine)
        assert not result
        session.commit() if commits else session.rollback()
        thread.join()
        assert [created for _, created in result] == [True, not commits]
        assert (result[1][0] == 1) == commits


def waits_for_lock(engine: sa.Engine) -> None:
    """Wait until a transaction waits for a lock."""
    query = sa.text("SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        # The server renews this table at most ten times a second.
        time.sleep(0.15)
        with engine.connect() as connection:
            if connection.scalar(query):
                return
    pytest.fail("no transaction waits for a lock")


def test_a_deadlock_is_raised_as_such(unique_engine: sa.Engine) -> None:
    """The server has rolled back the transaction with its savepoints, so that enqueue() has none to return to."""
    errors: list[BaseException] = []

    def enqueue_crosswise(session: Session, key: str) -> None:
        try:
            enqueue(session, Order(key=key))
        except OperationalError as error:
            errors.append(error)
        session.rollback()

    with Session(unique_engine) as first, Session(unique_engine) as second:
        # Keys that no ended job has, behind whose entries in the index the server would lock others.
        enqueue(first, Order(key="first"))
        enqueue(second, Order(key="second"))
        threads = [
            threading.Thread(target=enqueue_crosswise, args=each) for each in ((first, "second"), (second, "first"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # One of the two.
        assert [is_conflict(error) for error in errors] == [True]
        assert enqueue(first, Order(key="first"))[0].created


# -- Consumers, async sessions, schedules ------------------------------------------------------------------------------


def test_a_consumer_retries_beside_a_twin(unique_engine: sa.Engine) -> None:
    """The handler enqueues its own successor, and its retry meets it."""

    def handle(session: Session, job: Mail) -> None:
        if job.id == 1:
            with Session(unique_engine) as other:
                enqueue(other, Mail(key="a"))
                other.commit()
            raise RuntimeError("again")

    with Session(unique_engine) as session:
        session.add(Mail(id=1, key="a"))
        session.commit()
        Consumer(Mail, handle, sessionmaker(unique_engine)).drain()
        found = states(session, Mail)
        assert found.pop(1) == "cancelled"
        assert [*found.values()] == ["completed"]


@pytest.mark.parametrize("end", ["retry", "rescue"])
def test_a_consumer_does_not_wait_for_a_twin_that_is_not_committed(unique_engine: sa.Engine, end: str) -> None:
    """The server's own limit, of 50 seconds, is longer than a lease; other jobs are settled meanwhile."""
    sessions = sessionmaker(unique_engine)
    with Session(unique_engine) as session, Session(unique_engine) as other:
        session.add_all([Mail(id=1, key="b"), Mail(id=2, key="a")])
        # InnoDB also locks the entry behind that of a twin, which would be that of the other job.
        later = datetime.now(UTC) + timedelta(days=1)
        session.add_all([Mail(id=number, key=f"between {number}", run_at=later) for number in range(10, 60)])
        session.commit()

        def add_twin() -> None:
            other.add(Mail(id=3, key="b", run_at=later))
            other.flush()

        def handle(_: Session, job: Mail) -> None:
            if job.id == 1 and end == "retry" and not other.in_transaction():
                add_twin()
            if job.attempts == 1 and end == "retry":
                raise Retry(0)

        if end == "rescue":
            session.execute(extend(session.scalars(claim(Mail, 2)).all(), lease=0))
            session.commit()
            add_twin()
        with Consumer(Mail, handle, sessions, poll_interval=0.1):
            wait_until(sessions, (Mail, 2), "completed", timeout=30)
            assert states(session, Mail)[1] == "processing"
            other.commit()
            wait_until(sessions, (Mail, 1), "cancelled", timeout=30)
    with unique_engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar() == 50


def test_async_enqueue(mariadb: MariaDBServer, unique_tables: str, unique_engine: sa.Engine) -> None:
    async def run() -> None:
        engine = create_async_engine(mariadb.url(unique_tables, "mariadb+asyncmy"))
        sqlaqueue.mariadb.prepare(engine)
        async with AsyncSession(engine) as session:
            jobs = [Order(key="a"), Order(key="b"), Order(key="a"), Order()]
            first, second, third, fourth = await async_enqueue(session, jobs)
            assert [first.created, second.created, third.created, fourth.created] == [True, True, False, True]
            assert [each.attempts for each in jobs[:2]] == [0, 0]
            await session.commit()
            [again] = await async_enqueue(session, Order(key="b", note="new"), on_twin="replace")
            assert (again.job, again.job.note, again.created) == (second.job, "new", False)
            await session.commit()

            met: list[int] = []

            def insert_twin(_: Any, __: Any, statement: str, *___: Any) -> None:
                if statement.startswith("/*sqlaqueue unless") and not met:
                    met.append(1)
                    with Session(unique_engine) as other:
                        other.add(Order(key="d"))
                        other.commit()

            sa.event.listen(engine.sync_engine, "before_cursor_execute", insert_twin)
            result = await async_enqueue(session, [Order(key=key) for key in "cde"])
            assert [each.created for each in result] == [True, False, True]
            await session.commit()
        await engine.dispose()

    asyncio.run(run())


def test_a_schedule_enqueues_no_twin(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        created = []
        for _ in range(3):
            created.append(len(fire_schedules(session, [EVERY_SECOND])))
            travel(session, 10)
        # The first call stores the schedule, and fires it if a second has begun meanwhile.
        assert sorted(created) == [0, 0, 1]
        assert session.scalars(sa.select(Order.key)).all() == ["scheduled"]
        assert enqueue(session, Order(key="scheduled"))[0].created is False


# -- tables ------------------------------------------------------------------------------------------------------------


def test_the_column_is_not_seen_by_programs(unique_engine: sa.Engine) -> None:
    with unique_engine.connect() as connection:
        assert "sqlaqueue_unique" not in connection.exec_driver_sql("SELECT * FROM orders").keys()  # noqa: SIM118 - a Result
        connection.exec_driver_sql("SELECT sqlaqueue_unique FROM orders")


def test_a_migration_cannot_create_the_index_without_its_types(unique_engine: sa.Engine) -> None:
    with unique_engine.connect() as connection:
        operations = Operations(MigrationContext.configure(connection))
        with pytest.raises(ConfigurationError, match="ix_mail_queue_unique"):
            operations.create_index(
                "ix_mail_queue_unique", "mail", ["key"], unique=True, postgresql_where=sa.text("status = 'pending'")
            )


def test_the_index_is_missing(unique_engine: sa.Engine) -> None:
    """Jobs would not be unique, so none is enqueued; the index is created for the jobs that are there."""
    table: Any = Mail.__table__
    index = next(each for each in table.indexes if each.unique)
    with Session(unique_engine) as session:
        session.add(Mail(key="a"))
        session.commit()
        index.drop(unique_engine)
        try:
            with pytest.raises(DatabaseNotReadyError, match="lacks the index ix_mail_queue_unique"):
                enqueue(session, Mail(key="b"))
            session.rollback()
        finally:
            index.create(unique_engine)
        assert [each.created for each in enqueue(session, [Mail(key="a"), Mail(key="b")])] == [False, True]
