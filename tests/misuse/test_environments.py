"""Claims and Consumers refuse sessions and databases that cannot work, and report what is missing or outdated."""

import asyncio
import logging
import queue
import re
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, QueueConfig, QueueMixin, Unique, cancel, claim, complete, purge, rescue
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.start_checks import missing_index_advice
from tests.models import STRATEGIES, execute, insert, make_job
from tests.servers import Database
from tests.shared_database import engine as engine  # noqa: PLC0414 - a fixture
from tests.shared_database import shared as shared  # noqa: PLC0414 - a fixture


@pytest.fixture(params=STRATEGIES)
def model(request: pytest.FixtureRequest) -> Any:
    return make_job(request.param)


@pytest.fixture
def filled(engine: sa.Engine, model: Any) -> sa.Engine:
    model.metadata.create_all(engine)
    insert(engine, model, 3)
    return engine


def handle(session: Any, job: Any) -> None:
    """Do nothing."""


async def handle_async(session: Any, job: Any) -> None:
    """Do nothing."""


@pytest.fixture
def sqlite() -> Iterator[sa.Engine]:
    filled = sa.create_engine("sqlite://")
    yield filled
    filled.dispose()


def test_a_second_claim_in_the_same_transaction(filled: sa.Engine, model: Any) -> None:
    """SKIP LOCKED does not skip rows that its own transaction has locked."""
    with Session(filled) as session:
        first = session.scalars(claim(model, 2)).all()
        if model.__queue__.strategy == "batch_select":
            with pytest.raises(StatementError, match=r"Job \d was claimed twice in one transaction"):
                session.scalars(claim(model, 2)).all()
            session.execute(complete(first))
        assert len(session.scalars(claim(model, 2)).all()) == 1


def test_a_claim_with_yield_per(filled: sa.Engine, model: Any) -> None:
    """A claim that only locks rows works; a claim that writes is refused before it claims."""
    with Session(filled) as session:
        statement = claim(model, 3).execution_options(yield_per=2)
        if model.__queue__.strategy == "batch_select":
            assert len(session.scalars(statement).all()) == 3
            return
        with pytest.raises(StatementError, match=r"yield_per=2 .* claim fewer jobs at a time"):
            session.scalars(statement)
        session.rollback()
        assert len(session.scalars(claim(model, 3)).all()) == 3


def test_a_claim_after_a_rollback(filled: sa.Engine, model: Any) -> None:
    with Session(filled) as session:
        savepoint = session.begin_nested()
        first = session.scalars(claim(model, 5)).all()
        savepoint.rollback()
        assert len(session.scalars(claim(model, 5)).all()) == len(first)
        session.rollback()
        assert len(session.scalars(claim(model, 5)).all()) == len(first)


def test_a_claim_in_an_aborted_transaction_raises_the_usual_error(filled: sa.Engine, model: Any) -> None:
    """The errors are those of any other statement, and no job is claimed."""
    with Session(filled) as session:
        with pytest.raises(sa.exc.DataError):
            session.execute(sa.text("SELECT 1 / 0"))
        with pytest.raises(sa.exc.InternalError, match="current transaction is aborted"):
            session.scalars(claim(model, 1)).all()
        session.rollback()
        session.add(model(id=1))
        with pytest.raises(sa.exc.IntegrityError):
            session.scalars(claim(model, 1)).all()
        with pytest.raises(sa.exc.PendingRollbackError, match=r"first issue Session\.rollback"):
            session.scalars(claim(model, 1)).all()
    with Session(filled) as session:
        assert len(session.scalars(claim(model, 5)).all()) == 3


@pytest.mark.once
@pytest.mark.parametrize("verb", [lambda model: claim(model, 1), rescue, cancel, purge])
def test_another_database_is_refused(sqlite: sa.Engine, model: Any, verb: Any) -> None:
    """No statement is sent: without SKIP LOCKED two workers could claim the same job."""
    said = r"engine is for sqlite, and is not prepared; use engine = sqlaqueue\.prepare\(create_engine\("
    with Session(sqlite) as session, pytest.raises(ConfigurationError, match=said):
        session.execute(verb(model))


@pytest.mark.once
def test_a_consumer_on_another_database_is_refused(sqlite: sa.Engine, model: Any) -> None:
    sessions = sessionmaker(sqlite)
    with pytest.raises(ConfigurationError, match=r"Consumer\(Job, \.\.\.\): its sessions' engine is for sqlite"):
        Consumer(model, handle, sessions).run()


@pytest.mark.parametrize("pool_size", [1, 2])
def test_a_pool_that_is_too_small_is_refused(filled: sa.Engine, model: Any, pool_size: int) -> None:
    small = create_async_engine(filled.url, pool_size=pool_size, max_overflow=0)
    consumer = AsyncConsumer(model, handle_async, async_sessionmaker(small), concurrency=2)
    with pytest.raises(ConfigurationError, match=rf"needs 3 connections, .* allows {pool_size}; .*pool_size=3"):
        asyncio.run(consumer.run())


def test_an_engine_with_autocommit_is_refused(filled: sa.Engine, model: Any) -> None:
    sessions = sessionmaker(filled.execution_options(isolation_level="AUTOCOMMIT"))
    with pytest.raises(ConfigurationError, match=r"Job commit each statement by itself \(AUTOCOMMIT\)"):
        Consumer(model, handle, sessions).run()


# -- a starting Consumer reports objects that the database lacks, or has in an outdated version ------------------------


class Base(DeclarativeBase):
    pass


class Order(QueueMixin, Base):
    __tablename__ = "the order's"  # a name that contains a quote and must be quoted
    __table_args__ = {"schema": "shop"}  # noqa: RUF012 - as SQLAlchemy reads it
    __queue__ = QueueConfig(strategy="delete_returning")
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def shop(database: Database) -> Iterator[sa.Engine]:
    """An engine on a database of the test's own with the tables of Order."""
    shop = sa.create_engine(database.url())
    execute(shop, "CREATE SCHEMA shop")
    Base.metadata.create_all(shop)
    yield shop
    shop.dispose()


MISSING = {
    'DROP TABLE shop."the order\'s"': r"the table shop\.the order's",
    "DROP TABLE shop.sqlaqueue_crash_journal": r"needs: the table shop\.sqlaqueue_crash_journal;",
    'DROP TABLE shop."sqlaqueue_message_the order\'s" CASCADE': r"the table shop\.sqlaqueue_message_the order's",
    'ALTER TABLE shop."the order\'s" DROP COLUMN max_attempts': r"needs: the column shop\.the order's\.max_attempts;",
    'DROP TRIGGER sqlaqueue_message_update ON shop."the order\'s"': (
        r"needs: the trigger sqlaqueue_message_update of shop\.the order's;"
    ),
}


@pytest.mark.parametrize("statement", MISSING)
def test_a_missing_object_is_reported_with_the_fix(shop: sa.Engine, statement: str) -> None:
    execute(shop, statement)
    with pytest.raises(ConfigurationError, match=MISSING[statement]) as refused:
        Consumer(Order, handle, sessionmaker(shop), concurrency=2).run()
    assert "the database lacks what Order needs" in str(refused.value)
    assert "alembic upgrade head`" in str(refused.value)


@pytest.mark.parametrize(
    "statement",
    [
        'DROP TRIGGER sqlaqueue_wake_insert ON shop."the order\'s"',
        pytest.param('DROP FUNCTION shop."sqlaqueue_wake_the order\'s" CASCADE', marks=pytest.mark.thorough),
    ],
)
def test_missing_wake_triggers_are_reported_and_jobs_are_polled(
    shop: sa.Engine, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    execute(shop, statement)
    handled: queue.Queue[int] = queue.Queue()
    sessions = sessionmaker(shop)
    with Consumer(Order, lambda session, job: handled.put(job.id), sessions, poll_interval=0.02):
        for number in (1, 2):
            with sessions.begin() as session:
                session.add(Order(id=number))
            assert handled.get(timeout=30) == number
    (said,) = [record.message for record in caplog.records if "is not up to date" in record.message]
    assert "sqlaqueue_wake_" in said
    assert "is missing" in said
    assert "until then idle Consumers are not notified of new jobs, and find them at their next poll" in said
    assert "alembic upgrade head`" in said


INDEXES = {
    'DROP INDEX shop."ix_sqlaqueue_message_the order\'s_claim"': True,
    "UPDATE pg_index SET indisvalid = false "
    "WHERE indexrelid = 'shop.\"ix_sqlaqueue_message_the order''s_claim\"'::regclass": True,
    'ALTER INDEX shop."ix_sqlaqueue_message_the order\'s_claim" RENAME TO mine': False,
}


@pytest.mark.parametrize("statement", INDEXES)
def test_a_missing_index_is_reported(shop: sa.Engine, statement: str, caplog: pytest.LogCaptureFixture) -> None:
    execute(shop, statement)
    assert Consumer(Order, handle, sessionmaker(shop)).drain() == 0
    said = [record.message for record in caplog.records if "claims may read the whole table" in record.message]
    with Session(shop) as session:
        missing = QueueAdmin(session, Order).stats().missing_indexes
    assert missing == (["ix_sqlaqueue_message_the order's_claim"] if INDEXES[statement] else [])
    assert len(said) == len(missing)
    for text in said:
        is_missing = statement.startswith("DROP")
        assert "the index ix_sqlaqueue_message_the order's_claim of shop.sqlaqueue_message_the order's is " in text
        assert (" is missing, so" in text, "alembic upgrade head`" in text) == (is_missing, is_missing)
        assert f"{'CREATE' if is_missing else 'REINDEX'} INDEX CONCURRENTLY " in text
        follow(shop, text)
        assert advice(shop, Order) is None


@pytest.mark.once
def test_a_missing_index_of_the_job_table_is_reported(engine: sa.Engine) -> None:
    job = make_job()
    job.metadata.create_all(engine)
    assert advice(engine, job) is None
    execute(engine, "DROP INDEX ix_job_queue_claim; DROP INDEX ix_job_queue_lease")
    text = advice(engine, job)
    assert text is not None
    assert "Job: the indexes ix_job_queue_claim of job, ix_job_queue_lease of job are missing, so claims" in text
    follow(engine, text)
    assert advice(engine, job) is None


def advice(engine: sa.Engine, model: Any) -> str | None:
    with engine.connect() as connection:
        return missing_index_advice(connection, spec_of(model))


@pytest.mark.parametrize(
    "statement",
    [
        "DROP INDEX ix_job_queue_unique",
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_job_queue_unique'::regclass",
    ],
)
def test_a_missing_unique_index_is_reported(
    engine: sa.Engine, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a statement that creates it, and replaces an invalid one."""
    job = make_job(unique=Unique("payload", within=3600, nulls_distinct=False))
    job.metadata.create_all(engine)
    assert advice(engine, job) is None
    execute(engine, statement)
    assert Consumer(job, handle, sessionmaker(engine)).drain() == 0
    (text,) = [record.message for record in caplog.records if "jobs are not unique" in record.message]
    fault = "missing" if statement.startswith("DROP") else "invalid"
    assert f"the index ix_job_queue_unique of job is {fault}, so jobs are not unique, and enqueue() fails. " in text
    with Session(engine) as session:
        assert QueueAdmin(session, job).stats().missing_indexes == ["ix_job_queue_unique"]
    execute(engine, "DROP INDEX ix_job_queue_claim")
    both = advice(engine, job)
    assert both is not None
    assert "so claims may read the whole table, jobs are not unique, and enqueue() fails" in both
    follow(engine, both)
    assert advice(engine, job) is None


def test_a_message_trigger_that_is_disabled_is_reported(shop: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Polling does not find jobs that have no message."""
    execute(shop, 'ALTER TABLE shop."the order\'s" DISABLE TRIGGER sqlaqueue_message_insert')
    assert Consumer(Order, handle, sessionmaker(shop)).drain() == 0
    (said,) = [record.message for record in caplog.records if "is not up to date" in record.message]
    assert "the trigger sqlaqueue_message_insert is disabled" in said
    assert said.endswith("until then jobs may get no message, or be admitted wrongly, and so are not claimed")


def follow(shop: sa.Engine, advice: str) -> None:
    """Execute what an owner is told to execute, one statement after the other, not in a transaction."""
    with shop.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in re.split(r"; (?=\w+ (?:UNIQUE )?INDEX)", advice.partition("not in a transaction: ")[2]):
            connection.exec_driver_sql(statement)


def test_an_async_consumer_reports_missing_objects(shop: sa.Engine) -> None:
    execute(shop, "DROP TABLE shop.sqlaqueue_crash_journal")

    async def serve() -> None:
        async_engine = create_async_engine(shop.url.set(drivername="postgresql+asyncpg"))
        try:
            await AsyncConsumer(Order, handle_async, async_sessionmaker(async_engine)).run()
        finally:
            await async_engine.dispose()

    with pytest.raises(ConfigurationError, match="sqlaqueue_crash_journal"):
        asyncio.run(serve())


@pytest.mark.parametrize("comment", ["'sqlaqueue, version 0'", "NULL", "'something else'"])
def test_an_outdated_trigger_function_is_reported(
    shop: sa.Engine, comment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue keeps working with an outdated function."""
    with shop.begin() as connection:
        name = connection.scalar(
            sa.text("SELECT oid::regprocedure::text FROM pg_proc WHERE proname ~ '^sqlaqueue_message'")
        )
        connection.exec_driver_sql(f"COMMENT ON FUNCTION {name} IS {comment}")
        connection.exec_driver_sql('INSERT INTO shop."the order\'s" DEFAULT VALUES')
    with caplog.at_level(logging.WARNING, "sqlaqueue"):
        assert Consumer(Order, handle, sessionmaker(shop)).drain() == 1
    assert "is of version 0, and version 3 is needed" in caplog.text
    assert "alembic upgrade head`" in caplog.text


def test_a_complete_database_is_not_reported(shop: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The schema may be renamed by schema_translate_map."""
    execute(shop, 'ALTER SCHEMA shop RENAME TO "o\'shop"')
    for options in ({}, {"schema_translate_map": {"shop": "o'shop"}}):
        sessions = sessionmaker(shop.execution_options(**options))
        consumer = Consumer(Order, handle, sessions)
        if options:
            assert consumer.drain() == 0
        else:
            with pytest.raises(ConfigurationError, match="the table shop"):
                consumer.drain()
    assert "version" not in caplog.text
