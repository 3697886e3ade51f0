"""The queues of these tests: one and the same model for each strategy, and a table for what handlers do."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

import sqlaqueue.sqlite
from sqlaqueue import Constant, QueueConfig, QueueMixin

STRATEGIES = ("update_status", "delete_returning", "batch_select")


class Models(NamedTuple):
    """The mapped classes of one queue."""

    base: type[DeclarativeBase]
    job: Any
    owner: Any
    effect: Any
    """A row for each thing that a handler did in the database; nothing forbids to do it twice."""


@cache
def models(strategy: str, *, notify: bool = True) -> Models:
    """Return the models of a strategy; ``own_message`` is ``delete_returning`` for rows without a state."""
    own_message = strategy == "own_message"

    class Base(DeclarativeBase):
        pass

    class Owner(Base):
        __tablename__ = "owner"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(
            strategy="delete_returning" if own_message else strategy,
            rows_are_messages=own_message,
            max_attempts=3,
            notify=notify,
            # Due again at once: these tests wait for conditions, not for time to pass.
            retry=Constant(delay=0),
        )
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str | None]
        owner_id: Mapped[int | None] = mapped_column(sa.ForeignKey(Owner.id))
        owner: Mapped[Owner | None] = relationship()

    class Effect(Base):
        __tablename__ = "effect"
        id: Mapped[int] = mapped_column(primary_key=True)
        job: Mapped[int]
        note: Mapped[str | None]

    return Models(Base, Job, Owner, Effect)


def prepared(engine: Any) -> Any:
    """Prepare an engine whose database is not PostgreSQL, and return it."""
    if engine.dialect.name == "sqlite":
        sqlaqueue.sqlite.prepare(engine)
    return engine
