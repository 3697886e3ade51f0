"""A file with the queue of the tests of Consumers and of faults."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from tests.consumer.bench import Bench
from tests.consumer.models import models, prepared


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
        self.engine = prepared(sa.create_engine(self.file.url()))
        self.sessions = sessionmaker(self.engine)
        self.create()

    def snapshot(self) -> sa.Connection:
        """Return a connection: each transaction of SQLite reads from one snapshot."""
        return self.engine.connect()
