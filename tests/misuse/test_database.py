"""A starting Consumer reports objects that the database lacks, or has in an outdated version."""

from __future__ import annotations

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

from sqlaqueue import AsyncConsumer, Consumer, QueueConfig, QueueMixin, Unique, admin
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.start_checks import missing_index_advice
from tests.servers import Server


class Base(DeclarativeBase):
    pass


class Order(QueueMixin, Base):
    __tablename__ = "the order's"  # a name that contains a quote and must be quoted
    __table_args__ = {"schema": "shop"}  # noqa: RUF012 - as SQLAlchemy reads it
    __queue__ = QueueConfig(strategy="delete_returning")
    id: Mapped[int] = mapped_column(primary_key=True)


def handle(session: Any, job: Any) -> None:
    """Do nothing."""


async def handle_async(session: Any, job: Any) -> None:
    """Do nothing."""


@pytest.fixture
def engine(server: Server) -> Iterator[sa.Engine]:
    with server.database() as database:
        engine = sa.create_engine(database.url())
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA shop")
        Base.metadata.create_all(engine)
        yield engine
        engine.dispose()


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
def test_a_missing_object_is_reported_with_the_fix(engine: sa.Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    with pytest.raises(ConfigurationError, match=MISSING[statement]) as refused:
        Consumer(Order, handle, sessionmaker(engine), concurrency=2).run()
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
    engine: sa.Engine, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    handled: queue.Queue[int] = queue.Queue()
    sessions = sessionmaker(engine)
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
def test_a_missing_index_is_reported(engine: sa.Engine, statement: str, caplog: pytest.LogCaptureFixture) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    assert Consumer(Order, handle, sessionmaker(engine)).drain() == 0
    said = [record.message for record in caplog.records if "claims may read the whole table" in record.message]
    with Session(engine) as session:
        missing = admin.stats(session, Order).missing_indexes
    assert missing == (["ix_sqlaqueue_message_the order's_claim"] if INDEXES[statement] else [])
    assert len(said) == len(missing)
    for text in said:
        is_missing = statement.startswith("DROP")
        assert "the index ix_sqlaqueue_message_the order's_claim of shop.sqlaqueue_message_the order's is " in text
        assert (" is missing, so" in text, "alembic upgrade head`" in text) == (is_missing, is_missing)
        assert f"{'CREATE' if is_missing else 'REINDEX'} INDEX CONCURRENTLY " in text
        follow(engine, text)
        with engine.begin() as connection:
            assert missing_index_advice(connection, spec_of(Order)) is None


@pytest.mark.once
def test_a_missing_index_of_the_job_table_is_reported(engine: sa.Engine) -> None:
    class Other(DeclarativeBase):
        pass

    class Job(QueueMixin, Other):
        __tablename__ = "job"
        id: Mapped[int] = mapped_column(primary_key=True)

    Other.metadata.create_all(engine)
    with engine.begin() as connection:
        assert missing_index_advice(connection, spec_of(Job)) is None
        connection.exec_driver_sql("DROP INDEX ix_job_queue_claim; DROP INDEX ix_job_queue_lease")
        text = missing_index_advice(connection, spec_of(Job))
        assert text is not None
        assert "Job: the indexes ix_job_queue_claim of job, ix_job_queue_lease of job are missing, so claims" in text
    follow(engine, text)
    with engine.begin() as connection:
        assert missing_index_advice(connection, spec_of(Job)) is None


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

    class Other(DeclarativeBase):
        pass

    class Job(QueueMixin, Other):
        __tablename__ = "job"
        __queue__ = QueueConfig(unique=Unique("key", per=3600, nulls_distinct=False))
        id: Mapped[int] = mapped_column(primary_key=True)
        key: Mapped[str | None]

    Other.metadata.create_all(engine)
    with engine.begin() as connection:
        assert missing_index_advice(connection, spec_of(Job)) is None
        connection.exec_driver_sql(statement)
    assert Consumer(Job, handle, sessionmaker(engine)).drain() == 0
    (text,) = [record.message for record in caplog.records if "jobs are not unique" in record.message]
    fault = "missing" if statement.startswith("DROP") else "invalid"
    assert f"the index ix_job_queue_unique of job is {fault}, so jobs are not unique, and enqueue() fails. " in text
    with Session(engine) as session:
        assert admin.stats(session, Job).missing_indexes == ["ix_job_queue_unique"]
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP INDEX ix_job_queue_claim")
        both = missing_index_advice(connection, spec_of(Job))
        assert both is not None
        assert "so claims may read the whole table, jobs are not unique, and enqueue() fails" in both
    follow(engine, both)
    with engine.begin() as connection:
        assert missing_index_advice(connection, spec_of(Job)) is None


def test_a_message_trigger_that_is_disabled_is_reported(engine: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Polling does not find jobs that have no message."""
    with engine.begin() as connection:
        connection.exec_driver_sql('ALTER TABLE shop."the order\'s" DISABLE TRIGGER sqlaqueue_message_insert')
    assert Consumer(Order, handle, sessionmaker(engine)).drain() == 0
    (said,) = [record.message for record in caplog.records if "is not up to date" in record.message]
    assert "the trigger sqlaqueue_message_insert is disabled" in said
    assert said.endswith("until then jobs may get no message, or be admitted wrongly, and so are not claimed")


def follow(engine: sa.Engine, advice: str) -> None:
    """Execute what an owner is told to execute, one statement after the other, not in a transaction."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for statement in re.split(r"; (?=\w+ (?:UNIQUE )?INDEX)", advice.partition("not in a transaction: ")[2]):
            connection.exec_driver_sql(statement)


def test_an_async_consumer_reports_missing_objects(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE shop.sqlaqueue_crash_journal")

    async def serve() -> None:
        async_engine = create_async_engine(engine.url.set(drivername="postgresql+asyncpg"))
        try:
            await AsyncConsumer(Order, handle_async, async_sessionmaker(async_engine)).run()
        finally:
            await async_engine.dispose()

    with pytest.raises(ConfigurationError, match="sqlaqueue_crash_journal"):
        asyncio.run(serve())


@pytest.mark.parametrize("comment", ["'sqlaqueue, version 0'", "NULL", "'something else'"])
def test_an_outdated_trigger_function_is_reported(
    engine: sa.Engine, comment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue keeps working with an outdated function."""
    with engine.begin() as connection:
        name = connection.scalar(
            sa.text("SELECT oid::regprocedure::text FROM pg_proc WHERE proname ~ '^sqlaqueue_message'")
        )
        connection.exec_driver_sql(f"COMMENT ON FUNCTION {name} IS {comment}")
        connection.exec_driver_sql('INSERT INTO shop."the order\'s" DEFAULT VALUES')
    with caplog.at_level(logging.WARNING, "sqlaqueue"):
        assert Consumer(Order, handle, sessionmaker(engine)).drain() == 1
    assert "is of version 0, and version 3 is needed" in caplog.text
    assert "alembic upgrade head`" in caplog.text


def test_a_complete_database_is_not_reported(engine: sa.Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The schema may be renamed by schema_translate_map."""
    with engine.begin() as connection:
        connection.exec_driver_sql('ALTER SCHEMA shop RENAME TO "o\'shop"')
    for options in ({}, {"schema_translate_map": {"shop": "o'shop"}}):
        sessions = sessionmaker(engine.execution_options(**options))
        consumer = Consumer(Order, handle, sessions)
        if options:
            assert consumer.drain() == 0
        else:
            with pytest.raises(ConfigurationError, match="the table shop"):
                consumer.drain()
    assert "version" not in caplog.text
