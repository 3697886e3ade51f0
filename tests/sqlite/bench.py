"""A file with the queue of the tests of Consumers and of faults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

import sqlaqueue.sqlite
from sqlaqueue import AsyncConsumer, Consumer
from tests.consumer.bench import AsyncServer, Bench, Server, SyncServer, nothing, pool_of
from tests.consumer.handler_io import Handler, for_async, for_sync
from tests.consumer.models import models


class File:
    """A file in the place of a database of the server."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def url(self, driver: str = "psycopg") -> str:
        """Return the URL for the driver that stands in the place of a driver for PostgreSQL."""
        return f"sqlite{'+aiosqlite' if driver == 'asyncpg' else ''}:///{self.path}"


class SQLiteBench(Bench):
    """The queue of ``update_status`` in a file."""

    def __init__(self, path: Path, api: str = "sync") -> None:
        self.file = File(path)
        self.database = self.file  # type: ignore[assignment] # a file has the URL alone
        self.strategy, self.api = "update_status", api
        self.models = models(self.strategy)
        self.Job, self.Owner, self.Effect = self.models.job, self.models.owner, self.models.effect
        self.held, self.has_status = False, True
        self.engine = sa.create_engine(self.file.url())
        sqlaqueue.sqlite.prepare(self.engine)
        self.sessions = sessionmaker(self.engine)
        self.create()

    def snapshot(self) -> sa.Connection:
        """Return a connection: each transaction of SQLite reads from one snapshot."""
        return self.engine.connect()

    def consumer(
        self, handler: Handler = nothing, *, engine: Mapping[str, Any] | None = None, **options: Any
    ) -> Server:
        """Return a Consumer of this API on an engine of its own."""
        options = {"poll_interval": 0.05, "grace": 20} | options
        kind = FileServer if self.api == "sync" else AsyncFileServer
        return kind(self, options.pop("model", self.Job), handler, engine or {}, options.pop("session", {}), options)


class FileServer(SyncServer):
    def __init__(self, bench: Bench, model: Any, handler: Handler, engine: Any, session: Any, options: Any) -> None:
        Server.__init__(self, bench)
        self.engine = sa.create_engine(bench.database.url(), **pool_of(options, engine))
        sqlaqueue.sqlite.prepare(self.engine)
        self.session = sessionmaker(self.engine, **session)
        self.consumer = Consumer(model, for_sync(handler, self.given_up), self.session, **options)
        self._listen()


class AsyncFileServer(AsyncServer):
    def __init__(self, bench: Bench, model: Any, handler: Handler, engine: Any, session: Any, options: Any) -> None:
        Server.__init__(self, bench)
        # Named, since before SQLAlchemy 2.0.38 aiosqlite had no pool.
        pool = {"poolclass": sa.AsyncAdaptedQueuePool, **pool_of(options, engine)}
        self.engine = create_async_engine(bench.database.url("asyncpg"), **pool)
        sqlaqueue.sqlite.prepare(self.engine)
        self.session = async_sessionmaker(self.engine, **session)
        self.consumer = AsyncConsumer(model, for_async(handler, self.given_up), self.session, **options)
        self._listen()
