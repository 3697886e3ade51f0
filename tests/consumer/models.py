"""The queues of these tests, one and the same model for each strategy; and how one handler serves both Consumers.

A handler is a coroutine, and awaits only the methods of a :class:`HandlerIO`. With a Session these never suspend, so a
sync handler runs the coroutine in one go.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

import sqlaqueue.sqlite
from sqlaqueue import Constant, QueueConfig, QueueMixin

STRATEGIES = ("update_status", "delete_returning", "batch_select")
DEADLINE = 30.0
"""Seconds until a test gives up on something that must happen."""

Handler = Callable[[Any, Any], Awaitable[object]]


class Models(NamedTuple):
    """The mapped classes of one queue."""

    base: type[DeclarativeBase]
    job: Any
    owner: Any
    effect: Any
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
        sqlaqueue.sqlite.prepare(engine)
    return engine


class HandlerIO:
    """What a handler awaits: the methods of its session, and waiting."""

    def __init__(self, session: Session, given_up: threading.Event | None = None) -> None:
        self.session: Any = session
        self._given_up = given_up or threading.Event()
        self.add, self.info = session.add, session.info

    async def execute(self, *arguments: Any) -> Any:
        return self.session.execute(*arguments)

    async def scalar(self, *arguments: Any) -> Any:
        return self.session.scalar(*arguments)

    async def run(self, function: Callable[[Session], object]) -> None:
        function(self.session)

    async def flush(self) -> None:
        self.session.flush()

    async def commit(self) -> None:
        self.session.commit()

    async def rollback(self) -> None:
        self.session.rollback()

    async def close(self) -> None:
        self.session.close()

    async def delete(self, instance: object) -> None:
        self.session.delete(instance)

    async def choose(self, level: str) -> None:
        """Begin a transaction at an isolation level."""
        self.session.connection(execution_options={"isolation_level": level})

    @contextlib.asynccontextmanager
    async def nested(self) -> AsyncIterator[None]:
        with self.session.begin_nested():
            yield

    async def begin_nested(self) -> None:
        self.session.begin_nested()

    async def wait(self, event: threading.Event) -> None:
        deadline = time.monotonic() + DEADLINE
        while not event.wait(0.05):
            self._go_on_waiting(deadline)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline, pause = time.monotonic() + DEADLINE, threading.Event()
        while not condition():
            pause.wait(0.005)
            self._go_on_waiting(deadline)

    def _go_on_waiting(self, deadline: float) -> None:
        assert not self._given_up.is_set(), "the test that this handler belongs to has failed"
        assert time.monotonic() < deadline, "what the handler waits for did not happen"


class AsyncHandlerIO(HandlerIO):
    """The same for an AsyncSession."""

    session: AsyncSession

    def __init__(self, session: AsyncSession, given_up: threading.Event | None = None) -> None:
        super().__init__(session.sync_session, given_up)
        self.session = session
        self.loop = asyncio.get_running_loop()

    async def execute(self, *arguments: Any) -> Any:
        return await self.session.execute(*arguments)

    async def scalar(self, *arguments: Any) -> Any:
        return await self.session.scalar(*arguments)

    async def run(self, function: Callable[[Session], object]) -> None:
        await self.session.run_sync(function)

    async def flush(self) -> None:
        await self.session.flush()

    async def commit(self) -> None:
        await self.session.commit()

    async def rollback(self) -> None:
        await self.session.rollback()

    async def close(self) -> None:
        await self.session.close()

    async def delete(self, instance: object) -> None:
        await self.session.delete(instance)

    async def choose(self, level: str) -> None:
        await self.session.connection(execution_options={"isolation_level": level})

    @contextlib.asynccontextmanager
    async def nested(self) -> AsyncIterator[None]:
        async with self.session.begin_nested():
            yield

    async def begin_nested(self) -> None:
        await self.session.begin_nested()

    async def suspend(self) -> None:
        """Wait for what never happens."""
        await asyncio.Future(loop=self.loop)

    async def wait(self, event: threading.Event) -> None:
        deadline = time.monotonic() + DEADLINE
        while not event.is_set():
            self._go_on_waiting(deadline)
            await asyncio.sleep(0.005)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            self._go_on_waiting(deadline)
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
