"""The database that commands work on: an address, or what a Consumer of the user's brings along."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.cli.errors import InputError, told_apart
from sqlaqueue.cli.targets import Target

P = ParamSpec("P")
T = TypeVar("T")

_EXAMPLE = "postgresql+psycopg://user:password@host/database"
_SYNC, _ASYNC = ("psycopg", "psycopg2"), ("psycopg", "asyncpg")
_PATIENCE = 10
"""Seconds for a connection: a host that does not answer must not keep anybody waiting for minutes."""


def parse_url(text: str) -> sa.URL:
    """Return the address of a database.

    :raises InputError: when it is none; the message does not repeat it, for it may hold a password.
    """
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError):
        raise InputError(f"--url: this is no address of a database; it looks like {_EXAMPLE}") from None
    if "@" in (url.host or ""):
        raise InputError("--url: there is more than one @ in it; write one that belongs to the password as %40")
    backend, plus, driver = url.drivername.partition("+")
    if backend not in {"postgresql", "postgres"}:
        raise InputError(f"--url: {backend}:// is not served, sqlaqueue needs PostgreSQL; it looks like {_EXAMPLE}")
    if plus and driver not in {*_SYNC, *_ASYNC}:
        raise InputError(f"--url: the driver {driver!r} is not served; it looks like {_EXAMPLE}")
    return url.set(drivername="postgresql" + plus + driver)


def engine_for(url: sa.URL, *, needs_async: bool | None = None, connections: int | None = None) -> Any:
    """Return an Engine or AsyncEngine.

    :param needs_async: which of them; None for the one that fits the address.
    :param connections: the most connections at once; None for SQLAlchemy's default.
    :raises InputError: when there is no driver for it.
    """
    known = _ASYNC if needs_async else _SYNC if needs_async is False else (*_SYNC, "asyncpg")
    _, _, driver = url.drivername.partition("+")
    if not driver:
        driver = next((each for each in known if importlib.util.find_spec(each)), "")
        if not driver:
            raise InputError("--url: there is no driver for it: pip install 'sqlaqueue[psycopg]'")
    if driver not in known:
        kind = "async" if needs_async else "sync"
        raise InputError(f"--url: {driver} cannot serve a handler that is {kind}; use postgresql+{known[0]}://")
    if importlib.util.find_spec(driver) is None:
        raise InputError(f"--url: {driver} is not installed: pip install {driver}")
    is_async = driver == "asyncpg" if needs_async is None else needs_async
    if is_async and importlib.util.find_spec("greenlet") is None:
        raise InputError("--url: what is async needs greenlet: pip install 'sqlaqueue[async]'")
    options: dict[str, Any] = {"connect_args": {"timeout" if driver == "asyncpg" else "connect_timeout": _PATIENCE}}
    if driver != "asyncpg" and "connect_timeout" in url.query:
        options = {}
    if connections is not None:
        options |= {"pool_size": connections}
    url = url.set(drivername=f"postgresql+{driver}")
    with told_apart():
        if not is_async:
            return sa.create_engine(url, **options)
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - sync code does without greenlet

        return create_async_engine(url, **options)


class Database:
    """Runs operations, each with a session of its own; the same for sync and async engines.

    :param sessions: makes sessions.
    :param engine: what is to be closed in the end, if it is our own.
    """

    def __init__(self, sessions: Callable[[], Any], engine: Any = None) -> None:
        self._sessions = sessions
        self._engine: Any = engine
        self._runner: asyncio.Runner | None = None

    @classmethod
    def of(cls, target: Target, url: str | None) -> Self:
        """Return the database to look for a queue in.

        :raises InputError: when nobody has said which.
        """
        if url is not None:
            engine = engine_for(parse_url(url))
            if isinstance(engine, sa.Engine):
                return cls(sessionmaker(engine), engine)
            from sqlalchemy.ext.asyncio import async_sessionmaker  # noqa: PLC0415 - as above

            return cls(async_sessionmaker(engine), engine)
        if target.consumer is not None:
            return cls(target.consumer.session_factory)
        raise InputError(
            f"{target.text}: in which database? Give --url {_EXAMPLE}, set SQLAQUEUE_URL, or name a Consumer of yours"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(self._engine, sa.Engine):
            self._engine.dispose()
        if self._runner is not None:
            # Its connections end with the loop in which they were made.
            disposing: Any = self._engine.dispose()
            self._runner.run(disposing)
            self._runner.close()

    def run(self, operation: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what an operation on a session returns."""
        session = self._sessions()
        if isinstance(session, Session):
            with session:
                return operation(session, *args, **kwargs)
        if not hasattr(session, "run_sync"):
            made = type(session).__name__
            raise InputError(
                f"{self._sessions!r} makes {made}; give a Consumer a sessionmaker or an async_sessionmaker"
            )
        if self._runner is None:
            self._runner = asyncio.Runner()
            self._engine = session.bind

        async def carry_out() -> T:
            async with session:
                found: T = await session.run_sync(operation, *args, **kwargs)
                return found

        return self._runner.run(carry_out())
