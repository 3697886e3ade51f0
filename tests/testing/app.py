"""An application: a queue for each strategy, and its code, sync or async, under the functions of sqlaqueue.testing."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqlaqueue import AsyncConsumer, Constant, Consumer, QueueConfig, QueueMixin, testing
from sqlaqueue.testing import RunResult, crash, drain, enqueued, run_job, travel


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


def queue(strategy: str, **options: Any) -> QueueConfig:
    return QueueConfig(strategy=strategy, max_attempts=2, retry=Constant(60, jitter=0), **options)


class LeasedEmail(Email):
    __tablename__ = "leased_email"
    __queue__ = queue("update_status", lease=timedelta(minutes=5), notify=True)


class DeletedWhenDone(Email):
    __tablename__ = "deleted_when_done"
    __queue__ = queue("update_status", on_complete="delete")


class HeldEmail(Email):
    __tablename__ = "held_email"
    __queue__ = queue("batch_select")


class MessageEmail(Email):
    __tablename__ = "message_email"
    __queue__ = queue("delete_returning")


class OwnMessage(Email):
    __tablename__ = "own_message"
    __queue__ = queue("delete_returning", columns={"status": None}, rows_are_messages=True)


QUEUES: dict[str, type[Email]] = {
    "update_status": LeasedEmail,
    "delete": DeletedWhenDone,
    "batch_select": HeldEmail,
    "delete_returning": MessageEmail,
    "own_message": OwnMessage,
}


def send(session: Session, email: Email) -> None:
    """Write something, and fail if the address is bad."""
    session.add(Sent(to=email.to))
    session.flush()
    if "@" not in email.to:
        raise ValueError(email.to)


class App:
    """Calls the functions under test, each in its sync or in its async form."""

    is_async = False

    def __init__(self, session: Any, model: type[Email]) -> None:
        self.session, self.model = session, model

    def call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a Session."""
        return operation(self.session, *arguments)

    def use(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of sqlaqueue.testing."""
        return function(self.session, *arguments, **options)

    def handler(self, handler: Any) -> Any:
        """Return a handler of the right kind."""
        return handler

    def run(self, job: Any, handler: Any = send, **options: Any) -> RunResult[Any]:
        result: RunResult[Any] = self.use(run_job, job, self.handler(handler), **options)
        return result

    def drain(self, handler: Any = send, *, model: Any = None, **options: Any) -> int:
        return int(self.use(drain, self.model if model is None else model, self.handler(handler), **options))

    def travel(self, delta: Any) -> None:
        self.use(travel, delta)

    def crash(self, job: Any) -> None:
        self.use(crash, job)

    def enqueued(self, model: Any = None, **columns: Any) -> list[Any]:
        # The list itself, whose assertion says more.
        jobs: list[Any] = self.use(enqueued, self.model if model is None else model, **columns)
        return jobs

    def consumer(self, handler: Any, **options: Any) -> Any:
        return Consumer(self.model, self.handler(handler), Session, **options)

    def add(self, to: str = "ada@example.com", **values: Any) -> Any:
        job = self.model(to=to, **values)
        self.call(lambda session: (session.add(job), session.commit(), session.refresh(job)))
        return job

    def scalars(self, statement: Any) -> list[Any]:
        return list(self.call(lambda session: session.scalars(statement).all()))

    @property
    def sent(self) -> list[str]:
        """The addresses that handlers have written."""
        return self.scalars(sa.select(Sent.to).order_by(Sent.id))


class AsyncApp(App):
    is_async = True

    def __init__(self, session: Any, model: type[Email], runner: asyncio.Runner) -> None:
        super().__init__(session, model)
        self.wait_for = runner.run

    def call(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        return self.wait_for(self.session.run_sync(operation, *arguments))

    def use(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        function = getattr(testing, f"async_{function.__name__}")
        return self.wait_for(function(self.session, *arguments, **options))

    def handler(self, handler: Any) -> Any:
        if isinstance(handler, AsyncConsumer):
            return handler
        if isinstance(handler, dict):
            return {model: self.handler(each) for model, each in handler.items()}

        async def run(session: AsyncSession, job: Any) -> None:
            await session.run_sync(handler, job)

        return run

    def consumer(self, handler: Any, **options: Any) -> Any:
        return AsyncConsumer(self.model, self.handler(handler), AsyncSession, **options)


@contextlib.contextmanager
def sync_app(engine: sa.Engine, model: type[Email]) -> Iterator[App]:
    with engine.connect() as connection:
        transaction = connection.begin()
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            yield App(session, model)
        transaction.rollback()


@contextlib.contextmanager
def async_app(engine: AsyncEngine, model: type[Email], runner: asyncio.Runner) -> Iterator[AsyncApp]:
    connection = runner.run(_connect(engine))
    session = AsyncSession(bind=connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
    try:
        yield AsyncApp(session, model, runner)
    finally:
        runner.run(session.close())
        runner.run(connection.rollback())
        runner.run(connection.close())


async def _connect(engine: AsyncEngine) -> AsyncConnection:
    connection = await engine.connect()
    await connection.begin()
    return connection
