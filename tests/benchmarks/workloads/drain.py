"""Drain: jobs that do nothing but be read, all of them waiting when the workers begin."""

from __future__ import annotations

from tests.benchmarks.contestants import Contestant
from tests.benchmarks.match import Match
from tests.benchmarks.workloads import Case, Figures, Size

JOBS = 100_000


def drain(match: Match, size: Size, processes: int, number: int = JOBS) -> Figures:
    """Load the queue, let the server come to rest, and let the workers begin together."""
    jobs = size.jobs(number)
    match.enqueue(jobs, way="fill")
    match.settle_down()
    return match.drain(jobs, processes=processes, limit=size.limit)


def takes(contestant: Contestant) -> bool:
    """All but the one that only listens."""
    return not contestant.options.get("listen") and not contestant.options.get("plain")


CASES = [
    Case("1 process", lambda match, size: drain(match, size, 1), takes),
    Case("2 processes", lambda match, size: drain(match, size, 2), takes),
]
