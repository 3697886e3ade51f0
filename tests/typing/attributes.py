"""Type checks: queue attributes that are added, adopted and declared."""

from __future__ import annotations

import enum
import uuid
from datetime import datetime
from typing import Any, assert_type

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute, Mapped, MappedAsDataclass, Session, mapped_column
from sqlmodel import Field, SQLModel

from sqlaqueue import QueueConfig, QueueMixin, queue_column
from tests.typing.claiming import Email


class Base(DeclarativeBase):
    """The declarative base."""


class DataclassBase(MappedAsDataclass, DeclarativeBase):
    """Another declarative base."""


class Phase(enum.Enum):
    """The states of an application."""

    PENDING = "p"
    COMPLETED = "c"


def attributes_are_typed(email: Email) -> None:
    """Attributes have the type of the role or Any, since a class may adopt a column of another type."""
    assert_type(email.status, str | Any)
    assert_type(email.priority, int | Any)
    assert_type(email.run_at, datetime | Any)
    assert_type(email.last_error, str | Any | None)
    assert_type(email.lease_token, uuid.UUID | Any | None)
    email.last_error = email.priority  # type: ignore[assignment] # what the test is about
    email.priority = "high"  # type: ignore[assignment] # what the test is about
    email.finished_at.isoformat()  # type: ignore[union-attr] # it may be None


def expressions_are_typed(session: Session) -> None:
    """Class attributes are columns of the type of the role."""
    select(Email).where(Email.status == "failed", Email.priority > 3, Email.run_at.is_(None)).order_by(Email.run_at)
    assert_type(session.scalars(select(Email.status)).one(), str)
    assert_type(session.scalars(select(Email.priority)).one(), int)


class Order(QueueMixin, Base):
    """Roles of attributes with other names."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[int]
    queue_status: Mapped[str] = queue_column("status")
    importance: Mapped[int] = queue_column("priority")


def declared_attributes_are_typed(order: Order) -> None:
    """A declared attribute has its declared type."""
    assert_type(order.queue_status, str)
    assert_type(order.status, int)
    assert_type(Order.queue_status, InstrumentedAttribute[str])
    assert_type(Order.queue_status == "failed", ColumnElement[bool])
    order.importance = "high"  # type: ignore[assignment] # what the test is about


class Parcel(QueueMixin, Base):
    """An existing table with nullable columns and an Enum."""

    __tablename__ = "parcel"
    __queue__ = QueueConfig(adopt={"status": "status", "attempts": "attempts", "run_at": "run_at"})

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Phase]
    attempts: Mapped[int | None]
    run_at: Mapped[datetime | None]
    priority: Mapped[str]
    max_attempts: Mapped[int]


class Stated(QueueMixin, Base):
    """A status stored as an Enum of the application."""

    __tablename__ = "stated"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Phase] = queue_column("status")


def adopted_attributes_are_typed(parcel: Parcel, stated: Stated) -> None:
    """Adopted attributes have the types that the class declares."""
    assert_type(parcel.status, Phase)
    assert_type(parcel.attempts, int | None)
    assert_type(parcel.run_at, datetime | None)
    assert_type(parcel.priority, str)
    assert_type(stated.status, Phase)
    assert_type(Stated.status, InstrumentedAttribute[Phase])


class Letter(QueueMixin, DataclassBase):
    """A dataclass."""

    __tablename__ = "letter"

    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    to: Mapped[str]
    queue_status: Mapped[str] = queue_column("status")


class Newsletter(Letter):
    """A subclass in the same table."""

    topic: Mapped[str] = mapped_column(default="")


class Text(QueueMixin, SQLModel, table=True):
    """An SQLModel."""

    id: int | None = Field(default=None, primary_key=True)
    to: str
    queue_status: str = queue_column("status")


class AdoptedText(QueueMixin, SQLModel, table=True):
    """An SQLModel on an existing table."""

    __queue__ = QueueConfig(adopt={"status": "status", "attempts": "attempts"})

    id: int | None = Field(default=None, primary_key=True)
    status: str = "pending"
    attempts: int | None = None


def constructors_take_the_attributes(moment: datetime) -> None:
    """Constructors of plain models, dataclasses and SQLModels accept queue attributes."""
    Email(to="a", priority=3, run_at=moment)
    Letter("a", priority=3, run_at=moment, max_attempts=None)
    Newsletter("a", topic="b", priority=3)
    assert_type(Letter("a").priority, int | Any)
    Letter("a", prioritiy=3)  # type: ignore[call-arg] # there is no such attribute
    Text(to="a", priority=3, run_at=moment, queue_status="pending")
    AdoptedText(status="new", attempts=None)
    assert_type(Text(to="a").run_at, datetime | Any)
    assert_type(Text(to="a").queue_status, str)
    Text(to="a", prioritiy=3)  # type: ignore[call-arg] # there is no such attribute
