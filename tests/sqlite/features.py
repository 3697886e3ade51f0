"""Queues with options, and a file that has them. Their tests are in `test_features.py` and beside it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlaqueue.sqlite
from sqlaqueue import QueueConfig, QueueMixin, Schedule, Unique


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email"

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    to: Mapped[str] = mapped_column(default="ada")


class Order(QueueMixin, Base):
    __tablename__ = "orders"
    __queue__ = QueueConfig(
        unique=Unique("customer", "kind"),
        attempt_history=timedelta(days=3),
        retention={"completed": timedelta(days=1)},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]
    kind: Mapped[str] = mapped_column(default="book")


class Hourly(QueueMixin, Base):
    __tablename__ = "hourly"
    __queue__ = QueueConfig(
        unique=Unique("customer", per=timedelta(hours=1), states=("pending", "processing", "completed"))
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]


class Waits(QueueMixin, Base):
    __tablename__ = "waits"
    __queue__ = QueueConfig(unique=Unique("customer", states=("pending",), on_return="wait"))

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]


class Measured(QueueMixin, Base):
    __tablename__ = "measured"

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float]
    took: Mapped[timedelta] = mapped_column(default=timedelta(minutes=90))


HOURLY = Schedule("hourly", Email, every=timedelta(hours=1), values={"to": "grace"})


def do_nothing(session: Session, job: object) -> None:
    """The handler of the command line's tests."""


def made(path: Path) -> sessionmaker[Session]:
    """Return the sessions of a new file with the tables of all queues."""
    engine = sa.create_engine(f"sqlite:///{path}")
    sqlaqueue.sqlite.prepare(engine)
    Base.metadata.create_all(engine)
    return sessionmaker(engine)
