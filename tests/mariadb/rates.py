"""``python -m tests.mariadb.rates`` prints the table of docs/mariadb.md.

The server writes its log at each commit, as it does by default.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from docs.benchmarks.beside_raw.measures import Case, Make, Parts, cell, drains, enqueues, latency, medians, polled
from docs.benchmarks.beside_raw.sides import Side
from tests.mariadb.models import Base, Job
from tests.mariadb.rate_sides import LibraryMariaDB, RawMariaDB, VerbsMariaDB
from tests.mariadb.server import MariaDBServer


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
    parser = argparse.ArgumentParser(prog="python -m tests.mariadb.rates", description=__doc__)
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
