"""Latency: the time from enqueueing a job to the start of its handler, and the costs of idle workers."""

from __future__ import annotations

import random
import time
from functools import partial

from docs.benchmarks.report import quantile
from docs.benchmarks.server import cpu_of
from docs.benchmarks.system_under_test import SystemUnderTest, Workers
from docs.benchmarks.systems import System
from docs.benchmarks.workloads import Case, Figures, Size

LISTEN = "raw listen"


def idle(sut: SystemUnderTest, size: Size) -> Figures:
    """Enqueue jobs for an idle worker, each after the last one has been handled."""
    with sut.workers(handler="stamp") as workers:
        workers.go()
        _warm_up(sut, workers)
        known = workers.jobs
        enqueueing = _one_at_a_time(sut, workers, 500 if size.factor == 1 else 50, size.limit)
        return {**_percentiles(workers, known), "enqueueing_p50_ms": quantile(enqueueing, 0.5) * 1000}


def steady(sut: SystemUnderTest, size: Size) -> Figures:
    """Enqueue 1,000 jobs per second, ten at a time, for eight workers."""
    jobs = size.jobs(20_000)
    with sut.workers(8, handler="stamp") as workers:
        workers.go()
        _warm_up(sut, workers)
        known, server_cpu = workers.jobs, sut.server.cpu()
        took = sut.enqueue(jobs, chunk=10, way="bulk", interval=0.01)
        workers.wait_for_jobs(known + jobs, size.limit)
        used = sut.server.cpu() - server_cpu
        kept_up = jobs / took
        return {**_percentiles(workers, known), "sent_per_second": kept_up, "server_us_per_job": used / jobs * 1e6}


def waiting(sut: SystemUnderTest, size: Size, processes: int) -> Figures:
    """Measure the CPU time of many idle workers."""
    processes = processes if size.factor == 1 else 3
    # Frequent reports would need more CPU time than the workers.
    with sut.workers(processes, report_every=5.0) as workers:
        workers.go()
        # The startup of the workers is not measured.
        time.sleep(size.seconds(10))
        pids = [program.pid for program in workers.programs]
        start, server, clients = time.perf_counter(), sut.server.cpu(), sum(map(cpu_of, pids))
        time.sleep(size.seconds(60))
        took = time.perf_counter() - start
        workers.check()
        return {
            "client_ms_per_second": (sum(map(cpu_of, pids)) - clients) / took * 1000,
            "server_ms_per_second": (sut.server.cpu() - server) / took * 1000,
            "connections": sut.connections(),
        }


def _warm_up(sut: SystemUnderTest, workers: Workers) -> None:
    """Wait until the workers are idle; the first jobs fill caches and open connections."""
    time.sleep(1.5)
    _one_at_a_time(sut, workers, 20, 10.0)


def _one_at_a_time(sut: SystemUnderTest, workers: Workers, jobs: int, seconds: float) -> list[float]:
    """Enqueue up to a number of jobs within a number of seconds; some systems poll every few seconds only.

    :return: the duration of each enqueueing in seconds.
    """
    deadline, took = time.monotonic() + seconds, list[float]()
    for _ in range(jobs):
        wanted = workers.jobs + 1
        took.append(sut.enqueue(1, chunk=1, way="one"))
        workers.wait_for_jobs(wanted, seconds)
        if time.monotonic() > deadline:
            break
        # A random delay, so as not to be synchronous with the polls of the worker.
        time.sleep(random.uniform(0.02, 0.04))
    return took


def _percentiles(workers: Workers, known: int) -> Figures:
    # Sorted by the time of handling: the jobs of the warm-up come first.
    took = [(at - sent) * 1000 for sent, at in sorted(workers.stamps, key=lambda stamp: stamp[1])[known:]]
    return {"p50_ms": quantile(took, 0.5), "p99_ms": quantile(took, 0.99), "worst_ms": max(took), "jobs": len(took)}


def includes(system: System) -> bool:
    """Return whether a system represents those that wait in the same way."""
    if system.family == "raw":
        return system.name == LISTEN
    if system.family == "sqlaqueue":
        return bool(system.options["on_complete"] == "keep" and not system.tuned)
    return system.family not in {"replay", "sqlalchemy"}


CASES = [
    Case("idle", idle, includes, LISTEN),
    Case("1,000 jobs/s, 8 workers", steady, includes, LISTEN),
    Case("50 idle workers", partial(waiting, processes=50), includes, LISTEN),
]
