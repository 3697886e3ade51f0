"""Schedules of the application, with models of their own: their tables exist only where schedules are declared."""

from __future__ import annotations

import os
from datetime import date, timedelta

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from sqlaqueue import AsyncScheduler, QueueMixin, Schedule, Scheduler

URL = os.environ.get("SHOP_URL", "postgresql+psycopg://nobody@nowhere.invalid/shop")


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
