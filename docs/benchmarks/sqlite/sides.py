"""A queue on sqlite3 without a library, and the same with sqlaqueue."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlaqueue
from docs.benchmarks.beside_raw.sides import LibrarySide, RawSide
from sqlaqueue import QueueConfig, QueueMixin

TABLE = """
CREATE TABLE job (
  id integer PRIMARY KEY, payload text, status text NOT NULL DEFAULT 'pending', priority integer NOT NULL DEFAULT 0,
  run_at text NOT NULL, attempts integer NOT NULL DEFAULT 0, lease_token text, lease_expires_at text, finished_at text
)
"""
INDEXES = (
    "CREATE INDEX job_claim ON job (priority, run_at, id) WHERE status = 'pending'",
    "CREATE INDEX job_lease ON job (lease_expires_at) WHERE status = 'processing'",
)
NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
CLAIM = f"""
UPDATE job SET status = 'processing', attempts = attempts + 1, lease_token = ?,
  lease_expires_at = strftime('%Y-%m-%d %H:%M:%f', 'now', '+60 seconds')
WHERE id IN (
  SELECT id FROM job WHERE status = 'pending' AND run_at <= {NOW} ORDER BY priority, run_at, id LIMIT ?
) RETURNING id, payload
"""
COMPLETE = f"""
UPDATE job SET status = 'completed', finished_at = {NOW}, lease_token = NULL, lease_expires_at = NULL
WHERE id IN (SELECT value FROM json_each(?)) AND lease_token = ? AND status = 'processing'
"""
INSERT = f"INSERT INTO job (payload, run_at) VALUES (?, {NOW})"


@dataclass(frozen=True)
class RawSqlite(RawSide):
    """A file."""

    path: Path
    synchronous: str

    def create(self) -> None:
        """Create the table."""
        connection = self.connect()
        for statement in (TABLE, *INDEXES):
            connection.execute(statement)
        connection.close()

    def connect(self) -> sqlite3.Connection:
        """Return a connection as prepare() sets it up."""
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        for pragma in ("busy_timeout = 30000", "journal_mode = WAL", f"synchronous = {self.synchronous}"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def insert(self, connection: sqlite3.Connection, number: int) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(INSERT, [("x",)] * number)

    def claim(self, connection: sqlite3.Connection, limit: int) -> list[int]:
        connection.execute("BEGIN IMMEDIATE")
        return [row[0] for row in connection.execute(CLAIM, ("token", limit)).fetchall()]

    def complete(self, connection: sqlite3.Connection, keys: list[int]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(COMPLETE, (str(keys), "token"))


class Base(DeclarativeBase):
    pass


class Job(QueueMixin, Base):
    __tablename__ = "job"
    __queue__ = QueueConfig(strategy="update_status", lease=60)
    id: Mapped[int] = mapped_column(primary_key=True)
    payload: Mapped[str | None]


@dataclass(frozen=True)
class LibrarySqlite(LibrarySide):
    """The same with the library."""

    path: Path
    synchronous: str
    model = Job

    def create(self) -> None:
        """Create the tables."""
        engine = self.connect()
        Base.metadata.create_all(engine)
        engine.dispose()

    def connect(self) -> sa.Engine:
        engine = sqlaqueue.prepare(sa.create_engine(f"sqlite:///{self.path}"))
        event.listen(engine, "connect", lambda one, _: one.execute(f"PRAGMA synchronous = {self.synchronous}"))
        return engine
