"""The models of the tests: one unique queue of each kind."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Unique
from sqlaqueue.strategies.existing_messages import ExistingMessages
from tests.models import shared

KINDS = ("update_status", "batch_select", "delete_returning", "existing_messages", "rows_are_messages")
KEEPING_ROWS = KINDS[:-1]
BY_KEY = Unique("key")
TEXT = sa.String().with_variant(sa.String(50), "mariadb")


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


def create(engine: sa.Engine, job: Any) -> None:
    """Create the tables of a class."""
    job.metadata.create_all(engine)


def status_of(engine: sa.Engine, job: Any) -> dict[int, str]:
    """Return the state of each row by its key."""
    with engine.connect() as connection:
        rows = connection.execute(sa.select(job.__table__.c.id, job.__table__.c.status)).all()
    return {row[0]: row[1] for row in rows}
