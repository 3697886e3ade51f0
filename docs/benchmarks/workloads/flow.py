"""Flow: the throughput under a limit, beside that of the same system without it, and what was admitted too many.

Each case measures a system without flow control and with it, one right after the other, in databases of their own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from docs.benchmarks import runs
from docs.benchmarks.system_under_test import SystemUnderTest, Workers
from docs.benchmarks.systems import System
from docs.benchmarks.workloads import Case, Figures, Size

REFERENCE = "sqlaqueue ConcurrencyLimit(2) of each key"
JOBS = 20_000
KEYS = 1_000
LIMIT = 10.0
"""Seconds after which a slow drain is stopped, and measured by the jobs that it has handled."""

FEW_JOBS = 5_000
FEW_KEYS = 3
"""Fewer than the handlers, so that all of them want the same keys all the time."""
HANDLER = 0.002
"""Seconds that a handler takes where it is measured what is admitted too many: longer than a claim."""
LEASE = 3.0
"""Seconds after which the jobs of a killed process may run again."""
LAST = 2.0
"""Seconds at the end of a case, in which a system with lost places runs nothing any more."""


@dataclass(frozen=True)
class Crowd:
    """The workers of a case, and its jobs."""

    jobs: int
    keys: int
    processes: int
    threads: int
    options: dict[str, Any]

    @contextmanager
    def workers(self, sut: SystemUnderTest, directory: Path) -> Iterator[Workers]:
        """Load the queue, and start workers that record their runs."""
        sut.enqueue(self.jobs, way="fill", keys=self.keys)
        sut.checkpoint()
        sut.end_enqueueing()
        with sut.workers(self.processes, **self.all_options(directory)) as workers:
            yield workers

    def all_options(self, directory: Path) -> dict[str, Any]:
        """Return the options of a worker."""
        more = {"concurrency": self.threads, "keys": self.keys, "runs": str(directory), "most_runs": 2 * self.jobs}
        return {**self.options, **more}


def drain(sut: SystemUnderTest, size: Size, *, processes: int, threads: int) -> Figures:
    """Drain jobs of many keys with a handler that does nothing."""
    crowd = Crowd(size.jobs(JOBS), KEYS, processes, threads, {})
    limit = min(size.limit, LIMIT)
    return _beside_plain(sut, partial(_drain, crowd=crowd, limit=limit))


def hold(sut: SystemUnderTest, size: Size) -> Figures:
    """Drain jobs of few keys with handlers that take longer than a claim."""
    crowd = Crowd(size.jobs(FEW_JOBS), FEW_KEYS, 2, 4, {"handler": "sleep", "sleep": HANDLER})
    return _beside_plain(sut, partial(_drain, crowd=crowd, limit=min(size.limit, LIMIT)))


def kill(sut: SystemUnderTest, size: Size) -> Figures:
    """Do the same, but kill one of the processes after a third of the jobs, and start another one."""
    crowd = Crowd(size.jobs(FEW_JOBS), FEW_KEYS, 2, 4, {"handler": "sleep", "sleep": HANDLER, "lease": LEASE})
    return _kill(sut, crowd, min(size.limit, LIMIT))


def _beside_plain(sut: SystemUnderTest, measure: Any) -> Figures:
    """Measure a system without flow control and with it."""
    plain_system = replace(sut.system, options={**sut.system.options, "flow": None})
    flow = sut.system.options["flow"]
    with SystemUnderTest.on(sut.server, plain_system, "bench_plain") as plain:
        without = measure(plain, flow=flow)
    figures = measure(sut, flow=flow)
    ratio = figures["jobs_per_second"] / without["jobs_per_second"]
    return {**figures, "ratio": ratio, **{f"plain_{name}": value for name, value in without.items()}}


def _drain(sut: SystemUnderTest, *, flow: dict[str, Any], crowd: Crowd, limit: float) -> Figures:
    with tempfile.TemporaryDirectory(dir="/tmp") as path, crowd.workers(sut, Path(path)) as workers:
        server_cpu, start = sut.server.cpu(), time.perf_counter()
        workers.go()
        if workers.wait_for_jobs(crowd.jobs, limit):
            # The last jobs that were handled may not have been settled yet.
            workers.wait_until(lambda: not sut.has_jobs(), limit)
        handled, took = workers.jobs, time.perf_counter() - start
        server_cpu = sut.server.cpu() - server_cpu
        client_cpu = sum(end["cpu"] for end in workers.stop())
        recorded = runs.read(Path(path), time.perf_counter())
    return {
        "jobs_per_second": handled / took,
        "jobs": handled,
        # Other work on the machine affects these less than the rate.
        "server_us_per_job": server_cpu / max(handled, 1) * 1e6,
        "client_us_per_job": client_cpu / max(handled, 1) * 1e6,
        **_admitted(recorded, flow),
    }


def _kill(sut: SystemUnderTest, crowd: Crowd, limit: float) -> Figures:
    with tempfile.TemporaryDirectory(dir="/tmp") as path, crowd.workers(sut, Path(path)) as workers:
        workers.go()
        workers.wait_for_jobs(crowd.jobs // 3, limit)
        workers.programs[0].end()
        killed = time.perf_counter()
        others = Workers(workers.programs[1:])
        with sut.workers(1, **crowd.all_options(Path(path))) as restarted:
            restarted.go()
            others.wait_until(lambda: not sut.has_jobs(), limit)
            ended = time.perf_counter()
            restarted.stop()
        others.stop()
        recorded = runs.read(Path(path), killed)
    figures = _admitted(recorded, sut.system.options["flow"])
    # Jobs of the killed process run again, so their order says nothing.
    figures.pop("out_of_order", None)
    ran = len({run.number for run in recorded})
    # Whether places are lost with a process: a system that runs jobs at the end has only been slow.
    if ran < crowd.jobs:
        at_the_end = sum(ended - LAST <= run.begin <= ended for run in recorded)
        figures["last_jobs_per_second"] = at_the_end / LAST
    return {
        "not_run": crowd.jobs - ran,
        "ran_twice": len(recorded) - ran,
        **figures,
    }


def _admitted(recorded: list[runs.Run], flow: dict[str, Any]) -> Figures:
    figures = {"most_at_once": float(max(runs.at_once(some) for some in runs.by_key(recorded).values()))}
    excess = runs.too_many(recorded, flow)
    if excess is not None:
        figures["too_many"] = excess
    if flow["kind"] == "order":
        figures["out_of_order"] = runs.out_of_order(recorded)
    return figures


def includes(system: System) -> bool:
    """Return whether a system is there for its flow control."""
    return "flow" in system.workloads


CASES = [
    Case("1 process of 1 thread", partial(drain, processes=1, threads=1), includes, REFERENCE),
    Case("2 processes of 4 threads", partial(drain, processes=2, threads=4), includes, REFERENCE),
    Case("3 keys, handlers of 2 ms", hold, includes, REFERENCE),
    Case("a process is killed", kill, includes, REFERENCE),
]
