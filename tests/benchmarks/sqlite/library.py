"""The same with sqlaqueue: a model, a session and a Consumer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import sqlaqueue.sqlite
from sqlaqueue import Consumer, QueueConfig, QueueMixin


class Base(DeclarativeBase):
    pass


class Job(QueueMixin, Base):
    __tablename__ = "job"
    __queue__ = QueueConfig(strategy="update_status", lease=60)
    id: Mapped[int] = mapped_column(primary_key=True)
    payload: Mapped[str | None]


def connect(path: Path, synchronous: str) -> sa.Engine:
    """Return an engine."""
    engine = sa.create_engine(f"sqlite:///{path}")
    sqlaqueue.sqlite.prepare(engine)
    event.listen(engine, "connect", lambda one, _: one.execute(f"PRAGMA synchronous = {synchronous}"))
    return engine


def create(path: Path) -> None:
    """Create the table."""
    engine = connect(path, "NORMAL")
    Base.metadata.create_all(engine)
    engine.dispose()


def enqueue(engine: sa.Engine, number: int, batch: int) -> None:
    """Add jobs, in transactions of ``batch`` jobs."""
    for start in range(0, number, batch):
        with Session(engine) as session:
            session.add_all([Job(payload="x") for _ in range(min(batch, number - start))])
            session.commit()


def nothing(session: Session, job: Any) -> None:
    """Handle a job by doing nothing."""


def drain(path: Path, synchronous: str, batch: int) -> int:
    """Run all jobs, and return how many."""
    engine = connect(path, synchronous)
    done = Consumer(Job, nothing, sessionmaker(engine), batch_size=batch).drain()
    engine.dispose()
    return done


@contextlib.contextmanager
def serving(path: Path, synchronous: str, begun: Callable[[], None]) -> Iterator[None]:
    """Run a Consumer that calls ``begun`` for each job."""
    engine = connect(path, synchronous)

    def handle(session: Session, job: Any) -> None:
        begun()

    with Consumer(Job, handle, sessionmaker(engine), batch_size=1, poll_interval=3600):
        yield
    engine.dispose()
