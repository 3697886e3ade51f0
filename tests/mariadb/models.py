"""Queues of the tests on MariaDB."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Schedule


class Base(DeclarativeBase):
    pass


class Job(QueueMixin, Base):
    __tablename__ = "job"
    __queue__ = QueueConfig(max_attempts=3, retention={"completed": timedelta(days=1)})

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    payload: Mapped[str | None] = mapped_column(sa.String(100))
    data: Mapped[Any] = mapped_column(sa.JSON, nullable=True)


class Child(Base):
    __tablename__ = "child"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(sa.ForeignKey("job.id"))


class Effect(Base):
    __tablename__ = "effect"

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int] = mapped_column(sa.BigInteger)
    note: Mapped[str] = mapped_column(sa.String(50))


class Pair(QueueMixin, Base):
    """A composite key, and all that a queue can have on MariaDB."""

    __tablename__ = "pair"
    __queue__ = QueueConfig(columns={"started_at": "started_at"}, attempt_history=timedelta(days=1))

    site: Mapped[str] = mapped_column(sa.String(20), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Report(QueueMixin, Base):
    __tablename__ = "report"
    # Some statements of such a queue differ, for shards of Citus.
    __queue__ = QueueConfig(notify=False)

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str | None] = mapped_column(sa.String(50))


REPORTS = Schedule("reports", Report, every=1, values={"title": "due"})
"""Declared here, so that the tables of schedules are created with the others."""


class ByUuid(QueueMixin, Base):
    __tablename__ = "by_uuid"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    local: Mapped[datetime | None]
