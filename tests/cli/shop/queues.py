"""Consumers and schedules of the application, and queues whose tables only some tests create."""

import os
import threading
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, AsyncScheduler, Consumer, QueueConfig, QueueMixin, Schedule, Scheduler, Unique
from tests.cli.shop.models import Email, Letter, Task, send, send_async, send_stubbornly

URL = os.environ.get("SHOP_URL", "postgresql+psycopg://nobody@nowhere.invalid/shop")
consumer = Consumer(Email, send, sessionmaker(create_engine(URL)), poll_interval=0.05)
async_consumer = AsyncConsumer(
    Letter,
    send_async,
    async_sessionmaker(create_async_engine(URL.replace("+psycopg:", "+asyncpg:"))),
    poll_interval=0.05,
)
both = [consumer, async_consumer]
too_many = Consumer(
    Task, send, sessionmaker(create_engine(URL, pool_size=1, max_overflow=0)), concurrency=3, poll_interval=0.05
)
too_few_connections = [*both, too_many]
nothing: list[Consumer[Task]] = []
mixed = [consumer, "letter"]


class FailingSessions(sessionmaker[Session]):
    """Makes no session for the threads of a Consumer, from the moment at which another handler is at work."""

    def __call__(self, **options: Any) -> Session:
        while threading.current_thread() is not threading.main_thread():
            if Path(os.environ["SHOP_AT_WORK"]).exists():
                raise TypeError("no session")
            time.sleep(0.01)
        return super().__call__(**options)


def make_failing() -> list[object]:
    """Return a Consumer that fails while the handler of the other one is at work, and never ends."""
    failing = Consumer(Task, send, FailingSessions(create_engine(URL)), poll_interval=0.05)
    stubborn = AsyncConsumer(
        Letter,
        send_stubbornly,
        async_sessionmaker(create_async_engine(URL.replace("+psycopg:", "+asyncpg:"))),
        grace=0.1,
    )
    return [failing, stubborn]


def make() -> list[object]:
    return [Consumer(Task, send, sessionmaker(create_engine(URL)), poll_interval=0.05)]


def make_sharing() -> list[object]:
    """Return Consumers of a pool that is large enough for each of them, and too small for both."""
    sessions = sessionmaker(create_engine(URL, pool_size=3, max_overflow=0))
    return [Consumer(Task, send, sessions), Consumer(Email, send, sessions)]


def make_for(name: str) -> Consumer[Task]:
    raise NotImplementedError(name)


async def make_async() -> object:
    return async_consumer


def make_badly() -> object:
    return 1 // 0


class Base(DeclarativeBase):
    pass


class Report(QueueMixin, Base):
    __tablename__ = "report"

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    day: Mapped[date | None]
    size: Mapped[int | None]


nightly = Schedule("nightly", Report, cron="0 3 * * *", timezone="Europe/Berlin", values={"kind": "sales"})
often = Schedule("often", Report, every=timedelta(minutes=5), values={"kind": "stock", "day": date(2026, 1, 2)})
schedules = [nightly, often]
scheduler = Scheduler(sessionmaker(create_engine(URL)), schedules)
async_scheduler = AsyncScheduler(
    async_sessionmaker(create_async_engine(URL.replace("+psycopg:", "+asyncpg:"))), [nightly]
)


class Sync(QueueMixin, Base):
    __tablename__ = "sync"
    __queue__ = QueueConfig(unique=Unique("customer"))

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]
