"""Queue classes with database objects that `sqlaqueue bench` must neither copy nor use."""

import enum
import multiprocessing
import uuid
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import DDL, Computed, ForeignKey, Index, Numeric, String, event, text
from sqlalchemy.dialects.postgresql import DOMAIN, ENUM, INET, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import ARRAY, TypeDecorator

from sqlaqueue import QueueConfig, QueueMixin


class Base(DeclarativeBase):
    pass


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Secret(TypeDecorator[str]):
    impl = String(40)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        raise AssertionError("the user's code must not run")


def fail() -> str:
    raise AssertionError("the user's code must not run")


class Customer(Base):
    __tablename__ = "customer"

    id: Mapped[int] = mapped_column(primary_key=True)


class Email(QueueMixin, Base):
    __tablename__ = "email"
    __table_args__ = (Index("email_code", "code", unique=True),)
    __queue__ = QueueConfig(
        strategy="delete_returning", columns={"status": "queue_status", "last_error": None}, on_complete="delete"
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey("customer.id"))
    status: Mapped[str]
    code: Mapped[str] = mapped_column(String(3), server_default=text("nextval('email_number')"))
    digest: Mapped[str] = mapped_column(default=fail)
    secret: Mapped[str] = mapped_column(Secret())
    colour: Mapped[Colour]
    colours: Mapped[list[Colour]] = mapped_column(ARRAY(ENUM(Colour, name="colours")))
    postcode: Mapped[str] = mapped_column(DOMAIN("postcode", String(10)))
    amount: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    twice: Mapped[Decimal] = mapped_column(Numeric(10, 2), Computed("amount * 2"))
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]] = mapped_column(JSONB)
    address: Mapped[str | None] = mapped_column(INET)


event.listen(Base.metadata, "before_create", DDL("CREATE SEQUENCE email_number"))


class Pair(QueueMixin, Base):
    __tablename__ = "pair"

    number: Mapped[int] = mapped_column(primary_key=True)
    token: Mapped[uuid.UUID] = mapped_column(primary_key=True)


class Host(QueueMixin, Base):
    """The benchmark cannot make a value for its column."""

    __tablename__ = "host"

    id: Mapped[int] = mapped_column(primary_key=True)
    address: Mapped[str] = mapped_column(INET)


class Fragile(QueueMixin, Base):
    """Its module cannot be imported in a worker process."""

    __tablename__ = "fragile"

    id: Mapped[int] = mapped_column(primary_key=True)


def __getattr__(name: str) -> Any:
    if name == "FragileInParent" and multiprocessing.parent_process() is None:
        return Fragile
    raise AttributeError(name)
