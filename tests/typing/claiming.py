"""Type checks: claims and verbs with Session and AsyncSession."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import assert_type

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, selectinload

from sqlaqueue import (
    QueueConfig,
    QueueMixin,
    States,
    cancel,
    claim,
    complete,
    extend,
    fail,
    purge,
    reconcile,
    release,
    requeue,
    rescue,
    retry,
)


class Base(DeclarativeBase):
    """The declarative base."""


class User(Base):
    """A table that is not a queue."""

    __tablename__ = "user"

    id: Mapped[int] = mapped_column(primary_key=True)


class Email(QueueMixin, Base):
    """A queue."""

    __tablename__ = "email"
    __queue__ = QueueConfig(strategy="update_status", max_attempts=5, states=States(completed="sent"))

    id: Mapped[int] = mapped_column(primary_key=True)
    to: Mapped[str]
    user: Mapped[User] = relationship()


def claims_are_of_the_model(session: Session) -> None:
    """A claim returns instances of the given class."""
    assert_type(session.execute(claim(Email, 10)).scalars().all(), Sequence[Email])
    assert_type(session.scalars(claim(Email, 10)).all(), Sequence[Email])
    assert_type(session.scalars(claim(Email, 1)).one_or_none(), Email | None)


def a_select_keeps_its_type(session: Session) -> None:
    """A claim from a select returns the type of the select."""
    some = select(Email).join(Email.user).where(User.id == 1, Email.to != "")
    assert_type(session.execute(claim(some, 10)).scalars().all(), Sequence[Email])
    assert_type(session.scalars(claim(some, 10).options(selectinload(Email.user))).all(), Sequence[Email])


async def claims_are_the_same_when_async(session: AsyncSession) -> None:
    """An AsyncSession returns the same types."""
    assert_type((await session.execute(claim(Email, 10))).scalars().all(), Sequence[Email])
    assert_type((await session.scalars(claim(select(Email), 10))).all(), Sequence[Email])


def a_claim_takes_no_further_conditions() -> None:
    """A claim has no where(), which would have no effect."""
    claim(Email, 10).where(Email.id == 1)  # type: ignore[attr-defined] # what the test is about


def verbs_take_one_or_many(session: Session) -> None:
    """Verbs accept instances, and durations as options."""
    emails = session.scalars(claim(Email, 10)).all()
    session.execute(complete(emails))
    session.execute(complete(emails[0]))
    session.execute(retry(emails, delay=timedelta(minutes=1), error=ValueError("no")))
    session.execute(retry(emails[0], at=datetime.now(UTC), error="no"))
    session.execute(fail(emails, error="no"))
    session.execute(release(emails, delay=5))
    session.execute(extend(emails, lease=60.0))
    session.scalars(cancel(select(Email).where(Email.to == ""))).all()
    session.scalars(requeue(Email)).all()
    session.scalars(rescue(Email)).all()
    session.scalars(reconcile(Email)).all()
    session.scalars(purge(Email, older_than=timedelta(days=7), states=["completed"], limit=500)).all()
