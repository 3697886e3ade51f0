"""A program that runs with 0.1.0 and with this version of the library: its queues, handlers, and what enqueues.

``main`` creates the tables, or enqueues for as long as the process lives. The function ``consumers`` is a target of
``sqlaqueue worker``. The environment has the address of the database in ``SQLAQUEUE_URL``.
``NEXT_VERSION`` is set for a program whose version of the library needs a migrated table.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

if os.environ.get("NEXT_VERSION"):
    from sqlaqueue.queue.versions import TABLE_VERSIONS, TableVersion

    TABLE_VERSIONS["sqlaqueue_control"] = TableVersion((0, 2), (0, 1))

import sqlaqueue
from sqlaqueue import (
    ConcurrencyLimit,
    Constant,
    Consumer,
    FairShare,
    FunctionMixin,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    Retry,
    Schedule,
    Unique,
    enqueue,
    prepare,
)

SHORT = sa.String(60)
SOON = Constant(0.05)


class Base(DeclarativeBase):
    pass


class Sent(Base):
    """What was enqueued: a row for each job, written in the transaction that enqueues it."""

    __tablename__ = "sent"
    queue: Mapped[str] = mapped_column(SHORT, primary_key=True)
    key: Mapped[str] = mapped_column(SHORT, primary_key=True)


class Effect(Base):
    """What handlers did, in the transaction that ends the job; a job that has an effect twice violates the key."""

    __tablename__ = "effect"
    queue: Mapped[str] = mapped_column(SHORT, primary_key=True)
    key: Mapped[str] = mapped_column(SHORT, primary_key=True)
    version: Mapped[str] = mapped_column(SHORT)


class Job(QueueMixin, Base):
    __abstract__ = True
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(SHORT)
    customer: Mapped[str] = mapped_column(SHORT, default="a", server_default="a")


class PlainUpdate(Job):
    __tablename__ = "plain_update"
    __queue__ = QueueConfig(strategy="update_status", retry=SOON)


class PlainDelete(Job):
    __tablename__ = "plain_delete"
    __queue__ = QueueConfig(strategy="delete_returning", retry=SOON)


class PlainBatch(Job):
    __tablename__ = "plain_batch"
    __queue__ = QueueConfig(strategy="batch_select", retry=SOON)


RECORDS: dict[str, Any] = {
    "attempt_history": timedelta(days=1),
    "statistics": True,
    "retention": {"failed": timedelta(days=7)},
    "extra_columns": ("traceparent",),
    "unique": Unique("key", states=("pending", "processing")),
    "retry": SOON,
}
FLOW = [ConcurrencyLimit(3, per="customer"), RateLimit(500, every=1), FairShare("customer")]


class FullUpdate(Job):
    __tablename__ = "full_update"
    __queue__ = QueueConfig(strategy="update_status", flow_control=FLOW, **RECORDS)


class FullDelete(Job):
    __tablename__ = "full_delete"
    __queue__ = QueueConfig(strategy="delete_returning", flow_control=FLOW, **RECORDS)


class FullBatch(Job):
    __tablename__ = "full_batch"
    __queue__ = QueueConfig(strategy="batch_select", **RECORDS)


class Ordered(Job):
    """Each customer's jobs one after the other."""

    __tablename__ = "ordered"
    __queue__ = QueueConfig(flow_control=[InOrder("customer")], extra_columns=("started_at",), retry=SOON)


class Message(Job):
    """Its rows are deleted, and jobs that fail for good become dead letters."""

    __tablename__ = "message"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, retry=SOON)


class Import(Job):
    """A batch: it runs when its lines have."""

    __tablename__ = "import"
    __queue__ = QueueConfig(waits_for="lines", retry=SOON)
    lines: Mapped[list[Line]] = relationship(back_populates="batch")


class Line(Job):
    __tablename__ = "line"
    __queue__ = QueueConfig(strategy="delete_returning", retry=SOON)
    import_id: Mapped[int | None] = mapped_column(sa.ForeignKey("import.id"), index=True)
    batch: Mapped[Import | None] = relationship(back_populates="lines")


class Ticked(Job):
    """What a schedule enqueues."""

    __tablename__ = "ticked"
    __queue__ = QueueConfig(retry=SOON)


class Call(FunctionMixin, Base):
    __tablename__ = "call"
    __queue__ = QueueConfig(retry=SOON)
    id: Mapped[int] = mapped_column(primary_key=True)


PLAIN: list[Any] = [PlainUpdate, PlainDelete, PlainBatch]
FULL: list[Any] = [FullUpdate, FullDelete, FullBatch, Ordered, Message, Import, Line, Ticked]
EVERY_SECOND = Schedule("ticked", Ticked, every=1, values={"key": "tick"})

sessions = sessionmaker()


def connect() -> sa.Engine:
    """Bind the sessions to the database of the environment."""
    engine = sa.create_engine(os.environ["SQLAQUEUE_URL"], pool_size=60, max_overflow=0)
    sessions.configure(bind=prepare(engine))
    return engine


def note(session: Session, queue: str, key: str) -> None:
    session.execute(sa.insert(Effect).values(queue=queue, key=key, version=sqlaqueue.__version__))


def run(session: Session, job: Job) -> None:
    """Note the effect of a job; the first attempt of some fails after it."""
    queue = job.__tablename__
    note(session, queue, job.key if queue != "ticked" else f"tick-{job.id}")
    session.flush()
    if job.key.endswith("again") and job.attempts == 1:
        raise Retry(0.05)


@Call.task
def noted(session: Session, key: str) -> None:
    note(session, "call", key)


def consumers() -> list[Any]:
    """Return the Consumers of the queues that the environment names, ``plain`` or ``full`` or both."""
    connect()
    names = os.environ.get("QUEUES", "plain full")
    made: list[Any] = [
        Consumer(model, run, sessions, poll_interval=0.2, schedules=[EVERY_SECOND] if model is Ticked else ())
        for name, models in (("plain", PLAIN), ("full", FULL))
        for model in models
        if name in names
    ]
    return [*made, Consumer(Call, Call.run, sessions, poll_interval=0.2)] if "full" in names else made


def send(session: Session, name: str, number: int) -> None:
    """Enqueue a job of each queue, in one of several ways."""
    key = f"{name}-{number}{'-again' if number % 4 == 0 else ''}"
    customer = f"customer {number % 3}"
    for model in (*PLAIN, FullUpdate, FullDelete, FullBatch, Ordered, Message):
        values = {"key": key, "customer": customer}
        if number % 2 == 0 and not model.__queue__.unique:
            session.execute(sa.insert(model).values(values))
        elif model.__queue__.unique:
            enqueue(session, [model(**values), model(**values)])
        else:
            session.add(model(**values))
        session.add(Sent(queue=model.__tablename__, key=key))
    session.add(Import(key=key, lines=[Line(key=f"{key}.1"), Line(key=f"{key}.2")]))
    session.add_all([Sent(queue="import", key=key), *(Sent(queue="line", key=f"{key}.{each}") for each in (1, 2))])
    noted.enqueue(session, key=key)
    session.add(Sent(queue="call", key=key))


def main() -> None:
    what, *arguments = sys.argv[1:]
    engine = connect()
    if what == "create":
        Base.metadata.create_all(engine)
        return
    for number in itertools.count():
        with sessions() as session:
            send(session, *arguments, number)
            session.commit()
        sys.stdout.write(f"sent {number}\n")
        sys.stdout.flush()
        time.sleep(0.1)
