"""Measures rates on MariaDB beside a loop of plain PyMySQL: ``python -m tests.mariadb.rates``.

The server writes its log at each commit, as it does by default.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pymysql
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import sqlaqueue.mariadb
from sqlaqueue import Consumer, claim, complete
from tests.mariadb.models import Base, Job
from tests.mariadb.server import MariaDBServer

_PICK = (
    "SELECT id FROM job FORCE INDEX (ix_job_queue_claim) WHERE status = 'pending' AND run_at <= UTC_TIMESTAMP(6) "
    "ORDER BY priority, run_at, id LIMIT %s FOR UPDATE SKIP LOCKED"
)
JOBS, ROUNDS, THREADS = 4000, 3, 2


def in_threads(work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def plain(server: MariaDBServer, name: str, batch: int) -> None:
    """Claim and complete by plain PyMySQL, with a transaction for each of the two."""

    def work() -> None:
        connection = pymysql.connect(unix_socket=str(server.socket), user="root", database=name)
        cursor = connection.cursor()
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.commit()
        while True:
            cursor.execute(_PICK, (batch,))
            keys = [key for (key,) in cursor.fetchall()]
            if not keys:
                break
            cursor.execute("UPDATE job SET status = 'processing', attempts = attempts + 1 WHERE id IN %s", (keys,))
            cursor.execute("SELECT * FROM job WHERE id IN %s", (keys,))
            cursor.fetchall()
            connection.commit()
            cursor.execute(
                "UPDATE job SET status = 'completed', finished_at = UTC_TIMESTAMP(6) WHERE id IN %s", (keys,)
            )
            connection.commit()
        connection.close()

    in_threads(work)


def bare(engine: sa.Engine, batch: int) -> None:
    """Claim and complete by the statements of the library."""

    def work() -> None:
        with Session(engine) as session:
            while jobs := session.scalars(claim(Job, batch)).all():
                session.commit()
                session.execute(complete(jobs))
                session.commit()

    in_threads(work)


def drain(engine: sa.Engine) -> None:
    Consumer(Job, lambda _session, _job: None, sessionmaker(engine), concurrency=THREADS).drain()


def main() -> None:
    """Print the median rate of each way, in jobs per second."""
    with tempfile.TemporaryDirectory() as home, MariaDBServer(Path(home)) as server, server.database() as name:
        engine = sa.create_engine(server.url(name), pool_size=THREADS + 4)
        sqlaqueue.mariadb.prepare(engine)
        Base.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(sa.text("SET GLOBAL innodb_flush_log_at_trx_commit = 1"))
        ways: dict[str, Callable[[], Any]] = {
            "PyMySQL, 1 a claim": lambda: plain(server, name, 1),
            "claim() and complete(), 1 a claim": lambda: bare(engine, 1),
            "PyMySQL, 25 a claim": lambda: plain(server, name, 25),
            "claim() and complete(), 25 a claim": lambda: bare(engine, 25),
            "Consumer.drain()": lambda: drain(engine),
        }
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, run in ways.items():
                with engine.begin() as connection:
                    connection.execute(sa.delete(Job))
                    connection.execute(sa.insert(Job), [{"payload": "x"} for _ in range(JOBS)])
                began = time.perf_counter()
                run()
                rates[way].append(JOBS / (time.perf_counter() - began))
                with engine.connect() as connection:
                    left = connection.scalar(sa.select(sa.func.count()).where(Job.status != "completed"))
                    assert not left, f"{way}: {left} jobs are left"
        engine.dispose()
    for way, measured in rates.items():
        sys.stdout.write(f"{way}: {statistics.median(measured):.0f} ({min(measured):.0f} to {max(measured):.0f})\n")


if __name__ == "__main__":
    main()
