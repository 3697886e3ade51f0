"""A queue for each strategy, with a table that handlers write to."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqlaqueue import Constant, QueueConfig, QueueMixin


class Base(DeclarativeBase):
    pass


class Sent(Base):
    """What a handler has done."""

    __tablename__ = "sent"

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


class Email(QueueMixin, Base):
    __abstract__ = True

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]
    extra: Mapped[dict[str, Any]] = mapped_column(sa.JSON(), default=dict)


RETRY = Constant(60, jitter=0)


class LeasedEmail(Email):
    __tablename__ = "leased_email"
    __queue__ = QueueConfig(
        strategy="update_status", max_attempts=2, retry=RETRY, lease=timedelta(minutes=5), notify=True
    )


class DeletedWhenDone(Email):
    __tablename__ = "deleted_when_done"
    __queue__ = QueueConfig(strategy="update_status", max_attempts=2, retry=RETRY, on_complete="delete")


class HeldEmail(Email):
    __tablename__ = "held_email"
    __queue__ = QueueConfig(strategy="batch_select", max_attempts=2, retry=RETRY)


class MessageEmail(Email):
    __tablename__ = "message_email"
    __queue__ = QueueConfig(strategy="delete_returning", max_attempts=2, retry=RETRY)


class OwnMessage(Email):
    __tablename__ = "own_message"
    __queue__ = QueueConfig(
        strategy="delete_returning", columns={"status": None}, rows_are_messages=True, max_attempts=2, retry=RETRY
    )


QUEUES: dict[str, type[Email]] = {
    "update_status": LeasedEmail,
    "delete": DeletedWhenDone,
    "batch_select": HeldEmail,
    "delete_returning": MessageEmail,
    "own_message": OwnMessage,
}
