"""Unique queues of the tests on MariaDB, in a database with a case-insensitive collation."""

from __future__ import annotations

import enum
from datetime import date, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, Schedule, Unique


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"

    id: Mapped[int] = mapped_column(primary_key=True)


class Exclaimed(sa.TypeDecorator[str]):
    """A text that SQL completes when it is read."""

    impl = sa.String
    cache_ok = True

    def column_expression(self, column: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
        return sa.func.concat(column, sa.literal("!"), type_=self)


class Order(QueueMixin, Base):
    """Unique by a key of a length that no index could have."""

    __tablename__ = "orders"
    __queue__ = QueueConfig(unique=Unique("key"), max_attempts=3, lease=1)

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    key: Mapped[str | None] = mapped_column(sa.Text)
    note: Mapped[str | None] = mapped_column(sa.String(50))
    made_by: Mapped[str] = mapped_column(Exclaimed(50), server_default="app")


class Mail(QueueMixin, Base):
    """Unique while it waits; a job that comes back beside a twin is cancelled."""

    __tablename__ = "mail"
    __queue__ = QueueConfig(unique=Unique("key", states=("pending",)))

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(sa.String(50))


class Waiting(QueueMixin, Base):
    """The same, but such a job waits."""

    __tablename__ = "waiting"
    __queue__ = QueueConfig(unique=Unique("key", states=("pending",), on_return="wait"))

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(sa.String(50))


class Single(QueueMixin, Base):
    """Unique by one attribute, whose NULLs are equal."""

    __tablename__ = "single"
    __queue__ = QueueConfig(unique=Unique("key", nulls_distinct=False))

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[int | None]


class Report(QueueMixin, Base):
    """Unique for an hour, by several columns of which some may be NULL; two NULLs are equal."""

    __tablename__ = "report"
    __queue__ = QueueConfig(
        unique=Unique(
            "customer_id",
            "kind",
            per=timedelta(hours=1),
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


class Typed(QueueMixin, Base):
    """A key with a column of each type by which jobs can be unique."""

    __tablename__ = "typed"
    __queue__ = QueueConfig(
        unique=Unique("number", "name", "at", "second", "day", "price", "ref", "text_ref", "color", "flag", "code")
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    name: Mapped[str] = mapped_column(sa.String(200), default="name")
    at: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True))
    second: Mapped[datetime] = mapped_column(sa.DateTime().with_variant(sa.dialects.mysql.DATETIME(fsp=0), "mariadb"))
    day: Mapped[date] = mapped_column(default=date(2026, 1, 2))
    price: Mapped[Decimal] = mapped_column(sa.Numeric(10, 2), default=Decimal("1.50"))
    ref: Mapped[UUID] = mapped_column(default=UUID(int=7))
    text_ref: Mapped[UUID] = mapped_column(sa.Uuid(native_uuid=False), default=UUID(int=8))
    color: Mapped[Color] = mapped_column(default=Color.RED)
    flag: Mapped[bool] = mapped_column(default=False)
    code: Mapped[str] = mapped_column(sa.CHAR(5), default="a ")


EVERY_SECOND = Schedule("orders", Order, every=1, values={"key": "scheduled"})
