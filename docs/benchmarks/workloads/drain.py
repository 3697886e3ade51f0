"""Drain: the throughput with an empty handler, when all jobs are due before the workers start."""

from __future__ import annotations

from docs.benchmarks.system_under_test import SystemUnderTest
from docs.benchmarks.systems import System
from docs.benchmarks.workloads import Case, Figures, Size

JOBS = 100_000


def drain(sut: SystemUnderTest, size: Size, processes: int, number: int = JOBS) -> Figures:
    """Load the queue, checkpoint, and drain it."""
    jobs = size.jobs(number)
    sut.enqueue(jobs, way="fill")
    sut.checkpoint()
    return sut.drain(jobs, processes=processes, limit=size.limit)


def includes(system: System) -> bool:
    """Return whether a system has a queue."""
    return not system.options.get("listen") and not system.options.get("plain")


CASES = [
    Case("1 process", lambda sut, size: drain(sut, size, 1), includes),
    Case("2 processes", lambda sut, size: drain(sut, size, 2), includes),
]
