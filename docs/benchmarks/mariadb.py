"""``python -m docs.benchmarks.mariadb`` prints the table of MariaDB in docs/evidence/engines.md.

It measures a queue on plain PyMySQL, and sqlaqueue.
The server writes its log at each commit, as it does by default.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql
import sqlalchemy as sa

import sqlaqueue
from docs.benchmarks.beside_raw.measures import Case, Make, Parts, cell, drains, enqueues, latency, medians, polled
from docs.benchmarks.beside_raw.sides import LibrarySide, RawSide, Side, VerbsSide
from tests.mariadb.models import Base, Job
from tests.mariadb.server import MariaDBServer

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        return sqlaqueue.prepare(sa.create_engine(self.url))


class VerbsMariaDB(LibraryMariaDB, VerbsSide):
    """The same without a Consumer."""


@contextlib.contextmanager
def emptied(side: Side, engine: sa.Engine) -> Iterator[Parts]:
    """Delete the jobs of the measurement before."""
    with engine.begin() as connection:
        connection.exec_driver_sql("SET foreign_key_checks = 0")
        connection.exec_driver_sql(f"TRUNCATE {Job.__tablename__}")
        connection.exec_driver_sql("SET foreign_key_checks = 1")
    yield [side]


def cases(jobs: int, alone: Make, verbs: Make, ours: Make) -> Iterator[tuple[str, Case, list[Make]]]:
    """Return what is measured, with the two sides."""
    singles = min(50, jobs // 10)
    for batch, number in ((1, jobs // 10), (25, jobs)):
        for name, case in drains(number, batch, (1,)):
            yield name.replace("drain,", "drain by `claim()` and `complete()`,"), case, [alone, verbs]
    for name, case in (
        *drains(jobs // 10, 1, (1,)),
        *drains(jobs, 25, (1,)),
        *drains(jobs, 100, (1, 2)),
        *enqueues(jobs),
        ("commit to handler in one process, median, ms", partial(latency, jobs=singles)),
        *polled(singles),
    ):
        yield name, case, [alone, ours]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.mariadb", description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    say = sys.stdout.write
    with tempfile.TemporaryDirectory() as home, MariaDBServer(Path(home)) as server, server.database() as name:
        url = server.url(name)
        raw, verbs, ours = RawMariaDB(str(server.socket), name), VerbsMariaDB(url), LibraryMariaDB(url)
        engine = ours.connect()
        Base.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        sides = [partial(emptied, side, engine) for side in (raw, verbs, ours)]
        say("| | PyMySQL alone | sqlaqueue | ratio |\n| --- | --- | --- | --- |\n")
        for what, case, both in cases(options.jobs, *sides):
            alone, library = medians(case, both, options.repeat)
            say(f"| {what} | {cell(what, alone)} | {cell(what, library)} | {library / alone:.2f} |\n")
            sys.stdout.flush()
        engine.dispose()


if __name__ == "__main__":
    main()
