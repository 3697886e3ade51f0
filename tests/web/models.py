"""The queues that the dashboard shows in the tests: one of each strategy, with columns of many types."""

from __future__ import annotations

import enum
import uuid
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import QueueConfig, QueueMixin

STRATEGIES = ("update_status", "batch_select", "delete_returning")


class Kind(enum.Enum):
    WELCOME = "welcome"
    RECEIPT = "receipt"


class Queues:
    """Queue classes in a MetaData of their own."""

    def __init__(self, **options: Any) -> None:
        class Base(DeclarativeBase):
            type_annotation_map = {datetime: sa.DateTime(timezone=True)}  # noqa: RUF012 - as SQLAlchemy wants it

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
