"""What the examples of docstrings take as given; test_docstrings.py executes it before each of them."""

# ruff: noqa: F401, F403, F405 - the examples use the names that are imported here
# ruff: noqa: T201 - the handlers do nothing else
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import ForeignKey, create_engine, func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from sqlaqueue import *
from sqlaqueue.admin import *
from sqlaqueue.testing import *


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Email(QueueMixin, Base):
    __tablename__ = "email"
    __queue__ = QueueConfig(max_attempts=3, attempt_history=timedelta(days=14))

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str] = mapped_column(default="ada@example.com")
    customer_id: Mapped[int | None] = mapped_column(ForeignKey("customer.id"))


class Invoice(QueueMixin, Base):
    __tablename__ = "invoice"
    __queue__ = QueueConfig(unique=Unique("customer_id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)
    customer_id: Mapped[int | None]


# Schedules add two tables, which examples may use.
daily = Schedule("daily", Invoice, every=timedelta(days=1))


def send(session: Session, email: Email) -> None:
    print("to", email.to)


async def async_send(session: AsyncSession, email: Email) -> None:
    print("to", email.to)


engine = create_engine("postgresql+psycopg://localhost/app")
async_engine = create_async_engine("postgresql+asyncpg://localhost/app")
with engine.begin() as connection:
    # The example before may have created tables of its own.
    connection.execute(sa.text("DROP SCHEMA public CASCADE"))
    connection.execute(sa.text("CREATE SCHEMA public"))
Base.metadata.create_all(engine)
sessions = sessionmaker(engine)
async_sessions = async_sessionmaker(async_engine)
session = sessions()
async_session = async_sessions()
admin = QueueAdmin(session, Email)
schedules = ScheduleAdmin(session, Invoice)
# Two jobs: the first waits, and the second has failed.
session.add_all([Email(), Email(status="failed")])
session.commit()
