"""Unique jobs: a generated column and its index refuse duplicates. ``tests/engines`` has what holds on each engine."""

import asyncio
import random
import threading
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

import sqlaqueue
from sqlaqueue import Consumer, QueueConfig, QueueMixin, Retry, Unique, async_enqueue, claim, enqueue, extend
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.errors import is_conflict
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.testing import wait_until
from tests.faults.conftest import rng as rng  # noqa: PLC0414 - a fixture
from tests.faults.duplicates import (
    CONFIGURATIONS,
    Duplicates,
    administrate,
    engine_of,
    model_of,
    produce,
    violations,
    work,
)
from tests.mariadb.models import Color, Customer, Mail, Order, Periodical, Single, Typed
from tests.mariadb.server import MariaDBServer, until_one_waits
from tests.models import new_base, read

pytestmark = pytest.mark.once


def created(session: Session, jobs: Any, **options: Any) -> list[bool]:
    return [each.created for each in enqueue(session, jobs, **options)]


# -- enqueue() ---------------------------------------------------------------------------------------------------------


def test_texts_are_compared_byte_by_byte(unique_engine: sa.Engine) -> None:
    """The collation of the database pads, and is the same for upper and lower case and for accents."""
    keys = ["a", "A", "a ", " a", "ä", "", "\U0001f600", "x" * 5000, "x" * 4999 + "y"]
    with Session(unique_engine) as session:
        assert created(session, [Order(key=key) for key in keys]) == [True] * len(keys)
        session.commit()
        assert created(session, [Order(key=key) for key in keys]) == [False] * len(keys)
        session.commit()
        session.add(Order(key="x" * 5000))
        with pytest.raises(IntegrityError, match="ix_orders_queue_unique"):
            session.flush()


def test_replacing_locks_the_duplicates_only(unique_engine: sa.Engine) -> None:
    """By the primary key: a scan would lock other jobs, and wait for theirs."""
    with Session(unique_engine) as session, Session(unique_engine) as other:
        session.add_all([Order(id=number, key=f"k{number}") for number in range(1, 40)])
        session.commit()
        other.execute(sa.select(Order).where(Order.id == 3).with_for_update()).all()
        session.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 1"))
        jobs = [Order(key="k2", note="new"), Order(key="k30", note="new")]
        assert created(session, jobs, on_duplicate="replace") == [False, False]
        session.commit()
        other.rollback()
        assert session.scalar(sa.select(sa.func.count()).where(Order.note == "new")) == 2


def test_many_jobs_of_which_one_has_a_duplicate_by_then(unique_engine: sa.Engine) -> None:
    """The savepoint is rolled back, and a second flush inserts the others."""
    sizes: list[int] = []
    duplicates: list[str] = []

    def insert_duplicate(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.startswith("INSERT INTO orders"):
            sizes.append(sum(name.startswith("key__") for name in parameters) or 1)
            if not duplicates:
                # Before the transaction has locked anything, for which this one would wait.
                duplicates.append(parameters["key__1"])
                with Session(unique_engine) as other:
                    other.add(Order(key=duplicates[0], note="duplicate"))
                    other.commit()

    with Session(unique_engine) as session:
        jobs = [Order(key=f"k{number}") for number in range(1200)]
        sa.event.listen(unique_engine, "before_cursor_execute", insert_duplicate)
        try:
            result = enqueue(session, jobs)
        finally:
            sa.event.remove(unique_engine, "before_cursor_execute", insert_duplicate)
        assert sizes == [1000, 1, 1000, 199]
        assert [(each.job.key, each.job.note) for each in result if not each.created] == [(duplicates[0], "duplicate")]
        assert {each.job.made_by for each in result} == {"app!"}
        session.commit()
    assert len(read(unique_engine, Order)) == 1200


def test_errors_of_other_constraints_are_raised(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        session.add(Order(id=5, key="a"))
        session.commit()
        with pytest.raises(IntegrityError, match="PRIMARY"):
            enqueue(session, Order(id=5, key="b"))
        session.rollback()
        with pytest.raises(IntegrityError, match="foreign key"):
            enqueue(session, Periodical(site="x", number=1, customer_id=99))
        session.rollback()
        with pytest.raises(sa.exc.DataError):
            enqueue(session, [Order(key="c", note="n" * 51)])
    assert len(read(unique_engine, Order)) == 1


def test_null_is_a_value_like_others(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        jobs = [Single(key=None), Single(key=0), Single(key=None)]
        assert [each.created for each in enqueue(session, jobs)] == [True, True, False]
        session.commit()
        assert not enqueue(session, Single(key=None))[0].created
        session.rollback()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_duplicate_that_the_snapshot_does_not_have(
    mariadb: MariaDBServer, unique_tables: str, unique_engine: sa.Engine, level: Any
) -> None:
    other = sqlaqueue.prepare(sa.create_engine(mariadb.url(unique_tables), isolation_level=level))
    with Session(other) as session, Session(unique_engine) as first:
        # The snapshot.
        session.scalar(sa.select(sa.func.count()).select_from(Mail))
        first.add(Order(key="a"))
        first.commit()
        if level == "SERIALIZABLE":
            # Each SELECT reads what is committed, and locks it.
            assert created(session, Order(key="a")) == [False]
        else:
            with pytest.raises(IntegrityError, match="ix_orders_queue_unique"):
                enqueue(session, Order(key="a"))
        session.rollback()
        assert created(session, Order(key="a")) == [False]
    other.dispose()


# -- values ------------------------------------------------------------------------------------------------------------


def test_null_keys_are_duplicates_if_configured(unique_engine: sa.Engine) -> None:
    with Session(unique_engine) as session:
        session.add(Customer(id=1))
        session.flush()
        noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
        pairs = [(None, None), (1, None), (None, "a"), (1, "a"), (None, None), (1, None)]
        jobs = [
            Periodical(site="x", number=number, customer_id=customer, kind=kind, created_at=noon)
            for number, (customer, kind) in enumerate(pairs)
        ]
        assert created(session, jobs) == [True] * 4 + [False] * 2
        session.commit()
        session.add(Periodical(site="y", number=1, created_at=noon))
        with pytest.raises(IntegrityError, match="ix_periodical_queue_unique"):
            session.flush()
        session.rollback()
        # A cascade reaches the column too.
        session.execute(sa.delete(Customer))
        session.commit()
        assert session.scalar(sa.select(sa.func.count()).select_from(Periodical)) == 2


def test_a_period(unique_engine: sa.Engine) -> None:
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    long_ago = datetime(1965, 3, 1, 12, tzinfo=UTC)
    with Session(unique_engine) as session:
        for number, start in enumerate((noon, long_ago)):
            minutes = (0, 59, 60, -1, 61, -60)
            jobs = [
                Periodical(site=str(number), number=place, kind="a", created_at=start + timedelta(minutes=minute))
                for place, minute in enumerate(minutes)
            ]
            assert created(session, jobs) == [True, False, True, True, False, False]
        now = [Periodical(site="now", number=number, kind="a") for number in range(2)]
        assert created(session, now) == [True, False]
        session.commit()


OTHER_VALUES: dict[str, Any] = {
    "number": 2**62,
    "name": "NAME",
    "at": datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    "second": datetime(2026, 1, 1, 0, 0, 1),  # noqa: DTZ001 - the column has no time zone
    "day": date(2026, 1, 3),
    "price": Decimal("1.51"),
    "ref": UUID(int=9),
    "text_ref": UUID(int=9),
    "color": Color.BLUE,
    "flag": True,
    "code": "A",
}


def typed(**values: Any) -> Typed:
    moments: dict[str, Any] = {
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "second": datetime(2026, 1, 1, 0, 0, 0, 700000),  # noqa: DTZ001 - the column has no time zone
    }
    return Typed(**{**moments, **values})


def test_each_type(unique_engine: sa.Engine) -> None:
    """A job with another value in one column is no duplicate, and one with the same stored values is."""

    def jobs() -> list[Typed]:
        return [typed(), *(typed(**{name: value}) for name, value in OTHER_VALUES.items())]

    with Session(unique_engine) as session:
        # Seconds. The statements take milliseconds, and took twelve seconds when the server chose an order of its own
        # for the columns.
        session.execute(sa.text("SET SESSION max_statement_time = 5"))
        assert created(session, [*jobs(), typed()]) == [*(True for _ in jobs()), False]
        session.commit()
        assert created(session, jobs()) == [False for _ in jobs()]
        session.execute(sa.text("SET SESSION max_statement_time = DEFAULT"))
        session.commit()
    assert len(read(unique_engine, Typed)) == len(jobs())


@pytest.mark.parametrize(
    "type_", [sa.Float(), sa.JSON(), sa.dialects.postgresql.JSONB(), sa.LargeBinary(), sa.Interval(), sa.Time()]
)
def test_other_types_are_refused(unique_engine: sa.Engine, type_: Any) -> None:
    def define() -> Any:
        class Job(QueueMixin, new_base()):
            __tablename__ = "refused"
            __queue__ = QueueConfig(unique=Unique("value"))
            id: Mapped[int] = mapped_column(primary_key=True)
            value: Mapped[Any] = mapped_column(type_)

        return Job

    with pytest.raises(ConfigurationError, match=r"Job: Unique\('value'\)"):
        define().metadata.create_all(unique_engine)


# -- two transactions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("finished_before", [True, False])
def test_enqueue_waits_for_a_duplicate_that_is_not_committed(
    unique_engine: sa.Engine, commits: Any, finished_before: Any
) -> None:
    result: list[Any] = []

    def enqueue_duplicate() -> None:
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
        thread = threading.Thread(target=enqueue_duplicate)
        thread.start()
        until_one_waits(unique_engine)
        assert not result
        session.commit() if commits else session.rollback()
        thread.join()
        assert [created for _, created in result] == [True, not commits]
        assert (result[1][0] == 1) == commits


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


# -- Consumers and async sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["retry", "rescue"])
def test_a_consumer_does_not_wait_for_a_duplicate_that_is_not_committed(
    unique_engine: sa.Engine, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own limit, of 50 seconds, is longer than a lease; other jobs are settled meanwhile."""
    monkeypatch.setattr(pace, "RESCUE", 0.2)
    sessions = sessionmaker(unique_engine)
    with Session(unique_engine) as session, Session(unique_engine) as other:
        session.add_all([Mail(id=1, key="b"), Mail(id=2, key="a")])
        # InnoDB also locks the entry behind that of a duplicate, which would be that of the other job.
        later = datetime.now(UTC) + timedelta(days=1)
        session.add_all([Mail(id=number, key=f"between {number}", run_at=later) for number in range(10, 60)])
        session.commit()

        def add_duplicate() -> None:
            other.add(Mail(id=3, key="b", run_at=later))
            other.flush()

        def handle(_: Session, job: Mail) -> None:
            if job.id == 1 and end == "retry" and not other.in_transaction():
                add_duplicate()
            if job.attempts == 1 and end == "retry":
                raise Retry(0)

        if end == "rescue":
            session.execute(extend(session.scalars(claim(Mail, 2)).all(), lease=0))
            session.commit()
            add_duplicate()
        with Consumer(Mail, handle, sessions, poll_interval=0.1):
            wait_until(sessions, (Mail, 2), "completed", timeout=30)
            assert read(unique_engine, Mail)[1] == "processing"
            other.commit()
            wait_until(sessions, (Mail, 1), "cancelled", timeout=30)
    with unique_engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar() == 50


def test_async_enqueue(mariadb: MariaDBServer, unique_tables: str, unique_engine: sa.Engine) -> None:
    async def run() -> None:
        engine = sqlaqueue.prepare(create_async_engine(mariadb.url(unique_tables, "mariadb+asyncmy")))
        async with AsyncSession(engine) as session:
            jobs = [Order(key="a"), Order(key="b"), Order(key="a"), Order()]
            first, second, third, fourth = await async_enqueue(session, jobs)
            assert [first.created, second.created, third.created, fourth.created] == [True, True, False, True]
            assert [each.attempts for each in jobs[:2]] == [0, 0]
            await session.commit()
            [again] = await async_enqueue(session, Order(key="b", note="new"), on_duplicate="replace")
            assert (again.job, again.job.note, again.created) == (second.job, "new", False)
            await session.commit()

            met: list[int] = []

            def insert_duplicate(_: Any, __: Any, statement: str, *___: Any) -> None:
                if statement.startswith("INSERT INTO orders") and not met:
                    met.append(1)
                    with Session(unique_engine) as other:
                        other.add(Order(key="d"))
                        other.commit()

            sa.event.listen(engine.sync_engine, "before_cursor_execute", insert_duplicate)
            result = await async_enqueue(session, [Order(key=key) for key in "cde"])
            assert [each.created for each in result] == [True, False, True]
            await session.commit()
        await engine.dispose()

    asyncio.run(run())


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


# -- several processes -------------------------------------------------------------------------------------------------


USUAL = ("unfinished", "waiting")
NAMES = [name for name, (kind, _) in CONFIGURATIONS.items() if kind == "update_status"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.thorough) for name in NAMES]
)
def test_no_two_duplicates_count_and_no_job_is_lost(
    mariadb: MariaDBServer, tmp_path: Path, name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mariadb.database() as database:
        url = mariadb.url(database)
        engine = engine_of(url)
        model_of(name).metadata.create_all(engine)
        with Duplicates(engine, url, name, tmp_path, rng) as test:
            test.run((produce, produce, produce, administrate, work, work), jobs=15)
            # Of the jobs that wait for duplicates with one key, each rescue lets one go on.
            monkeypatch.setattr(pace, "RESCUE", 0.2)
            test.drain()
            history = test.history()
            assert violations(history) == {}
        assert sum(map(len, history.observed)) > 20
        assert len(history.jobs) > 10
        assert history.duplicates or "waiting" not in str(test.unique.states)
        engine.dispose()
