"""Type checks: handlers for sessions of a subclass of Session or AsyncSession."""

from __future__ import annotations

from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlmodel import Session as SQLModelSession
from sqlmodel import select as sql_model_select
from sqlmodel.ext.asyncio.session import AsyncSession as AsyncSQLModelSession

from sqlaqueue import AsyncConsumer, Consumer
from tests.typing.claiming import Email

engine, async_engine = create_engine("postgresql+psycopg://"), create_async_engine("postgresql+asyncpg://")
make_session = sessionmaker(engine)
make_own = sessionmaker(engine, class_=SQLModelSession)
make_async = async_sessionmaker(async_engine)
make_own_async = async_sessionmaker(async_engine, class_=AsyncSQLModelSession)


def plain(session: Session, email: Email) -> None:
    """A handler that takes any session."""


def own(session: SQLModelSession, email: Email) -> None:
    """A handler for a subclass of the session."""
    session.exec(sql_model_select(Email)).all()


def own_batch(session: SQLModelSession, emails: list[Email]) -> None:
    """The same for a batch."""


async def plain_async(session: AsyncSession, email: Email) -> None:
    """A handler that takes any session."""


async def own_async(session: AsyncSQLModelSession, email: Email) -> None:
    """A handler for a subclass of the session."""


async def own_async_batch(session: AsyncSQLModelSession, emails: list[Email]) -> None:
    """The same for a batch."""


def handlers_take_what_the_factory_makes() -> None:
    """The class of the sessions is that of the factory."""
    Consumer(Email, own, make_own)
    Consumer(Email, own, lambda: SQLModelSession(engine))
    Consumer(Email, own, scoped_session(make_own))
    Consumer(Email, own_batch, make_own, batch=True)
    Consumer(select(Email), own, make_own)
    Consumer(Email, {Email: own}, make_own)
    Consumer(Email, plain, make_own)
    Consumer(Email, own, make_session)  # type: ignore[misc] # it makes sessions of another class
    Consumer(Email, own_batch, make_session, batch=True)  # type: ignore[call-overload] # the same


def async_handlers_as_well() -> None:
    """The same for AsyncConsumer."""
    AsyncConsumer(Email, own_async, make_own_async)
    AsyncConsumer(Email, own_async_batch, make_own_async, batch=True)
    AsyncConsumer(select(Email), own_async, make_own_async)
    AsyncConsumer(Email, {Email: own_async}, make_own_async)
    AsyncConsumer(Email, plain_async, make_own_async)
    AsyncConsumer(Email, own_async, make_async)  # type: ignore[misc] # it makes sessions of another class
