"""Type checks: enqueue() and async_enqueue()."""

from __future__ import annotations

from typing import assert_type

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import Enqueued, QueueConfig, QueueMixin, Unique, async_enqueue, enqueue


class Base(DeclarativeBase):
    """The declarative base."""


class Email(QueueMixin, Base):
    """A unique queue."""

    __tablename__ = "email"
    __queue__ = QueueConfig(unique=Unique("to"))

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]


def enqueueing(session: Session) -> None:
    """One job and several have the same result."""
    assert_type(enqueue(session, Email(to="a")), list[Enqueued[Email]])
    assert_type(enqueue(session, [Email(to="a")], on_twin="replace"), list[Enqueued[Email]])
    assert_type(enqueue(session, (Email(to=name) for name in "ab")), list[Enqueued[Email]])
    for job, created in enqueue(session, {Email(to="a")}):
        assert_type(job, Email)
        assert_type(created, bool)


async def async_enqueueing(session: AsyncSession) -> None:
    """The same for an AsyncSession."""
    assert_type(await async_enqueue(session, Email(to="a")), list[Enqueued[Email]])
    [email] = await async_enqueue(session, [Email(to="a")])
    assert_type(email.job, Email)
