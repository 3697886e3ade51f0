"""A handler for each class of a queue whose table holds several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqlaqueue import AsyncConsumer, Constant, Consumer, QueueConfig, QueueMixin
from sqlaqueue.exc import ConfigurationError
from tests.consumer.bench import Bench
from tests.consumer.models import STRATEGIES
from tests.servers import Database


class Models:
    """A base with two subclasses in its table, and one of these with a subclass of its own."""

    def __init__(self, strategy: str) -> None:
        class Base(DeclarativeBase):
            pass

        class Message(QueueMixin, Base):
            __tablename__ = "message"
            __queue__ = QueueConfig(strategy=strategy, max_attempts=2, retry=Constant(delay=0))
            __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_abstract": True}  # noqa: RUF012 - as SQLAlchemy reads it
            id: Mapped[int] = mapped_column(primary_key=True)
            kind: Mapped[str]

        class Email(Message):
            __mapper_args__ = {"polymorphic_identity": "email"}  # noqa: RUF012 - as SQLAlchemy reads it
            to: Mapped[str | None]

        class Letter(Email):
            __mapper_args__ = {"polymorphic_identity": "letter"}  # noqa: RUF012 - as SQLAlchemy reads it

        class Text(Message):
            __mapper_args__ = {"polymorphic_identity": "text"}  # noqa: RUF012 - as SQLAlchemy reads it
            number: Mapped[str | None]

        self.Base, self.Message, self.Email, self.Letter, self.Text = Base, Message, Email, Letter, Text


@pytest.fixture
def models(strategy: str, database: Database) -> Iterator[Models]:
    models = Models(strategy)
    engine = sa.create_engine(database.url())
    models.Base.metadata.create_all(engine)
    yield models
    engine.dispose()


def drain(database: Database, api: str, model: Any, handlers: Any, **options: Any) -> int:
    if api == "sync":
        engine = sa.create_engine(database.url())
        try:
            return Consumer(model, handlers, sessionmaker(engine), **options).drain()
        finally:
            engine.dispose()

    def adapted(handler: Any) -> Any:
        async def handle(session: Any, job: Any) -> None:
            handler(session, job)

        return handle

    async def serve() -> int:
        engine = create_async_engine(database.url("asyncpg"))
        try:
            by_class = {cls: adapted(handler) for cls, handler in handlers.items()}
            return await AsyncConsumer(model, by_class, async_sessionmaker(engine), **options).drain()
        finally:
            await engine.dispose()

    return asyncio.run(serve())


def add(database: Database, *jobs: Any) -> None:
    engine = sa.create_engine(database.url())
    with Session(engine) as session:
        for job in jobs:
            session.add(job)
            session.flush()
        session.commit()
    engine.dispose()


def states(database: Database) -> dict[str, int]:
    with database.connect() as connection:
        return dict(
            connection.execute("SELECT kind || ' ' || status, count(*)::int FROM message GROUP BY 1").fetchall()
        )


def test_each_class_has_its_handler(database: Database, models: Models, api: str) -> None:
    seen: list[tuple[str, str]] = []
    add(database, models.Email(), models.Text(), models.Letter(), models.Email())
    handlers = {
        models.Email: lambda session, job: seen.append(("email", type(job).__name__)),
        models.Text: lambda session, job: seen.append(("text", type(job).__name__)),
    }
    assert drain(database, api, models.Message, handlers) == 4
    # A class without a handler of its own is served by that of the class it inherits from.
    assert seen == [("email", "Email"), ("text", "Text"), ("email", "Letter"), ("email", "Email")]


def test_the_handler_of_the_nearest_class_is_called(database: Database, models: Models, api: str) -> None:
    seen: list[str] = []
    add(database, models.Email(), models.Text(), models.Letter())
    handlers = {
        models.Message: lambda session, job: seen.append("message"),
        models.Letter: lambda session, job: seen.append("letter"),
    }
    drain(database, api, models.Message, handlers)
    assert sorted(seen) == ["letter", "message", "message"]


def test_a_batch_has_jobs_of_one_class(database: Database, models: Models, api: str) -> None:
    seen: list[list[str]] = []
    add(database, models.Email(), models.Text(), models.Letter(), models.Text())

    def fail(session: Any, jobs: Any) -> None:
        raise ValueError

    handlers = {
        models.Email: lambda session, jobs: seen.append([type(job).__name__ for job in jobs]),
        models.Text: fail,
    }
    drain(database, api, models.Message, handlers, batch=True)
    assert seen == [["Email", "Letter"]]
    assert states(database) == {"email completed": 1, "letter completed": 1, "text failed": 2}


def test_jobs_of_unknown_classes_are_not_claimed(database: Database, models: Models, api: str) -> None:
    """A newer version of the program has enqueued them; SQLAlchemy itself could not even load them."""
    with database.connect() as connection:
        connection.execute("INSERT INTO message (kind, priority) VALUES ('fax', -1), ('text', 0)")
    handlers = {models.Email: lambda *_: None, models.Text: lambda *_: None}
    assert drain(database, api, models.Message, handlers) == 1
    assert states(database) == {"fax pending": 1, "text completed": 1}


def test_some_jobs_of_some_classes(database: Database, models: Models, api: str) -> None:
    add(database, models.Email(to="a"), models.Email(to="b"), models.Letter(to="a"), models.Text())
    some = sa.select(models.Email).where(models.Email.to == "a")
    assert drain(database, api, some, {models.Email: lambda *_: None}) == 2
    assert states(database) == {"email completed": 1, "email pending": 1, "letter completed": 1, "text pending": 1}


# -- what cannot be meant ----------------------------------------------------------------------------------------------

kinds = Models(STRATEGIES[0])
sessions: Any = sessionmaker()
async_sessions: Any = async_sessionmaker()


def handle(session: Any, job: Any) -> None:
    """Handle a job."""


async def handle_async(session: Any, job: Any) -> None:
    """Handle a job in an event loop."""


@pytest.mark.once
@pytest.mark.parametrize(("kind", "one"), [(Consumer, handle), (AsyncConsumer, handle_async)])
@pytest.mark.parametrize(
    ("model", "classes", "said"),
    [
        (kinds.Message, [], "no handler for Email, Letter, Text; add Email: handler, or Message: handler for all"),
        (kinds.Message, [kinds.Email], "no handler for Text; add Text: handler"),
        (kinds.Message, [kinds.Letter, kinds.Text], "no handler for Email;"),
        (kinds.Email, [kinds.Email, kinds.Text], r"\{Text: ...\}\): Text is not Email or a subclass of it"),
        (sa.select(kinds.Email), [kinds.Text], "Text is not Email or a subclass of it"),
        (kinds.Message, [kinds.Message, int], "int is not Message or a subclass of it"),
        (kinds.Message, [kinds.Message, "Email"], "'Email' is not Message or a subclass of it"),
    ],
)
def test_invalid_handlers_are_refused(kind: Any, one: Any, model: Any, classes: list[Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        kind(model, dict.fromkeys(classes, one), sessions)


@pytest.mark.once
def test_each_handler_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="a handler is a callable"):
        Consumer(kinds.Message, {kinds.Message: 5}, sessions)  # type: ignore[dict-item] # the point of this test
    with pytest.raises(ConfigurationError, match="is called as"):
        Consumer(kinds.Message, {kinds.Message: handle, kinds.Text: lambda job: None}, sessions)  # type: ignore[dict-item] # the point of this test
    with pytest.raises(ConfigurationError, match="use AsyncConsumer"):
        Consumer(kinds.Message, {kinds.Message: handle, kinds.Text: handle_async}, sessions)
    with pytest.raises(ConfigurationError, match="async def"):
        AsyncConsumer(kinds.Message, {kinds.Message: handle_async, kinds.Text: handle}, async_sessions)  # type: ignore[dict-item] # the point of this test


@pytest.mark.once
def test_a_class_that_is_mapped_later_is_noticed(database: Database) -> None:
    models = Models("update_status")
    engine = sa.create_engine(database.url())
    models.Base.metadata.create_all(engine)
    consumer = Consumer(models.Message, {models.Email: handle, models.Text: handle}, sessionmaker(engine))
    assert consumer.drain() == 0
    type("Fax", (models.Message,), {"__mapper_args__": {"polymorphic_identity": "fax"}})
    with pytest.raises(ConfigurationError, match="no handler for Fax"):
        consumer.drain()
    engine.dispose()


@pytest.mark.once
def test_a_queue_of_one_class(supply: Any) -> None:
    bench: Bench = supply.take("update_status", "sync")
    bench.enqueue(2)
    assert Consumer(bench.Job, {bench.Job: handle}, bench.sessions).drain() == 2
