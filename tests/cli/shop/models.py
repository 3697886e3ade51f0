"""Its queues, one for each strategy."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import Constant, QueueConfig, QueueMixin

SOON = Constant(delay=0.05, jitter=0)


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email"
    __queue__ = QueueConfig(strategy="update_status", max_attempts=2, retry=SOON)

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str] = mapped_column(default="ada@example.com")
    sort: Mapped[str] = mapped_column(default="email")

    __mapper_args__ = {"polymorphic_on": "sort", "polymorphic_identity": "email"}  # noqa: RUF012 - as SQLAlchemy has it


class Newsletter(Email):
    __mapper_args__ = {"polymorphic_identity": "newsletter"}  # noqa: RUF012 - as SQLAlchemy has it


class Letter(QueueMixin, Base):
    __tablename__ = "letter"
    __queue__ = QueueConfig(strategy="delete_returning", max_attempts=2, retry=SOON)

    id: Mapped[int] = mapped_column(primary_key=True)


class Row(QueueMixin, Base):
    __tablename__ = "row"
    __queue__ = QueueConfig(strategy="batch_select", max_attempts=2, retry=SOON)

    year: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[str] = mapped_column(primary_key=True)


class Task(QueueMixin, Base):
    """A job without a status, whose row is a message."""

    __tablename__ = "task"
    __queue__ = QueueConfig(strategy="delete_returning", max_attempts=1, rows_are_messages=True)

    id: Mapped[int] = mapped_column(primary_key=True)


class Bare(QueueMixin, Base):
    """A queue without optional attributes."""

    __tablename__ = "bare"
    __queue__ = QueueConfig(
        strategy="batch_select",
        columns=dict.fromkeys(
            ("priority", "run_at", "attempts", "max_attempts", "last_error", "created_at", "finished_at")
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)


class Done(Base):
    """A run of a handler, and its process."""

    __tablename__ = "done"

    id: Mapped[int] = mapped_column(primary_key=True)
    queue: Mapped[str]
    job: Mapped[str]
    pid: Mapped[int]
    at: Mapped[object] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.clock_timestamp())


class NoQueue(Base):
    __tablename__ = "no_queue"

    id: Mapped[int] = mapped_column(primary_key=True)
