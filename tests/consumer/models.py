"""The queues of these tests, one and the same model for each strategy; and how one handler serves both Consumers.

A handler is a coroutine, and awaits only the methods of a :class:`HandlerIO`. With a Session these never suspend, so a
sync handler runs the coroutine in one go.
"""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

import sqlaqueue
from sqlaqueue import Constant, QueueConfig, QueueMixin

STRATEGIES = ("update_status", "delete_returning", "batch_select")
DEADLINE = 30.0
"""Seconds until a test gives up on something that must happen."""

Handler = Callable[[Any, Any], Awaitable[object]]


class Models(NamedTuple):
    base: type[DeclarativeBase]
    job: Any
    owner: Any = None
    effect: Any = None
    """A row for each thing that a handler did in the database; nothing forbids to do it twice."""


@cache
def models(strategy: str, *, notify: bool = True) -> Models:
    """Return the models of a strategy; ``own_message`` is ``delete_returning`` for rows without a state."""
    own_message = strategy == "own_message"

    class Base(DeclarativeBase):
        pass

    class Owner(Base):
        __tablename__ = "owner"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(
            strategy="delete_returning" if own_message else strategy,
            rows_are_messages=own_message,
            max_attempts=3,
            notify=notify,
            # Due again at once: these tests wait for conditions, not for time to pass.
            retry=Constant(delay=0),
        )
        id: Mapped[int] = mapped_column(primary_key=True)
        payload: Mapped[str | None]
        owner_id: Mapped[int | None] = mapped_column(sa.ForeignKey(Owner.id))
        owner: Mapped[Owner | None] = relationship()

    class Effect(Base):
        __tablename__ = "effect"
        id: Mapped[int] = mapped_column(primary_key=True)
        job: Mapped[int]
        note: Mapped[str | None]

    return Models(Base, Job, Owner, Effect)


def prepared(engine: Any) -> Any:
    """Prepare an engine whose database is not PostgreSQL, and return it."""
    if engine.dialect.name == "sqlite":
        sqlaqueue.prepare(engine)
    return engine


class HandlerIO:
    """What a handler awaits: the methods of its session, and waiting."""

    def __init__(self, session: Any, given_up: threading.Event | None = None) -> None:
        self.session = session
        self._given_up = given_up or threading.Event()
        self.add, self.info = session.add, session.info

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return a method of the session as one to await, whichever API the session is for."""
        method = getattr(self.session, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            return await result if inspect.isawaitable(result) else result

        return call

    async def run(self, function: Callable[[Session], object]) -> None:
        function(self.session)

    async def choose(self, level: str) -> None:
        """Begin a transaction at an isolation level."""
        await self.connection(execution_options={"isolation_level": level})

    @contextlib.asynccontextmanager
    async def nested(self) -> AsyncIterator[None]:
        with self.session.begin_nested():
            yield

    async def wait(self, event: threading.Event) -> None:
        await self.wait_for(event.is_set)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert not self._given_up.is_set(), "the test that this handler belongs to has failed"
            assert time.monotonic() < deadline, "what the handler waits for did not happen"
            await self._pause()

    async def _pause(self) -> None:
        time.sleep(0.005)  # noqa: ASYNC251 - this coroutine runs in a thread of its own


class AsyncHandlerIO(HandlerIO):
    def __init__(self, session: AsyncSession, given_up: threading.Event | None = None) -> None:
        super().__init__(session, given_up)
        self.loop = asyncio.get_running_loop()

    async def run(self, function: Callable[[Session], object]) -> None:
        await self.session.run_sync(function)

    @contextlib.asynccontextmanager
    async def nested(self) -> AsyncIterator[None]:
        async with self.session.begin_nested():
            yield

    async def suspend(self) -> None:
        """Wait for what never happens."""
        await asyncio.Future(loop=self.loop)

    async def _pause(self) -> None:
        await asyncio.sleep(0.005)


def for_sync(handler: Handler, given_up: threading.Event | None = None) -> Callable[[Session, Any], object]:
    """Return the handler for a Consumer; after ``given_up`` its waits fail."""

    def handle(session: Session, jobs: Any) -> object:
        coroutine: Any = handler(HandlerIO(session, given_up), jobs)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        coroutine.close()
        msg = "a handler awaited something other than a method of its HandlerIO"
        raise AssertionError(msg)

    return handle


def for_async(
    handler: Handler, given_up: threading.Event | None = None
) -> Callable[[AsyncSession, Any], Awaitable[object]]:
    """Return the handler for an AsyncConsumer; after ``given_up`` its waits fail."""

    async def handle(session: AsyncSession, jobs: Any) -> object:
        return await handler(AsyncHandlerIO(session, given_up), jobs)

    return handle
