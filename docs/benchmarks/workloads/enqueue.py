"""Enqueue: into an empty queue without workers, one by one and in chunks of 1,000."""

from __future__ import annotations

from functools import partial

from docs.benchmarks.system_under_test import SystemUnderTest
from docs.benchmarks.systems import System
from docs.benchmarks.workloads import Case, Figures, Size

ONE_BY_ONE = 3_000
IN_CHUNKS = 100_000
WAYS = {"add_all": IN_CHUNKS, "insert": IN_CHUNKS, "copy": IN_CHUNKS}
"""Ways to enqueue that only systems with SQLAlchemy have."""


def enqueue(sut: SystemUnderTest, size: Size, way: str, jobs: int) -> Figures:
    """Time the enqueueing, after the process has connected and prepared its statements."""
    jobs = size.jobs(jobs)
    chunk = 1 if way == "one" else min(1000, jobs)
    sut.enqueue(chunk, chunk=chunk, way=way)
    server_cpu, wal_bytes = sut.server.cpu(), sut.wal_bytes()
    seconds = sut.enqueue(jobs, chunk=chunk, way=way)
    used, wal_bytes = sut.server.cpu() - server_cpu, sut.wal_bytes() - wal_bytes
    return {
        "rows_per_second": jobs / seconds,
        "seconds": seconds,
        "server_us_per_row": used / jobs * 1e6,
        "wal_bytes_per_row": wal_bytes / jobs,
    }


def includes(system: System) -> bool:
    """Return whether a system represents those that enqueue in the same way."""
    options = system.options
    if system.family == "raw":
        return bool(options["batch"] == 100 and options["ending"] == "delete")
    if system.family == "sqlaqueue":
        return bool(options["kind"] == "sync" and options["on_complete"] == "keep" and not options["tuned"])
    return system.family != "replay" and not system.tuned


def has_orm(system: System) -> bool:
    """Return whether a system accepts mapped instances."""
    return system.family in {"sqlaqueue", "sqlalchemy"} and includes(system)


CASES = [
    Case("one by one", partial(enqueue, way="one", jobs=ONE_BY_ONE), includes),
    Case("in chunks", partial(enqueue, way="bulk", jobs=IN_CHUNKS), includes),
    *(
        Case(way, partial(enqueue, way=way, jobs=jobs), has_orm, reference="sqlalchemy plain")
        for way, jobs in WAYS.items()
    ),
]
