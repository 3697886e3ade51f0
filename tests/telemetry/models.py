"""A queue of each strategy whose jobs store their trace."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import Constant, QueueConfig, QueueMixin

TRACED = {"traceparent": "traceparent"}
AT_ONCE = Constant(0, jitter=0)


class Base(DeclarativeBase):
    pass


class Leased(QueueMixin, Base):
    __tablename__ = "leased"
    __queue__ = QueueConfig(strategy="update_status", columns=TRACED, retry=AT_ONCE, max_attempts=3)

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str | None]


class Held(QueueMixin, Base):
    __tablename__ = "held"
    __queue__ = QueueConfig(strategy="batch_select", columns=TRACED, retry=AT_ONCE, max_attempts=3)

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str | None]


class Message(QueueMixin, Base):
    __tablename__ = "message"
    __queue__ = QueueConfig(
        strategy="delete_returning", rows_are_messages=True, columns=TRACED, retry=AT_ONCE, max_attempts=3
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str | None]


MODELS: list[Any] = [Leased, Held, Message]
