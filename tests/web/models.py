"""The queues that the dashboard shows in the tests, with columns of many types."""

import enum
import uuid
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin
from tests.models import shared


def new_base() -> Any:
    """Return a declarative base with a MetaData of its own, whose times have a zone."""

    class Base(DeclarativeBase):
        type_annotation_map = {datetime: sa.DateTime(timezone=True)}  # noqa: RUF012 - as SQLAlchemy wants it

    return Base


class Kind(enum.Enum):
    WELCOME = "welcome"
    RECEIPT = "receipt"


class Queues:
    """One queue of each strategy, in a MetaData of their own."""

    def __init__(self, **options: Any) -> None:
        Base = new_base()  # noqa: N806 - it is a class

        class Customer(Base):
            __tablename__ = "customer"
            id: Mapped[int] = mapped_column(primary_key=True)
            name: Mapped[str]

        class Email(QueueMixin, Base):
            __tablename__ = "email"
            __queue__ = QueueConfig(strategy="update_status", attempt_history=timedelta(days=14), **options)
            id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
            customer_id: Mapped[int | None] = mapped_column(sa.ForeignKey("customer.id"), index=True)
            recipient: Mapped[str] = mapped_column(index=True)
            subject: Mapped[str | None]
            kind: Mapped[Kind | None]
            payload: Mapped[dict[str, Any] | None] = mapped_column(postgresql.JSONB)
            total: Mapped[Decimal | None] = mapped_column(sa.Numeric(20, 4))
            urgent: Mapped[bool | None]
            day: Mapped[date | None]
            at: Mapped[datetime | None]
            reference: Mapped[uuid.UUID | None]
            blob: Mapped[bytes | None]
            big: Mapped[int | None] = mapped_column(sa.BigInteger)

        class Invoice(QueueMixin, Base):
            __tablename__ = "invoice"
            __queue__ = QueueConfig(strategy="batch_select", **options)
            id: Mapped[int] = mapped_column(primary_key=True)
            note: Mapped[str | None]

        class Picture(QueueMixin, Base):
            __tablename__ = "picture"
            __queue__ = QueueConfig(strategy="delete_returning", **options)
            tenant: Mapped[str] = mapped_column(primary_key=True)
            name: Mapped[str] = mapped_column(primary_key=True)
            width: Mapped[int | None]

        self.metadata = Base.metadata
        self.Customer, self.Email, self.Invoice, self.Picture = Customer, Email, Invoice, Picture
        self.all: list[Any] = [Email, Invoice, Picture]


class Mood(enum.Enum):
    GLAD = "glad"
    SAD = "sad"


class Cents(sa.types.TypeDecorator[Decimal]):
    """Stores an amount as an integer."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return None if value is None else int(value * 100)

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        raise AssertionError("a list must not call the types of the application")


@shared
def make_wide(**options: Any) -> Any:
    """Return a queue with columns of many types, whose real names differ from those of the attributes."""

    class Wide(QueueMixin, new_base()):
        __tablename__ = "Wide table"
        __queue__ = QueueConfig(columns={"priority": "rank", "last_error": "problem"}, **options)
        number: Mapped[int] = mapped_column("The Number", sa.BigInteger, primary_key=True)
        name: Mapped[str | None] = mapped_column('na"me %s', index=True)
        amount: Mapped[Decimal | None] = mapped_column("Amount", Cents)
        exact: Mapped[Decimal | None] = mapped_column(sa.Numeric(40, 10), index=True)
        ratio: Mapped[float | None] = mapped_column(sa.Float)
        mood: Mapped[Mood | None] = mapped_column(index=True)
        flag: Mapped[bool | None]
        day: Mapped[date | None] = mapped_column(index=True)
        at: Mapped[datetime | None] = mapped_column(index=True)
        naive: Mapped[datetime | None] = mapped_column(sa.DateTime())
        reference: Mapped[uuid.UUID | None] = mapped_column(index=True)
        document: Mapped[Any | None] = mapped_column(postgresql.JSONB)
        plain_json: Mapped[Any | None] = mapped_column(sa.JSON)
        tags: Mapped[list[str] | None] = mapped_column(postgresql.ARRAY(sa.Text))
        pause: Mapped[timedelta | None] = mapped_column(sa.Interval)
        address: Mapped[Any | None] = mapped_column(postgresql.INET)
        blob: Mapped[bytes | None]
        body: Mapped[str | None] = mapped_column(sa.Text)
        doubled: Mapped[int | None] = mapped_column(sa.BigInteger, sa.Computed('"The Number" * 2', persisted=True))

    return Wide


@shared
def make_rows(strategy: str = "update_status", **options: Any) -> Any:
    """Return a queue with columns of which many rows have the same value, or none."""

    class Row(QueueMixin, new_base()):
        __tablename__ = "row"
        __queue__ = QueueConfig(strategy=strategy, **options)
        id: Mapped[int] = mapped_column(primary_key=True)
        few: Mapped[int | None] = mapped_column(index=True)
        many: Mapped[int | None] = mapped_column(index=True)
        other: Mapped[int | None]
        __table_args__ = (sa.Index("both", "few", sa.text("many DESC NULLS LAST")), sa.Index("whole", "other", "id"))

    return Row


@shared
def make_tokens(**options: Any) -> Any:
    """Return a queue whose keys are UUIDs, so that their order is none of time."""

    class Token(QueueMixin, new_base()):
        __tablename__ = "token"
        __queue__ = QueueConfig(strategy="update_status", **options)
        id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
        number: Mapped[int] = mapped_column()

    return Token


@shared
def make_pairs() -> Any:
    class Pair(QueueMixin, new_base()):
        __tablename__ = "pair"
        __queue__ = QueueConfig(strategy="delete_returning")
        tenant: Mapped[str] = mapped_column(primary_key=True)
        number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        value: Mapped[int | None]

    return Pair


@shared
def make_messages() -> Any:
    """Return a queue whose rows are deleted by claims."""

    class Note(QueueMixin, new_base()):
        __tablename__ = "note"
        __queue__ = QueueConfig(
            strategy="delete_returning",
            rows_are_messages=True,
            adopt={"attempts": "attempts", "last_error": "last_error", "run_at": "run_at"},
        )
        id: Mapped[int] = mapped_column(primary_key=True)
        text: Mapped[str | None]
        mood: Mapped[Mood | None]
        amount: Mapped[Decimal | None] = mapped_column("Amount", sa.Numeric(20, 2))
        attempts: Mapped[int] = mapped_column(server_default="0")
        last_error: Mapped[str | None]
        run_at: Mapped[datetime | None] = mapped_column(server_default=sa.func.now())

    return Note


@shared
def make_daily(strategy: str) -> Any:
    class Daily(QueueMixin, new_base()):
        __tablename__ = "daily"
        __queue__ = QueueConfig(strategy=strategy)
        day: Mapped[date] = mapped_column(primary_key=True)
        note: Mapped[str | None]

    return Daily
