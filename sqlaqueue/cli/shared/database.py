"""The database of a command: its URL, or the session factory of a Consumer."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.cli.shared import mariadb
from sqlaqueue.cli.shared.errors import InputError, command_errors
from sqlaqueue.cli.shared.targets import Target
from sqlaqueue.sqlite import prepare

P = ParamSpec("P")
T = TypeVar("T")

_EXAMPLE = "postgresql+psycopg://user:password@host/database"
_FILE_EXAMPLE = "sqlite:///jobs.db"
_SYNC, _ASYNC = ("psycopg", "psycopg2"), ("psycopg", "asyncpg")
_SECRET = {"passfile", "passwd", "password", "sslpassword", "ssl_key_password"}
"""Options of drivers that are secret, or lead to a secret."""

_CONNECT_TIMEOUT = 10
"""Seconds to wait for a connection. By default drivers wait for a minute or more if the host does not answer."""


def parse_url(text: str) -> sa.URL:
    """Return the URL of a database.

    :raises InputError: if it is malformed. The message does not repeat it, as it may contain a password.
    """
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError):
        raise InputError(f"--url: this is not the URL of a database; write it as {_EXAMPLE}") from None
    if "@" in (url.host or ""):
        raise InputError("--url: it contains more than one @; write an @ of the password as %40")
    backend, plus, driver = url.drivername.partition("+")
    if backend == "sqlite":
        return _checked_file(url)
    if backend in mariadb.BACKENDS:
        return mariadb.checked_url(url)
    if backend not in {"postgresql", "postgres"}:
        raise InputError(f"--url: {backend}:// is not supported, sqlaqueue needs PostgreSQL; write it as {_EXAMPLE}")
    if plus and driver not in {*_SYNC, *_ASYNC}:
        raise InputError(f"--url: the driver {driver!r} is not supported; write it as {_EXAMPLE}")
    return url.set(drivername="postgresql" + plus + driver)


def shown_url(url: sa.URL) -> str:
    """Return the text of a URL without what is secret in it, which options of a driver may be as well."""
    hidden = {name: "***" for name in url.query if name in _SECRET}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def _checked_file(url: sa.URL) -> sa.URL:
    """Refuse a file that does not exist, which SQLite would create, and a database in memory.

    :raises InputError: with an example.
    """
    if url.database is None or not Path(url.database).is_file():
        raise InputError(f"--url: there is no file {url.database!r}; write it as {_FILE_EXAMPLE}")
    return url


def _engine_for_file(url: sa.URL, *, needs_async: bool | None, connections: int | None) -> Any:
    is_async = url.drivername.endswith("aiosqlite") if needs_async is None else needs_async
    if is_async and importlib.util.find_spec("aiosqlite") is None:
        raise InputError("--url: async handlers need aiosqlite: pip install 'sqlaqueue[aiosqlite]'")
    options = {} if connections is None else {"pool_size": connections}
    url = url.set(drivername="sqlite+aiosqlite" if is_async else "sqlite")
    engine: Any = sa.create_engine(url, **options)
    if is_async:
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - needs greenlet

        engine = create_async_engine(url, **options)
    prepare(engine)
    return engine


def _other_engine(url: sa.URL, *, needs_async: bool | None, connections: int | None) -> Any:
    if url.get_backend_name() == "sqlite":
        return _engine_for_file(url, needs_async=needs_async, connections=connections)
    with command_errors():
        return mariadb.engine_for_server(
            url, needs_async=needs_async, connections=connections, timeout=_CONNECT_TIMEOUT
        )


def engine_for(url: sa.URL, *, needs_async: bool | None = None, connections: int | None = None) -> Any:
    """Return an Engine or AsyncEngine.

    :param needs_async: whether to return an AsyncEngine; None to let the URL's driver decide.
    :param connections: the size of the pool; None for SQLAlchemy's default.
    :raises InputError: if no driver is installed for it.
    """
    if url.get_backend_name() != "postgresql":
        return _other_engine(url, needs_async=needs_async, connections=connections)
    known = _ASYNC if needs_async else _SYNC if needs_async is False else (*_SYNC, "asyncpg")
    _, _, driver = url.drivername.partition("+")
    if not driver:
        driver = next((each for each in known if importlib.util.find_spec(each)), "")
        if not driver:
            raise InputError("--url: no driver is installed: pip install 'sqlaqueue[psycopg]'")
    if driver not in known:
        kind = "async" if needs_async else "sync"
        raise InputError(f"--url: {driver} cannot be used with {kind} handlers; use postgresql+{known[0]}://")
    if importlib.util.find_spec(driver) is None:
        raise InputError(f"--url: {driver} is not installed: pip install {driver}")
    is_async = driver == "asyncpg" if needs_async is None else needs_async
    if is_async and importlib.util.find_spec("greenlet") is None:
        raise InputError("--url: async handlers need greenlet: pip install 'sqlaqueue[async]'")
    options: dict[str, Any] = {
        "connect_args": {"timeout" if driver == "asyncpg" else "connect_timeout": _CONNECT_TIMEOUT}
    }
    if driver != "asyncpg" and "connect_timeout" in url.query:
        options = {}
    if connections is not None:
        options |= {"pool_size": connections}
    url = url.set(drivername=f"postgresql+{driver}")
    with command_errors():
        if not is_async:
            return sa.create_engine(url, **options)
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - needs greenlet, which sync code does not

        return create_async_engine(url, **options)


class Database:
    """Runs functions on a Session, whether the session factory is sync or async.

    :param sessions: the session factory.
    :param engine: the engine to dispose of on exit; None if it belongs to the application.
    """

    def __init__(self, sessions: Callable[[], Any], engine: Any = None) -> None:
        self._sessions = sessions
        self._engine: Any = engine
        self._runner: asyncio.Runner | None = None

    @classmethod
    def of(cls, target: Target, url: str | None) -> Self:
        """Return the database of a queue.

        :param url: the option ``--url``, which takes precedence over the session factory of a Consumer.
        :raises InputError: if neither is given.
        """
        if url is not None:
            engine = engine_for(parse_url(url))
            if isinstance(engine, sa.Engine):
                return cls(sessionmaker(engine), engine)
            from sqlalchemy.ext.asyncio import async_sessionmaker  # noqa: PLC0415 - as above

            return cls(async_sessionmaker(engine), engine)
        user = target.consumer or target.scheduler
        if user is not None:
            return cls(user.session_factory)
        raise InputError(
            f"{target.text}: the database is missing; give --url {_EXAMPLE}, set SQLAQUEUE_URL, or "
            "name a Consumer instead"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(self._engine, sa.Engine):
            self._engine.dispose()
        if self._runner is not None:
            # Its connections cannot be closed after their event loop.
            disposing: Any = self._engine.dispose()
            self._runner.run(disposing)
            self._runner.close()

    def run(self, operation: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``operation(session, ...)`` with a new session, and return its result."""
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
                result: T = await session.run_sync(operation, *args, **kwargs)
                return result

        return self._runner.run(carry_out())
