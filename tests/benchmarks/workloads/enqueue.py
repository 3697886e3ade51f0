"""Enqueue: into an empty queue, nobody working; one by one, and in chunks of 1,000."""

from __future__ import annotations

from functools import partial

from tests.benchmarks.contestants import Contestant
from tests.benchmarks.match import Match
from tests.benchmarks.workloads import Case, Figures, Size

ONE_BY_ONE = 3_000
IN_CHUNKS = 100_000
WAYS = {"add_all": IN_CHUNKS, "insert": IN_CHUNKS, "copy": IN_CHUNKS}
"""What only SQLAlchemy's own can be asked for: into a queue, and into a plain table."""


def enqueue(match: Match, size: Size, way: str, jobs: int) -> Figures:
    """Time the enqueueing alone; the process has its connection by then, and has sent what it sends once."""
    jobs = size.jobs(jobs)
    chunk = 1 if way == "one" else min(1000, jobs)
    match.enqueue(chunk, chunk=chunk, way=way)
    server_cpu = match.server.cpu()
    seconds = match.enqueue(jobs, chunk=chunk, way=way)
    used = match.server.cpu() - server_cpu
    return {"rows_per_second": jobs / seconds, "seconds": seconds, "server_us_per_row": used / jobs * 1e6}


def takes(contestant: Contestant) -> bool:
    """One of those that enqueue alike."""
    options = contestant.options
    if contestant.family == "raw":
        return bool(options["batch"] == 100 and options["ending"] == "delete")
    if contestant.family == "sqlaqueue":
        return bool(options["kind"] == "sync" and options["on_complete"] == "keep" and not options["tuned"])
    return contestant.family != "replay" and not contestant.tuned


def has_orm(contestant: Contestant) -> bool:
    """Those that take mapped instances."""
    return contestant.family in {"sqlaqueue", "sqlalchemy"} and takes(contestant)


CASES = [
    Case("one by one", partial(enqueue, way="one", jobs=ONE_BY_ONE), takes),
    Case("in chunks", partial(enqueue, way="bulk", jobs=IN_CHUNKS), takes),
    *(
        Case(way, partial(enqueue, way=way, jobs=jobs), has_orm, reference="sqlalchemy plain")
        for way, jobs in WAYS.items()
    ),
]
