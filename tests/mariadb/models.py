"""Queues of the tests on MariaDB."""

import enum
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Schedule, Unique


class Base(DeclarativeBase):
    pass


class Job(QueueMixin, Base):
    __tablename__ = "job"
    __queue__ = QueueConfig(max_attempts=3, retention={"completed": timedelta(days=1)})

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    payload: Mapped[str | None] = mapped_column(sa.String(100))
    data: Mapped[Any] = mapped_column(sa.JSON, nullable=True)


class Held(QueueMixin, Base):
    __tablename__ = "held"
    __queue__ = QueueConfig(strategy="batch_select", max_attempts=3)

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    payload: Mapped[str | None] = mapped_column(sa.String(100))


class Message(QueueMixin, Base):
    """A queue whose claims delete the rows."""

    __tablename__ = "message"
    __queue__ = QueueConfig(
        strategy="delete_returning", rows_are_messages=True, max_attempts=3, retention={"failed": timedelta(days=1)}
    )

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    payload: Mapped[str | None] = mapped_column(sa.String(100))


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
    __queue__ = QueueConfig(extra_columns=("started_at",), attempt_history=timedelta(days=1))

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


class UniqueBase(DeclarativeBase):
    """The unique queues, in a database of their own."""


class Customer(UniqueBase):
    __tablename__ = "customer"

    id: Mapped[int] = mapped_column(primary_key=True)


class Exclaimed(sa.TypeDecorator[str]):
    """A text that SQL completes when it is read."""

    impl = sa.String
    cache_ok = True

    def column_expression(self, column: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
        return sa.func.concat(column, sa.literal("!"), type_=self)


class Order(QueueMixin, UniqueBase):
    """Unique by a key of a length that no index could have."""

    __tablename__ = "orders"
    __queue__ = QueueConfig(unique=Unique("key"), max_attempts=3, lease=1)

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    key: Mapped[str | None] = mapped_column(sa.Text)
    note: Mapped[str | None] = mapped_column(sa.String(50))
    made_by: Mapped[str] = mapped_column(Exclaimed(50), server_default="app")


class Mail(QueueMixin, UniqueBase):
    """Unique while it waits; a job that comes back beside a duplicate is cancelled."""

    __tablename__ = "mail"
    __queue__ = QueueConfig(unique=Unique("key", states=("pending",)))

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(sa.String(50))


class Single(QueueMixin, UniqueBase):
    """Unique by one attribute, whose NULLs are equal."""

    __tablename__ = "single"
    __queue__ = QueueConfig(unique=Unique("key", nulls_distinct=False))

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[int | None]


class Periodical(QueueMixin, UniqueBase):
    """Unique for an hour, by several columns of which some may be NULL; two NULLs are equal."""

    __tablename__ = "periodical"
    __queue__ = QueueConfig(
        unique=Unique(
            "customer_id",
            "kind",
            within=timedelta(hours=1),
            states=("pending", "processing", "completed"),
            nulls_distinct=False,
        )
    )

    site: Mapped[str] = mapped_column(sa.String(20), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    customer_id: Mapped[int | None] = mapped_column(sa.ForeignKey("customer.id", ondelete="CASCADE"))
    kind: Mapped[str | None] = mapped_column(sa.String(50))


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Typed(QueueMixin, UniqueBase):
    """A key with a column of each type by which jobs can be unique."""

    __tablename__ = "typed"
    __queue__ = QueueConfig(
        unique=Unique("number", "name", "at", "second", "day", "price", "ref", "text_ref", "color", "flag", "code")
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    name: Mapped[str] = mapped_column(sa.String(200), default="name")
    at: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True))
    second: Mapped[datetime] = mapped_column(sa.DateTime().with_variant(mysql.DATETIME(fsp=0), "mariadb"))
    day: Mapped[date] = mapped_column(default=date(2026, 1, 2))
    price: Mapped[Decimal] = mapped_column(sa.Numeric(10, 2), default=Decimal("1.50"))
    ref: Mapped[UUID] = mapped_column(default=UUID(int=7))
    text_ref: Mapped[UUID] = mapped_column(sa.Uuid(native_uuid=False), default=UUID(int=8))
    color: Mapped[Color] = mapped_column(default=Color.RED)
    flag: Mapped[bool] = mapped_column(default=False)
    code: Mapped[str] = mapped_column(sa.CHAR(5), default="a ")
