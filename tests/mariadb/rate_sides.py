"""A queue on plain PyMySQL, and the same with sqlaqueue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pymysql
import sqlalchemy as sa

import sqlaqueue.mariadb
from docs.benchmarks.beside_raw.sides import LibrarySide, RawSide, VerbsSide
from tests.mariadb.models import Job

INSERT = "INSERT INTO job (payload, status, priority, run_at, attempts) VALUES (%s, 'pending', 0, UTC_TIMESTAMP(6), 0)"
PICK = (
    "SELECT id FROM job FORCE INDEX (ix_job_queue_claim) WHERE status = 'pending' AND run_at <= UTC_TIMESTAMP(6) "
    "ORDER BY priority, run_at, id LIMIT %s FOR UPDATE SKIP LOCKED"
)
TAKE = (
    "UPDATE job SET status = 'processing', attempts = attempts + 1, "
    "lease_expires_at = UTC_TIMESTAMP(6) + INTERVAL 60 SECOND WHERE id IN %s"
)
READ = "SELECT * FROM job WHERE id IN %s"
COMPLETE = "UPDATE job SET status = 'completed', finished_at = UTC_TIMESTAMP(6), lease_expires_at = NULL WHERE id IN %s"


@dataclass(frozen=True)
class RawMariaDB(RawSide):
    """A database, by its socket."""

    socket: str
    database: str

    def connect(self) -> Any:
        connection = pymysql.connect(unix_socket=self.socket, user="root", database=self.database)
        connection.cursor().execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.commit()
        return connection

    def insert(self, connection: Any, number: int) -> None:
        # One INSERT with the values of all rows, as PyMySQL makes of it.
        connection.cursor().executemany(INSERT, [("x",)] * number)

    def claim(self, connection: Any, limit: int) -> list[int]:
        cursor = connection.cursor()
        cursor.execute(PICK, (limit,))
        keys = [key for (key,) in cursor.fetchall()]
        if keys:
            cursor.execute(TAKE, (keys,))
            cursor.execute(READ, (keys,))
            cursor.fetchall()
        return keys

    def complete(self, connection: Any, keys: list[int]) -> None:
        connection.cursor().execute(COMPLETE, (keys,))


@dataclass(frozen=True)
class LibraryMariaDB(LibrarySide):
    """The same with the library."""

    url: str
    model = Job

    def connect(self) -> sa.Engine:
        engine = sa.create_engine(self.url)
        sqlaqueue.mariadb.prepare(engine)
        return engine


class VerbsMariaDB(LibraryMariaDB, VerbsSide):
    """The same without a Consumer."""
