"""One process of the fault test: it fires the schedules, and as a consumer runs their jobs, until it is killed.

    python -m tests.schedules.fault_process ROLE URL SEED NAME PROGRAM LOG

:func:`run` describes the arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import random
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import (
    AsyncScheduler,
    Consumer,
    QueueConfig,
    QueueMixin,
    Schedule,
    Scheduler,
    Tick,
    Unique,
)
from sqlaqueue.consumer import pace

PROGRAMS = ("old", "new")
EDITS = ("*/2 * * * * *", "*/3 * * * * *")
"""The expressions that an administrator gives to the schedules ``edited ...`` in turn, and programs to others."""

# A lease is short, so that the jobs of a killed consumer do not wait; it is exceeded whenever the clock is set forward.
_OPTIONS: dict[str, Any] = {"lease": 2, "max_attempts": 10_000}


class Base(DeclarativeBase):
    type_annotation_map = {datetime: sa.DateTime(timezone=True)}  # noqa: RUF012 - SQLAlchemy reads it from the class


class Kept(QueueMixin, Base):
    __tablename__ = "kept"
    __queue__ = QueueConfig(strategy="update_status", **_OPTIONS)
    id: Mapped[int] = mapped_column(primary_key=True)
    schedule: Mapped[str]
    tick: Mapped[datetime | None]


class Deleted(QueueMixin, Base):
    __tablename__ = "deleted"
    __queue__ = QueueConfig(strategy="delete_returning", rows_are_messages=True, **_OPTIONS)
    id: Mapped[int] = mapped_column(primary_key=True)
    schedule: Mapped[str]
    tick: Mapped[datetime | None]


class Single(QueueMixin, Base):
    __tablename__ = "single"
    __queue__ = QueueConfig(strategy="delete_returning", unique=Unique("schedule"), **_OPTIONS)
    id: Mapped[int] = mapped_column(primary_key=True)
    schedule: Mapped[str]
    tick: Mapped[datetime | None]


MODELS: tuple[type[Any], ...] = (Kept, Deleted, Single)


def make_kept(tick: Tick) -> Kept:
    """Return the job of a tick, which it names."""
    return Kept(schedule=tick.schedule, tick=tick.at)


def make_deleted(tick: Tick) -> Deleted:
    """Return the job of a tick, which it names."""
    return Deleted(schedule=tick.schedule, tick=tick.at)


def make_single(tick: Tick) -> Single:
    """Return the job of a tick, which it names."""
    return Single(schedule=tick.schedule, tick=tick.at)


MAKE = {Kept: make_kept, Deleted: make_deleted, Single: make_single}


def schedules(program: str) -> list[Schedule[Any]]:
    """Return the 39 schedules of a version of the program.

    The first word of a name tells what the test does to the schedule: nothing to those of which ``all``, the
    ``newest`` or ``some`` missed ticks are fired; ``alone`` may have one unfinished job, and is also run on request;
    ``edited``, ``paused`` and ``moved`` are changed by SQL, and ``version`` by the programs.
    """
    found: list[Schedule[Any]] = []

    def add(name: str, model: type[Any], *, make: bool = False, **options: Any) -> None:
        name = f"{name} {model.__tablename__}"
        jobs: dict[str, Any] = {"make": MAKE[model]} if make else {"values": {"schedule": name}}
        found.append(Schedule(name, model, **jobs, **options))

    for model in MODELS:
        add("all cron 1", model, cron="*/1 * * * * *", catch_up="all", grace=1)
        add("all cron 2", model, cron="*/2 * * * * *", catch_up="all", make=True)
        add("all every 1", model, every=1, catch_up="all", make=True)
        add("all every 3", model, every=3, catch_up="all", jitter=0.5, timezone="Europe/Berlin")
        add("newest cron 1", model, cron="*/1 * * * * *", catch_up="latest", grace=2)
        add("newest every 2", model, every=2, catch_up="latest", grace=1, make=True)
        add("some cron 1", model, cron="*/1 * * * * *", catch_up=7, grace=1, make=True)
        add("alone every 1", model, every=1, catch_up="all", skip_unfinished=True)
        add("alone cron 1", model, cron="*/1 * * * * *", skip_unfinished=True, grace=1, make=True)
        add("edited", model, cron=EDITS[0], catch_up="all")
        add("paused", model, every=1, catch_up=5, make=True)
        add("moved", model, cron="*/2 * * * * *", catch_up="all")
        add("version", model, cron=EDITS[PROGRAMS.index(program)], catch_up="all", make=program == "new")
    return found


def run(role: str, url: str, seed: float, name: str, program: str, log: Path) -> None:
    """Run one role until the process is killed.

    :param role: ``scheduler``, ``async_scheduler`` or ``consumer``.
    :param name: the name of its connections in the database.
    :param program: the version of the program, ``old`` or ``new``, which differ in the schedules ``version ...``.
    :param log: the file for its output.
    """
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    pace.RESCUE = 0.2
    # The test asks for the stacks if it waits in vain.
    faulthandler.register(signal.SIGUSR1)
    ROLES[role](url, name, schedules(program), random.Random(seed))


def schedule(url: str, name: str, declared: list[Schedule[Any]], rng: random.Random) -> None:
    """Run a Scheduler."""
    engine = sa.create_engine(url, connect_args={"application_name": name})
    Scheduler(sessionmaker(engine), declared).run()


def schedule_async(url: str, name: str, declared: list[Schedule[Any]], rng: random.Random) -> None:
    """Run an AsyncScheduler."""
    engine = create_async_engine(url, connect_args={"server_settings": {"application_name": name}})
    asyncio.run(AsyncScheduler(async_sessionmaker(engine), declared).run())


def consume(url: str, name: str, declared: list[Schedule[Any]], rng: random.Random) -> None:
    """Run a Consumer of each queue, one of which fires the schedules."""
    engine = sa.create_engine(url, connect_args={"application_name": name}, pool_size=20)

    def handle(_: Session, job: Any) -> None:
        if job.schedule.startswith("alone"):
            # Longer than from one tick to the next, now and then.
            time.sleep(rng.choice([0, 0, 0.3, 1.2]))

    with contextlib.ExitStack() as stack:
        fires = rng.choice(MODELS)
        for model in MODELS:
            given = declared if model is fires else []
            consumer = Consumer(
                model,
                handle,
                sessionmaker(engine),
                batch_size=rng.choice([20, 50]),
                concurrency=2,
                poll_interval=0.2,
                schedules=given,
            )
            stack.enter_context(consumer)
        while True:
            time.sleep(60)


ROLES = {"scheduler": schedule, "async_scheduler": schedule_async, "consumer": consume}

if __name__ == "__main__":
    run(*sys.argv[1:3], float(sys.argv[3]), *sys.argv[4:6], Path(sys.argv[6]))
