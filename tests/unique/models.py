"""The models of the tests: one unique queue of each kind."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Unique
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.models import KEEPING_ROWS, KINDS, TEXT, shared

__all__ = ["KEEPING_ROWS", "KINDS", "TEXT", "create", "make_job"]

BY_KEY = Unique("key")


@shared
def make_job(kind: str, unique: Unique | None = BY_KEY, **options: Any) -> Any:
    """Return a new class of jobs."""

    class Base(DeclarativeBase):
        pass

    options["unique"] = unique
    if kind == "existing_messages":

        class Message(Base):
            __tablename__ = "message"
            id: Mapped[int] = mapped_column(primary_key=True)
            job_id: Mapped[int]

        options["strategy"] = ExistingMessages(Message, job="job_id")
        options["columns"] = {"priority": None}
    elif kind == "rows_are_messages":
        options |= {"strategy": "delete_returning", "rows_are_messages": True}
    else:
        options["strategy"] = kind

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(**options)
        id: Mapped[int] = mapped_column(primary_key=True)
        key: Mapped[str | None] = mapped_column(TEXT)
        note: Mapped[str | None] = mapped_column(TEXT)

    return Job


def create(engine: sa.Engine, job: Any) -> Any:
    """Create the tables of a class, and return it."""
    job.metadata.create_all(engine)
    return job
