"""Its queues: one for each way in which jobs are kept."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import Constant, QueueConfig, QueueMixin

AT_ONCE = Constant(delay=0.05, jitter=0)


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email"
    __queue__ = QueueConfig(strategy="update_status", max_attempts=2, retry=AT_ONCE)

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str] = mapped_column(default="ada@example.com")
    sort: Mapped[str] = mapped_column(default="email")

    __mapper_args__ = {"polymorphic_on": "sort", "polymorphic_identity": "email"}  # noqa: RUF012 - as SQLAlchemy has it


class Newsletter(Email):
    __mapper_args__ = {"polymorphic_identity": "newsletter"}  # noqa: RUF012 - as above


class Letter(QueueMixin, Base):
    __tablename__ = "letter"
    __queue__ = QueueConfig(strategy="delete_returning", max_attempts=2, retry=AT_ONCE)

    id: Mapped[int] = mapped_column(primary_key=True)


class Row(QueueMixin, Base):
    __tablename__ = "row"
    __queue__ = QueueConfig(strategy="batch_select", max_attempts=2, retry=AT_ONCE)

    year: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[str] = mapped_column(primary_key=True)


class Task(QueueMixin, Base):
    """A job without a status: its row is its message."""

    __tablename__ = "task"
    __queue__ = QueueConfig(strategy="delete_returning", max_attempts=1, rows_are_messages=True)

    id: Mapped[int] = mapped_column(primary_key=True)


class Bare(QueueMixin, Base):
    """A queue that leaves out whatever can be left out."""

    __tablename__ = "bare"
    __queue__ = QueueConfig(
        strategy="batch_select",
        columns=dict.fromkeys(
            ("priority", "run_at", "attempts", "max_attempts", "last_error", "created_at", "finished_at")
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)


class Done(Base):
    """What handlers have done, and in which process."""

    __tablename__ = "done"

    id: Mapped[int] = mapped_column(primary_key=True)
    queue: Mapped[str]
    job: Mapped[str]
    pid: Mapped[int]
    at: Mapped[object] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.clock_timestamp())


class NoQueue(Base):
    __tablename__ = "no_queue"

    id: Mapped[int] = mapped_column(primary_key=True)
