"""A queue with an attempt history for each strategy, worked on by a Consumer of either API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, Cancel, Constant, Consumer, Fail, QueueConfig, QueueMixin, Snooze
from sqlaqueue.exc import HandlerNotStopped
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.consumer.models import DEADLINE, Handler, for_async, for_sync
from tests.models import shared
from tests.programs import wait_until
from tests.servers import Database

KINDS = ("update_status", "batch_select", "delete_returning", "own_message", "existing_messages")
LEASED, HELD = KINDS[0], KINDS[1:]
INSERT = "INSERT INTO sqlaqueue_attempt"


@shared
def make_model(kind: str, **config: Any) -> Any:
    """Return a queue class; ``kind`` names a strategy, or a variant of ``delete_returning``."""

    class Base(DeclarativeBase):
        pass

    class Message(Base):
        __tablename__ = "message"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int]

    options: dict[str, Any] = {"attempt_history": timedelta(days=14), "max_attempts": 2, "retry": Constant(delay=0)}
    match kind:
        case "own_message":
            options |= {"strategy": "delete_returning", "rows_are_messages": True}
        case "existing_messages":
            options |= {"strategy": ExistingMessages(Message, job="job_id"), "columns": {"priority": None}}
        case _:
            options["strategy"] = kind

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(**options | config)
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str | None]

    if kind == "existing_messages":
        add = sa.DDL(
            "CREATE FUNCTION add_message() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN INSERT INTO message (job_id) VALUES (NEW.id); RETURN NEW; END'"
        )
        sa.event.listen(Job.__table__, "after_create", add)
        trigger = "CREATE TRIGGER add_message AFTER INSERT ON job FOR EACH ROW EXECUTE FUNCTION add_message()"
        sa.event.listen(Job.__table__, "after_create", sa.DDL(trigger))
    return Job


async def obey(io: Any, job: Any) -> None:
    """Do what the payload of a job says."""
    match job.payload:
        case "write":
            await io.execute(sa.text("SELECT 1"))
        case "raise":
            raise ValueError("no address")
        case "fail":
            raise Fail("no stock", kind="no_stock")
        case "cancel":
            raise Cancel("not wanted")
        case "snooze":
            raise Snooze(3600)


class HistoryQueue:
    """A database with a queue that has an attempt history."""

    def __init__(self, database: Database, kind: str, api: str = "sync", **config: Any) -> None:
        self.database, self.kind, self.api = database, kind, api
        self.Job = make_model(kind, **config)
        self.attempt: sa.Table = self.Job.metadata.tables[ATTEMPT]
        self.engine = sa.create_engine(database.url(), poolclass=sa.NullPool)
        self.sessions = sessionmaker(self.engine)
        self.Job.metadata.create_all(self.engine)

    def enqueue(self, *payloads: str | None, **values: Any) -> list[int]:
        with self.sessions() as session:
            jobs = [self.Job(payload=payload, **values) for payload in payloads]
            session.add_all(jobs)
            session.commit()
            return [job.id for job in jobs]

    def execute(self, statement: str) -> Any:
        with self.engine.begin() as connection:
            result = connection.exec_driver_sql(statement)
            return result.scalar() if result.returns_rows else result.rowcount

    def history(self) -> list[Any]:
        """Return the rows of the history, in the order in which they were written."""
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(self.attempt).order_by(self.attempt.c.id)))

    def outcomes(self, key: int | None = None) -> list[tuple[int, str]]:
        """Return the number and the outcome of each attempt, of one job or of all."""
        return [(row.attempt, row.outcome) for row in self.history() if key is None or row.key == [key]]

    def drain(self, handler: Handler = obey, **options: Any) -> list[str]:
        """Run all due jobs, and return the statements that the Consumer has sent."""
        with self.consumer(handler, **options) as (consumer, sent):
            if self.api == "sync":
                consumer.drain()
            else:
                asyncio.run(consumer.drain())
            return sent

    @contextmanager
    def running(self, handler: Handler = obey, **options: Any) -> Iterator[Any]:
        """Run a Consumer in a thread, and stop it in the end."""
        with self.consumer(handler, **options) as (consumer, _):
            # A test that fails must not wait for a handler that waits for the test.
            thread = threading.Thread(target=self._run, args=[consumer], daemon=True)
            thread.start()
            wait_until(lambda: consumer._context is not None or not thread.is_alive())
            try:
                yield consumer
            finally:
                consumer.stop()
                thread.join(DEADLINE)
        assert not thread.is_alive(), "the Consumer did not stop"

    def _run(self, consumer: Any) -> None:
        if self.api == "sync":
            # Some tests have a handler that goes on after the grace period.
            with suppress(HandlerNotStopped):
                consumer.run()
        else:
            asyncio.run(consumer.run())

    @contextmanager
    def consumer(self, handler: Handler = obey, **options: Any) -> Iterator[tuple[Any, list[str]]]:
        """Return a Consumer, and the list of the statements that it sends."""
        options = {"poll_interval": 0.05} | options
        sent: list[str] = []
        engine: Any
        consumer: Any
        if self.api == "sync":
            sync = engine = sa.create_engine(self.database.url())
            consumer = Consumer(self.Job, for_sync(handler), sessionmaker(engine), **options)
        else:
            engine = create_async_engine(self.database.url("asyncpg"), poolclass=sa.NullPool)
            sync = engine.sync_engine
            consumer = AsyncConsumer(self.Job, for_async(handler), async_sessionmaker(engine), **options)

        @sa.event.listens_for(sync, "before_cursor_execute")
        def record(_: Any, __: Any, statement: str, *___: Any) -> None:
            sent.append(statement)

        self.consumer_engine = sync
        try:
            yield consumer, sent
        finally:
            sync.dispose()
