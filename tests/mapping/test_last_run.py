"""The opt-in column ``started_at``, and ``claimed_by`` after a run: start and worker of the last run."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import Consumer, Fail, QueueConfig, QueueMixin, Retry, claim, complete, queue_column, release, rescue
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.statements.claim import worker_name
from tests.servers import Database

ROLES = {"started_at": "began", "claimed_by": "claimed_by"}


class Base(DeclarativeBase):
    pass


class Leased(QueueMixin, Base):
    __tablename__ = "leased"
    __queue__ = QueueConfig(strategy="update_status", columns={"started_at": "began"})

    id: Mapped[int] = mapped_column(primary_key=True)


class Batch(QueueMixin, Base):
    __tablename__ = "batch"
    __queue__ = QueueConfig(strategy="batch_select", columns=ROLES)

    id: Mapped[int] = mapped_column(primary_key=True)


class Message(QueueMixin, Base):
    __tablename__ = "message"
    __queue__ = QueueConfig(strategy="delete_returning", columns=ROLES)

    id: Mapped[int] = mapped_column(primary_key=True)


class Row(QueueMixin, Base):
    __tablename__ = "row"
    __queue__ = QueueConfig(strategy="delete_returning", columns=ROLES, rows_are_messages=True)

    id: Mapped[int] = mapped_column(primary_key=True)


class Plain(QueueMixin, Base):
    __tablename__ = "plain"

    id: Mapped[int] = mapped_column(primary_key=True)


MODELS: list[Any] = [Leased, Batch, Message, Row]


def test_every_outcome_stores_start_and_worker_of_its_run(database: Database) -> None:
    """The start is a time of the database's clock, under all strategies."""
    engine = sa.create_engine(database.url())
    Base.metadata.create_all(engine)
    ends: dict[int, Exception] = {2: Retry(3600), 3: Fail("no")}

    def work(session: Session, job: Any) -> None:
        if job.id in ends:
            raise ends[job.id]
        session.execute(sa.text("SELECT 1"))

    for model in MODELS:
        with Session(engine) as session:
            session.add_all(model() for _ in range(3))
            session.commit()
            before = session.scalar(sa.select(sa.func.clock_timestamp()))
        Consumer(model, work, sessionmaker(engine), name="me").drain()
        with engine.connect() as connection:
            after = connection.scalar(sa.select(sa.func.clock_timestamp()))
            rows = {row.id: row for row in connection.execute(sa.select(model.__table__))}
            if model is Row:
                letter = connection.execute(
                    sa.text("SELECT row->>'claimed_by', (row->>'began')::timestamptz FROM sqlaqueue_dead_letter")
                ).one()
                assert letter[0] == f"{worker_name()}:me"
                assert before <= letter[1] <= after
        assert set(rows) == ({2} if model is Row else {1, 2, 3})
        for row in rows.values():
            assert row.claimed_by == f"{worker_name()}:me", model
            assert before <= row.began <= after, model
            assert getattr(row, "finished_at", None) is None or row.began <= row.finished_at
    engine.dispose()


def test_verbs_store_start_and_worker(database: Database) -> None:
    engine = sa.create_engine(database.url())
    Base.metadata.create_all(engine)
    for model in MODELS:
        with Session(engine) as session:
            session.add_all([model(), model()])
            session.commit()
            before = session.scalar(sa.select(sa.func.statement_timestamp()))
            session.commit()
            jobs = session.scalars(claim(model, 2)).all()
            session.execute(release(jobs[1]))
            session.execute(complete(jobs[0]))
            session.commit()
            rows = session.execute(sa.select(model.__table__).order_by(model.__table__.c.id)).all()
        released = rows[-1]
        # If the claim writes nothing, a released run leaves no trace.
        assert (released.began is not None) == (model is Leased)
        if model is not Row:
            assert rows[0].began >= before
            assert rows[0].claimed_by == worker_name()
    engine.dispose()


def test_a_rescue_keeps_start_and_worker(database: Database) -> None:
    engine = sa.create_engine(database.url())
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Leased())
        session.commit()
        session.scalars(claim(Leased, 1)).all()
        session.execute(sa.text("UPDATE leased SET lease_expires_at = now() - interval '1 s'"))
        session.execute(rescue(Leased))
        session.commit()
        [row] = session.execute(sa.select(Leased.__table__)).all()
    assert (row.status, row.claimed_by) == ("pending", worker_name())
    assert row.began is not None
    engine.dispose()


@pytest.mark.once
def test_other_queues_have_no_started_at() -> None:
    assert "started_at" not in Plain.__table__.c
    assert not spec_of(Plain).keeps_claimed_by
    assert str(os.getpid()) in worker_name()


@pytest.mark.once
def test_started_at_can_be_placed_by_columns_adopt_and_queue_column() -> None:
    class Own(DeclarativeBase):
        pass

    class Adopted(QueueMixin, Own):
        __tablename__ = "adopted"
        __queue__ = QueueConfig(adopt={"status": "state", "started_at": "began"})

        id: Mapped[int] = mapped_column(primary_key=True)
        state: Mapped[str]
        began: Mapped[datetime | None] = mapped_column(sa.DateTime(timezone=True))

    class Declared(QueueMixin, Own):
        __tablename__ = "declared"

        id: Mapped[int] = mapped_column(primary_key=True)
        began: Mapped[datetime | None] = queue_column("started_at")

    for model in (Adopted, Declared):
        assert spec_of(model).columns["started_at"] is model.__table__.c.began
        assert spec_of(model).keeps_claimed_by
    assert isinstance(Declared.__table__.c.began.type, sa.DateTime)
