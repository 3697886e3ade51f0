"""Scale: more processes, many handlers that wait, and memory over many jobs."""

from __future__ import annotations

import time
from functools import partial

from tests.benchmarks.contestants import Contestant
from tests.benchmarks.match import Match
from tests.benchmarks.server import memory_of
from tests.benchmarks.workloads import Case, Figures, Size
from tests.benchmarks.workloads.drain import drain

FOR_ALL = 300_000
"""So many that the beginning of each process, which takes what it takes, is a small part of it."""
HANDLERS = 500
SLEEPING = 20_000
MANY = 1_000_000
_MIB = 2**20


def sleeping(match: Match, size: Size) -> Figures:
    """Let 500 handlers of one process wait 50 ms a job: 10,000 jobs a second if nothing else took time."""
    jobs = size.jobs(SLEEPING)
    match.enqueue(jobs, way="fill")
    match.settle_down()
    return match.drain(jobs, limit=size.limit, handler="sleep", concurrency=HANDLERS)


def memory(match: Match, size: Size) -> Figures:
    """Compare what a process holds after a tenth of a million jobs with what it holds after all."""
    jobs = size.jobs(MANY)
    match.enqueue(jobs, way="fill")
    match.settle_down()
    with match.workers() as workers:
        (worker,) = workers.programs
        workers.go()
        limit = 10 * size.limit
        workers.wait_until(lambda: workers.jobs >= jobs // 10, limit)
        early = memory_of(worker.pid)
        workers.wait_until(lambda: workers.jobs >= jobs, limit)
        time.sleep(0.5)
        late = memory_of(worker.pid)
        (end,) = workers.stop()
    return {
        "early_mib": early / _MIB,
        "late_mib": late / _MIB,
        "growth_mib": (late - early) / _MIB,
        "peak_mib": end["peak_kib"] / 1024,
        "jobs": workers.jobs,
    }


def takes(contestant: Contestant) -> bool:
    """The best settings of each peer and of a Consumer, both Consumers as they come, and psycopg at one batch size."""
    options = contestant.options
    if contestant.family == "raw":
        return bool(options["batch"] == 100 and not options.get("listen"))
    if contestant.family == "sqlaqueue":
        return bool(options["on_complete"] == "delete" and (options["kind"] == "sync" or not contestant.tuned))
    return contestant.tuned and contestant.family != "replay"


def waits(contestant: Contestant) -> bool:
    """Those that run handlers at once: psycopg alone has none, and threads are not made for hundreds."""
    return takes(contestant) and contestant.family != "raw" and contestant.options.get("kind") != "sync"


CASES = [
    *(Case(f"{each} processes", partial(drain, processes=each, number=FOR_ALL), takes) for each in (1, 2, 4, 8)),
    Case("500 handlers of 50 ms", sleeping, waits, reference="graphile-worker (tuned)"),
    Case("1 M jobs", memory, takes),
]
