"""check_handlers() finds queues without a handler, and handlers that cannot run their queue's jobs."""

from functools import partial
from typing import Any, ClassVar

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, Consumer, QueueMixin
from sqlaqueue.exc import StatementError
from sqlaqueue.testing import check_handlers

pytestmark = pytest.mark.once


class Base(DeclarativeBase):
    pass


class Email(QueueMixin, Base):
    __tablename__ = "email"
    id: Mapped[int] = mapped_column(primary_key=True)


class Message(QueueMixin, Base):
    __tablename__ = "message"
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    __mapper_args__: ClassVar[dict[str, str]] = {"polymorphic_on": "kind"}


class Text(Message):
    __mapper_args__: ClassVar[dict[str, str]] = {"polymorphic_identity": "text"}


class Call(Message):
    __mapper_args__: ClassVar[dict[str, str]] = {"polymorphic_identity": "call"}


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)


def send(session: Session, email: Email) -> None: ...


async def asend(session: AsyncSession, email: Email) -> None: ...


def talk(session: Session, message: Message) -> None: ...


def anything(session: Any, job: Any) -> None: ...


def many(session: Session, emails: list[Email]) -> None: ...


class Handler:
    def __call__(self, session: Session, email: Email) -> None: ...


class MySession(Session):
    pass


def with_my_session(session: MySession, email: Email) -> None: ...


def async_with_sync_session(session: AsyncSession, email: Email) -> None: ...


def with_mailer(mailer: None, session: Session, message: Message) -> None: ...


def swapped(email: Email, session: Session) -> None: ...


async def sync_session(session: Session, email: Email) -> None: ...


@pytest.mark.parametrize(
    "handler", [send, asend, anything, Handler(), partial(send), with_my_session, lambda s, e: None]
)
def test_handlers_that_fit(handler: Any) -> None:
    check_handlers(Base, {Email: handler, Message: talk})


def test_consumers() -> None:
    sessions = sessionmaker()
    check_handlers(Base.registry, [Consumer(Email, send, sessions), Consumer(Message, talk, sessions)])
    check_handlers(
        Base,
        [Consumer(Email, many, sessions, batch=True), Consumer(Text, talk, sessions), Consumer(Call, talk, sessions)],
    )
    by_class = Consumer(Message, {Text: talk, Call: anything}, sessions)
    check_handlers(Base, [AsyncConsumer(Email, asend, async_sessionmaker()), by_class])


@pytest.mark.parametrize(
    ("handlers", "problem"),
    [
        ({Message: talk}, "Email: there is no handler for its jobs"),
        ({Email: send, Text: talk}, "Call: there is no handler for its jobs"),
        ({Email: talk, Message: talk}, "Email: talk takes jobs of class Message"),
        ({Email: send, Message: "talk"}, r"Message\(handler='talk'\): a handler is a callable"),
        ({Email: lambda session: None, Message: talk}, r"Email: the handler .* is called as"),
        ({Email: async_with_sync_session, Message: talk}, "async_with_sync_session is a function, so its first"),
        ({Email: partial(with_mailer, None), Message: talk}, "takes jobs of class Message"),
        ({Email: swapped, Message: talk}, "so its first argument is of class Session and not Email"),
        (
            {Email: sync_session, Message: talk},
            "a coroutine function, so its first argument is of class AsyncSession",
        ),
    ],
)
def test_handlers_that_do_not_fit(handlers: Any, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        check_handlers(Base, handlers)


def test_all_problems_are_named() -> None:
    with pytest.raises(AssertionError) as raised:
        check_handlers(Base, {})
    assert str(raised.value).splitlines() == [
        "Call: there is no handler for its jobs",
        "Email: there is no handler for its jobs",
        "Text: there is no handler for its jobs",
    ]


@pytest.mark.parametrize(
    ("base", "handlers", "problem"),
    [
        (Session, {}, "give the declarative base of the models"),
        (Base, {"Email": send}, "give queue classes as keys"),
        (Base, {Customer: send}, "give queue classes as keys"),
        (Base, send, "give a dict of handlers by class, or Consumers"),
        (Base, [send], "give a dict of handlers by class, or Consumers"),
    ],
)
def test_wrong_arguments(base: Any, handlers: Any, problem: str) -> None:
    with pytest.raises(StatementError, match=problem):
        check_handlers(base, handlers)
