"""One interface for tests with Session and AsyncSession: all database calls are awaited."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

DRIVERS = ("psycopg", "psycopg-async", "asyncpg", "psycopg2")


class AwaitableEngine(Protocol):
    """A sync or async engine."""

    def session(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Open an AsyncSession, or a Session with the same interface."""

    async def ddl(self, function: Callable[[sa.Connection], Any]) -> None:
        """Call a function such as ``metadata.create_all`` with a connection."""


class _AwaitedSession:
    """A Session with the interface of an AsyncSession."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.add_all = session.add_all

    def __contains__(self, instance: object) -> bool:
        return instance in self._session

    async def execute(self, *arguments: Any) -> Any:
        return self._session.execute(*arguments)

    async def scalars(self, *arguments: Any) -> Any:
        return self._session.scalars(*arguments)

    async def commit(self) -> None:
        self._session.commit()

    async def flush(self) -> None:
        self._session.flush()

    async def rollback(self) -> None:
        self._session.rollback()


class _Sync:
    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[_AwaitedSession]:
        with Session(self._engine) as session:
            yield _AwaitedSession(session)

    async def ddl(self, function: Callable[[sa.Connection], Any]) -> None:
        with self._engine.begin() as connection:
            function(connection)


class _Async:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(self._engine) as session:
            yield session

    async def ddl(self, function: Callable[[sa.Connection], Any]) -> None:
        async with self._engine.begin() as connection:
            await connection.run_sync(function)


@contextlib.asynccontextmanager
async def awaitable_engine(database: Any, driver: str, options: dict[str, Any]) -> AsyncIterator[AwaitableEngine]:
    """Open an engine for a database, with the named driver and execution options."""
    if driver in {"psycopg", "psycopg2"}:
        engine = sa.create_engine(database.url(driver), execution_options=options)
        try:
            yield _Sync(engine)
        finally:
            engine.dispose()
    else:
        url = database.url(driver.removesuffix("-async"))
        async_engine = create_async_engine(url, execution_options=options)
        try:
            yield _Async(async_engine)
        finally:
            await async_engine.dispose()
