"""Measure ``enqueue()`` beside other ways to insert 10,000 jobs.

    python -m docs.benchmarks.unique_jobs

Each round measures all ways, one after the other; printed are the median of the rounds and its ratio to ``insert()``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, mapped_column

from sqlaqueue import Unique, copy_in, enqueue
from tests.models import make_job
from tests.servers import find_installations, running

JOBS, ROUNDS = 10_000, 7


def ways(job: Any) -> dict[str, Callable[[Session, list[dict[str, str]]], Any]]:
    """Return the ways, each with a function of the session and the rows."""

    def instances(rows: list[dict[str, str]]) -> list[Any]:
        return [job(**row) for row in rows]

    return {
        "insert()": lambda session, rows: session.execute(sa.insert(job), rows),
        "add_all()": lambda session, rows: session.add_all(instances(rows)),
        "enqueue(), all new": lambda session, rows: enqueue(session, instances(rows)),
        "enqueue(), all there": lambda session, rows: enqueue(session, instances(rows)),
        'enqueue(on_duplicate="replace"), all there': lambda session, rows: enqueue(
            session, instances(rows), on_duplicate="replace"
        ),
        'copy_in(on_duplicate="skip"), all new': lambda session, rows: copy_in(session, job, rows, on_duplicate="skip"),
    }


def main() -> None:
    """Measure and print."""
    job = make_job("update_status", {"key": mapped_column(sa.Text)}, unique=Unique("key"))
    version = max(find_installations())
    rows = [{"key": str(number)} for number in range(JOBS)]
    seconds: dict[str, list[float]] = {}
    with running([version]) as servers, servers.shared(version).database() as database:
        engine = sa.create_engine(database.url())
        job.metadata.create_all(engine)
        for _ in range(ROUNDS):
            for name, way in ways(job).items():
                with engine.begin() as connection:
                    connection.exec_driver_sql("TRUNCATE job")
                    if name.endswith("there"):
                        connection.execute(sa.insert(job.__table__), rows)
                with Session(engine) as session:
                    began = time.perf_counter()
                    way(session, rows)
                    session.commit()
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
        engine.dispose()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, median in medians.items():
        sys.stdout.write(f"{name:40} {median:6.2f} s {median / medians['insert()']:6.2f}\n")


if __name__ == "__main__":
    main()
