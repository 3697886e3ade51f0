"""Backlog: how the number and the kinds of rows in the table affect the throughput."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import psycopg

from docs.benchmarks.report import quantile
from docs.benchmarks.system_under_test import SystemUnderTest
from docs.benchmarks.systems import System
from docs.benchmarks.workloads import Case, Figures, Size

READY = 100_000
MILLION = 1_000_000
LOCKED = 10_000
SINGLES = 40
BURST_LIMIT = 30.0
"""Seconds to drain a burst, within which autovacuum analyzes the tables."""
LATER = 86_400.0
"""Seconds: no such job becomes due during the benchmark."""

Load = Callable[[SystemUnderTest, Size], bool]


def load_due(sut: SystemUnderTest, size: Size, jobs: int = READY) -> bool:
    """Load due jobs."""
    sut.enqueue(size.jobs(jobs), way="fill")
    return True


def load_future(sut: SystemUnderTest, size: Size) -> bool:
    """Load due jobs, and a million jobs of a higher priority for tomorrow."""
    sut.enqueue(size.jobs(MILLION), way="fill", priority=-1, delay=LATER)
    return load_due(sut, size)


def load_finished(sut: SystemUnderTest, size: Size) -> bool:
    """Load due jobs, and a million finished jobs, if the system keeps these."""
    if not sut.statements.get("finish"):
        return False
    sut.enqueue(size.jobs(MILLION), way="fill")
    sut.execute(sut.statements["finish"] or "")
    return load_due(sut, size)


def load_priorities(sut: SystemUnderTest, size: Size) -> bool:
    """Load due jobs with a thousand different priorities."""
    priorities = max(int(1000 * min(size.factor * 20, 1)), 10)
    for priority in range(priorities):
        sut.enqueue(size.jobs(READY) // priorities, way="fill", priority=priority)
    return True


def measure(
    sut: SystemUnderTest, size: Size, load: Load, *, analyze: bool = True, locked: bool = False
) -> Figures | None:
    """Drain due jobs, and measure the costs of claims if the system reports them."""
    if not load(sut, size):
        return None
    if locked and not sut.statements.get("lock"):
        return None
    sut.checkpoint(analyze=analyze)
    jobs = size.jobs(READY) - (size.jobs(LOCKED) if locked else 0)
    # The first half is timed. In the second one some claims are explained, which takes time.
    half = jobs // 2
    explain = {"explain": 20 if size.factor == 1 else 2, "explain_after": half}
    with _lock(sut, size) if locked else contextlib.nullcontext(), sut.workers(**explain) as workers:
        start = time.perf_counter()
        workers.go()
        workers.wait_for_jobs(half, size.limit)
        figures = {"jobs_per_second": workers.jobs / (time.perf_counter() - start)}
        workers.wait_for_jobs(jobs, size.limit / 2)
        workers.stop()
        claims = [claim for claim in workers.programs[0].claims if claim["jobs"]]
    if claims:
        buffers, times = [claim["buffers"] for claim in claims], [claim["ms"] for claim in claims]
        figures["claim_buffers"] = quantile(buffers, 0.5)
        figures["worst_claim_buffers"] = max(buffers)
        figures["claim_ms"] = quantile(times, 0.5)
        figures["worst_claim_ms"] = max(times)
    return figures


def burst(sut: SystemUnderTest, size: Size) -> Figures:
    """Enqueue many jobs at once, after a worker has handled single jobs in small tables.

    Plans that PostgreSQL has cached for small tables must not be used for large ones.
    """
    sut.enqueue(1, chunk=1, way="one")
    sut.checkpoint()
    with sut.workers() as workers:
        workers.go()
        for known in range(1, SINGLES):
            workers.wait_for_jobs(known, size.limit)
            sut.enqueue(1, chunk=1, way="one")
        workers.wait_for_jobs(SINGLES, size.limit)
        start, jobs = time.perf_counter(), size.jobs(READY)
        sut.enqueue(jobs, way="fill")
        workers.wait_for_jobs(SINGLES + jobs, size.seconds(BURST_LIMIT))
        return {"jobs_per_second": (workers.jobs - SINGLES) / (time.perf_counter() - start)}


@contextlib.contextmanager
def _lock(sut: SystemUnderTest, size: Size) -> Iterator[None]:
    with psycopg.connect(sut.url) as holder:
        holder.execute((sut.statements["lock"] or "").replace("LIMIT 1", f"LIMIT {size.jobs(LOCKED)}").encode())
        yield
        holder.rollback()


def includes(system: System) -> bool:
    """Tuned versions of the other queues, and each strategy with its defaults."""
    options = system.options
    if system.family == "raw":
        return bool(options["batch"] == 100 and not options.get("listen"))
    if system.family == "sqlaqueue":
        return bool(options["kind"] == "sync" and options["on_complete"] == "keep" and not options["tuned"])
    return system.tuned and system.family != "replay"


def _has_priorities(system: System) -> bool:
    return system.family != "beanqueue" and includes(system)


def _is_quick(system: System) -> bool:
    """Return whether ten million jobs can be loaded in reasonable time."""
    return system.family in {"raw", "sqlaqueue", "graphile-worker"}


CASES = [
    Case("100 k ready", partial(measure, load=load_due), includes),
    Case("1 M ready", partial(measure, load=partial(load_due, jobs=MILLION)), includes),
    Case(
        "10 M ready",
        partial(measure, load=partial(load_due, jobs=10 * MILLION)),
        lambda one: _is_quick(one) and includes(one),
    ),
    Case("1 M future, more urgent", partial(measure, load=load_future), _has_priorities),
    Case("1 M finished", partial(measure, load=load_finished), includes),
    Case("1,000 priorities", partial(measure, load=load_priorities), _has_priorities),
    Case("not analysed", partial(measure, load=load_due, analyze=False), includes),
    Case("100 k after idling", burst, includes),
    Case("10 k locked at the head", partial(measure, load=load_due, locked=True), includes),
]
