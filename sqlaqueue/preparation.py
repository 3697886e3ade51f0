"""Prepares an engine for the database that its URL names, so that a program reads the same on each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.sql.engine import whole_engine

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

EngineT = TypeVar("EngineT", bound="sa.Engine | AsyncEngine")

_TIMEOUT = "busy_timeout"


def prepare(engine: EngineT, *, busy_timeout: float | None = None) -> EngineT:
    """Prepare an engine for queues, and return it. Call it right after ``create_engine()``.

    PostgreSQL needs nothing. SQLite and MariaDB get a compiler that translates what the library writes, and
    transactions and settings as queues need them; statements of the program mean the same as before. A second call does
    nothing.

    ::

        engine = prepare(create_engine("sqlite:///jobs.db"))
        async_engine = prepare(create_async_engine("mariadb+asyncmy://user:password@host/shop"))

    ``create_engine(url, plugins=["sqlaqueue"])`` and a URL with ``?plugin=sqlaqueue`` prepare the engine too.

    :param engine: an Engine or an AsyncEngine. One that ``execution_options()`` has made is prepared together with that
        from which it was made.
    :param busy_timeout: seconds that a transaction waits for the write lock of SQLite before it raises an error; 30 by
        default. Other databases have no such lock and ignore it.
    :raises ConfigurationError: if the engine is for another database or driver, has connected before, or has been
        prepared with another ``busy_timeout``; if SQLite is older than 3.35. The first connection raises it if the
        server is MySQL, or MariaDB before 10.6.
    """
    found: Any = whole_engine(engine)
    if not isinstance(found, sa.Engine):
        msg = f"prepare({engine!r}) needs an engine; use prepare(create_engine(url))"
        raise ConfigurationError(msg)
    name = found.dialect.name
    # What serves one database is imported where it is used: a program on PostgreSQL needs neither.
    if name == "sqlite":
        from sqlaqueue.sqlite.prepare import prepare_sqlite  # noqa: PLC0415 - see above

        prepare_sqlite(found, busy_timeout)
    elif name in {"mariadb", "mysql"}:
        from sqlaqueue.mariadb.prepare import prepare_mariadb  # noqa: PLC0415 - see above

        prepare_mariadb(found)
    elif name != "postgresql":
        msg = f"prepare({engine!r}): the engine is for {name}; queues work on PostgreSQL, SQLite and MariaDB"
        raise ConfigurationError(msg)
    return engine


class PreparePlugin(sa.CreateEnginePlugin):
    """Calls :func:`prepare` for an engine that is made with ``plugins=["sqlaqueue"]``.

    ``busy_timeout`` is an argument of ``create_engine()``, or of the URL.
    """

    def __init__(self, url: sa.URL, kwargs: dict[str, Any]) -> None:
        super().__init__(url, kwargs)
        in_url = url.query.get(_TIMEOUT)
        self.busy_timeout: float | None = kwargs.pop(_TIMEOUT, None)
        if self.busy_timeout is None and in_url is not None:
            try:
                self.busy_timeout = float(str(in_url))
            except ValueError:
                msg = f"the URL's {_TIMEOUT}={in_url!r} must be a number of seconds, for example {_TIMEOUT}=30"
                raise ConfigurationError(msg) from None

    def update_url(self, url: sa.URL) -> sa.URL:
        return url.difference_update_query([_TIMEOUT])

    def engine_created(self, engine: sa.Engine) -> None:
        prepare(engine, busy_timeout=self.busy_timeout)
