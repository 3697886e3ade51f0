"""Its queues, one for each strategy, and its handlers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import Constant, QueueConfig, QueueMixin

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

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


# -- its handlers --------------------------------------------------------------------------------------------------

VALUE = 7


def _done(job: object) -> Done:
    key = ",".join(map(str, sa.inspect(job).identity))
    return Done(queue=type(job).__tablename__, job=key, pid=os.getpid())


def send(session: Session, job: object) -> None:
    session.add(_done(job))


def send_all(session: Session, jobs: list[object]) -> None:
    session.add_all([Done(queue="batch", job=str(len(jobs)), pid=os.getpid())])


async def send_async(session: AsyncSession, job: object) -> None:
    await asyncio.sleep(0)
    session.add(_done(job))


def send_slowly(session: Session, job: object) -> None:
    """Wait until the file $SHOP_GO_ON exists."""
    session.add(_done(job))
    at_work = Path(os.environ["SHOP_AT_WORK"])
    at_work.write_text(str(os.getpid()))
    while not Path(os.environ["SHOP_GO_ON"]).exists():
        time.sleep(0.01)


async def send_stubbornly(session: AsyncSession, job: object) -> None:
    """Never end, not even when the task is cancelled."""
    await asyncio.to_thread(Path(os.environ["SHOP_AT_WORK"]).write_text, "")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


def log(session: Session, job: object) -> None:
    logging.getLogger("shop").warning("at work")


def fall_ill(session: Session, job: object) -> None:
    msg = f"no: {job}"
    raise ValueError(msg)


def send_on(session: Session, job: object) -> None:
    """Enqueue a job into another queue."""
    session.add_all([_done(job), Letter()])


def die(session: Session, job: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def without_arguments() -> None:
    pass


def log_interpreter_settings(session: Session, job: object) -> None:
    said = f"young: {gc.get_threshold()[0]} frozen: {gc.get_freeze_count() > 0} switch: {sys.getswitchinterval()}"
    logging.getLogger("sqlaqueue").info(said)


def hang(session: Session, job: object) -> None:
    """Never return, and let no other thread run, if the key of the job is 1."""
    session.add(_done(job))
    if sa.inspect(job).identity[0] == 1:
        session.flush()
        Path(os.environ["SHOP_AT_WORK"]).touch()
        re.match("(a+)+$", "a" * 40 + "b")


def fork_and_return(session: Session, job: object) -> None:
    """Return in a forked child first, then in the process itself, when the child has ended."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        session.add(_done(job))


async def hang_in_loop(session: AsyncSession, job: object) -> None:
    """Block the event loop, so that the task cannot be cancelled, if the key of the job is 1."""
    session.add(_done(job))
    Path(os.environ["SHOP_AT_WORK"]).touch()  # noqa: ASYNC240 - it blocks the loop anyway
    while sa.inspect(job).identity[0] == 1:
        pass


def allocate(session: Session, job: object) -> None:
    """Take memory until there is none, if the key of the job is 1."""
    session.add(_done(job))
    taken = []
    while sa.inspect(job).identity[0] == 1:
        taken.append(b"x" * 2**22)
        time.sleep(0.001)


def die_or_grow(session: Session, job: object) -> None:
    """Kill the process if the key of the job is 1; otherwise let it look larger than it is."""
    if sa.inspect(job).identity[0] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    vars(sys.modules["__main__"])["resident_bytes"] = lambda _: 2**32


def exit_or_raise(session: Session, job: object) -> None:
    """End the process as if it had no work left if the key of the job is 1; otherwise raise an error."""
    if sa.inspect(job).identity[0] == 1:
        os._exit(0)
    raise ValueError("wrong")


def send_at_risk(session: Session, job: object) -> None:
    """Take a moment, in which a test kills the process."""
    session.add(_done(job))
    time.sleep(0.02)
