"""Scale: several processes, many concurrent handlers, and the memory after many jobs."""

from __future__ import annotations

import time
from functools import partial

from docs.benchmarks.server import memory_of
from docs.benchmarks.system_under_test import SystemUnderTest
from docs.benchmarks.systems import System
from docs.benchmarks.workloads import Case, Figures, Size
from docs.benchmarks.workloads.drain import drain

FOR_ALL = 300_000
"""Enough jobs that the startup of the processes does not matter."""
HANDLERS = 500
SLEEPING = 20_000
MANY = 1_000_000
_MIB = 2**20


def sleeping(sut: SystemUnderTest, size: Size) -> Figures:
    """Run 500 handlers that wait for 50 ms in one process: at most 10,000 jobs per second."""
    jobs = size.jobs(SLEEPING)
    sut.enqueue(jobs, way="fill")
    sut.checkpoint()
    return sut.drain(jobs, limit=size.limit, handler="sleep", concurrency=HANDLERS)


def memory(sut: SystemUnderTest, size: Size) -> Figures:
    """Compare the memory of a process after a tenth of the jobs with that after all."""
    jobs = size.jobs(MANY)
    sut.enqueue(jobs, way="fill")
    sut.checkpoint()
    with sut.workers() as workers:
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


def includes(system: System) -> bool:
    """Tuned versions of the other queues and the Consumer, Consumers with defaults, and psycopg with one batch size."""
    options = system.options
    if system.family == "raw":
        return bool(options["batch"] == 100 and not options.get("listen"))
    if system.family == "sqlaqueue":
        return bool(options["on_complete"] == "delete" and (options["kind"] == "sync" or not system.tuned))
    return system.tuned and system.family != "replay"


def waits(system: System) -> bool:
    """Return whether a system runs hundreds of handlers concurrently, which needs async code."""
    return includes(system) and system.family != "raw" and system.options.get("kind") != "sync"


CASES = [
    *(Case(f"{each} processes", partial(drain, processes=each, number=FOR_ALL), includes) for each in (1, 2, 4, 8)),
    Case("500 handlers of 50 ms", sleeping, waits, reference="graphile-worker (tuned)"),
    Case("1 M jobs", memory, includes),
]
