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
import uuid
from datetime import UTC, datetime, timedelta
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
    Fail,
    FairShare,
    FunctionMixin,
    InOrder,
    QueueConfig,
    QueueMixin,
    RateLimit,
    Retry,
    Schedule,
    Unique,
    cancel,
    claim,
    enqueue,
    prepare,
)
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.testing import fire_schedules, travel

ONLY_LEASES = not os.environ.get("SQLAQUEUE_URL", "postgresql").startswith("postgresql")
"""Whether the database has no strategies that hold a transaction."""
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


class Ordered(Job):
    """Each customer's jobs one after the other."""

    __tablename__ = "ordered"
    __queue__ = QueueConfig(flow_control=[InOrder("customer")], extra_columns=("started_at",), retry=SOON)


class Import(Job):
    """A batch: it runs when its lines have."""

    __tablename__ = "import"
    __queue__ = QueueConfig(waits_for="lines", retry=SOON)
    lines: Mapped[list[Line]] = relationship(back_populates="batch")


class Line(Job):
    __tablename__ = "line"
    __queue__ = QueueConfig(retry=SOON)
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


if not ONLY_LEASES:

    class PlainDelete(Job):
        __tablename__ = "plain_delete"
        __queue__ = QueueConfig(strategy="delete_returning", retry=SOON)

    class PlainBatch(Job):
        __tablename__ = "plain_batch"
        __queue__ = QueueConfig(strategy="batch_select", retry=SOON)

    class FullDelete(Job):
        __tablename__ = "full_delete"
        __queue__ = QueueConfig(strategy="delete_returning", flow_control=FLOW, **RECORDS)

    class FullBatch(Job):
        __tablename__ = "full_batch"
        __queue__ = QueueConfig(strategy="batch_select", **RECORDS)

    class Message(Job):
        """Its rows are deleted, and jobs that fail for good become dead letters."""

        __tablename__ = "message"
        __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, retry=SOON)


PLAIN: list[Any] = [PlainUpdate] if ONLY_LEASES else [PlainUpdate, PlainDelete, PlainBatch]
KEYED: list[Any] = [FullUpdate, Ordered] if ONLY_LEASES else [FullUpdate, FullDelete, FullBatch, Ordered]
DELETED: list[Any] = [] if ONLY_LEASES else [Message]
"""The queues whose rows a claim deletes."""
FULL: list[Any] = [*KEYED, *DELETED, Import, Line, Ticked]
KEPT: list[Any] = [*PLAIN, *KEYED]
"""Those whose jobs have one key, and stay in the table when they have ended."""
EVERY_SECOND = Schedule("ticked", Ticked, every=1, values={"key": "tick"}, catch_up=1000, misfire_grace=3600)

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
        Consumer(model, run, sessions, poll_interval=0.5, schedules=[EVERY_SECOND] if model is Ticked else ())
        for name, models in (("plain", PLAIN), ("full", FULL))
        for model in models
        if name in names
    ]
    return [*made, Consumer(Call, Call.run, sessions, poll_interval=0.5)] if "full" in names else made


def send(session: Session, name: str, number: int) -> None:
    """Enqueue a job of each queue, in one of several ways."""
    key = f"{name}-{number}{'-again' if number % 4 == 0 else ''}"
    customer = f"customer {number % 3}"
    for model in (*KEPT, *DELETED):
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


def fail(_session: Session, _job: Any) -> None:
    raise Fail("it has to fail")


def fill(engine: sa.Engine) -> None:
    """Create the tables, with jobs in every state, and rows in all tables of the library."""
    Base.metadata.create_all(engine)
    with sessions() as session:
        session.add_all([model(key="failed") for model in (*KEPT, *DELETED)])
        session.commit()
        for model in (*KEPT, *DELETED):
            Consumer(model, fail, sessions).drain()
        for number in range(3):
            send(session, "ended", number)
        session.commit()
        for consumer in consumers():
            # The schedule fires in a process that goes on; a batch runs after its lines.
            consumer.drain()
        Consumer(Import, run, sessions).drain()
        fire_schedules(session, [EVERY_SECOND])
        travel(session, timedelta(seconds=3))
        fire_schedules(session, [EVERY_SECOND])
        session.commit()
        later = datetime(2200, 1, 1, tzinfo=UTC)
        for model in KEPT:
            session.add_all([model(key="later", run_at=later), model(key="cancelled", run_at=later)])
        session.add_all([model(key="later", run_at=later) for model in DELETED])
        session.flush()
        for model in KEPT:
            session.execute(cancel(sa.select(model).where(model.key == "cancelled")))
        session.commit()
        for number in range(3, 6):
            send(session, "due", number)
        session.commit()
        leave_behind(session)
    QueueAdmin(sessions(), PLAIN[-1]).pause(reason="the upgrade", author="ada")


def leave_behind(session: Session) -> None:
    """Leave what a worker leaves that was killed: running jobs, its heartbeat, and its crash journal."""
    past = datetime(2026, 1, 1, tzinfo=UTC)
    for model in (PlainUpdate, FullUpdate, Ordered):
        (job,) = session.scalars(claim(model, 1)).all()
        session.commit()
        session.execute(sa.update(model).where(model.id == job.id).values(lease_expires_at=past))
    tables = Base.metadata.tables
    beat = {"id": "1", "queue": "plain_update", "name": "dead:1", "host": "dead", "pid": 1, "version": "0.1.0"}
    seen = {"listening": True, "running": [], "heartbeat_at": past, "expires_at": past}
    session.execute(sa.insert(tables["sqlaqueue_consumer"]).values(**beat, **seen))
    session.commit()
    if ONLY_LEASES:
        return
    key = session.scalar(sa.select(PlainBatch.id).where(PlainBatch.status == "pending").order_by(PlainBatch.id))
    entry = {"id": uuid.uuid4(), "queue": "plain_batch", "keys": [str(key)], "starts": 1, "worker": "dead:1"}
    session.execute(sa.insert(tables["sqlaqueue_crash_journal"]).values(entry))
    session.commit()


def main() -> None:
    what, *arguments = sys.argv[1:]
    engine = connect()
    if what == "create":
        Base.metadata.create_all(engine)
        return
    if what == "fill":
        fill(engine)
        return
    for number in itertools.count():
        with sessions() as session:
            send(session, *arguments, number)
            session.commit()
        sys.stdout.write(f"sent {number}\n")
        sys.stdout.flush()
        time.sleep(0.8)
