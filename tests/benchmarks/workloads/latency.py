"""Latency: from the call that enqueues a job to the beginning of its handler; and what it costs to wait for one."""

from __future__ import annotations

import random
import time
from functools import partial

from tests.benchmarks.contestants import Contestant
from tests.benchmarks.match import Match, Workers
from tests.benchmarks.report import quantile
from tests.benchmarks.server import cpu_of
from tests.benchmarks.workloads import Case, Figures, Size

LISTEN = "raw listen"


def idle(match: Match, size: Size) -> Figures:
    """Send a job to a worker that has nothing to do, and the next one when that has been handled."""
    with match.workers(handler="stamp") as workers:
        workers.go()
        _warm_up(match, workers)
        known = workers.jobs
        enqueueing = _one_at_a_time(match, workers, 500 if size.factor == 1 else 50, size.limit)
        return {**_percentiles(workers, known), "enqueueing_p50_ms": quantile(enqueueing, 0.5) * 1000}


def steady(match: Match, size: Size) -> Figures:
    """Send 1,000 jobs a second, ten at a time, to eight workers."""
    jobs = size.jobs(20_000)
    with match.workers(8, handler="stamp") as workers:
        workers.go()
        _warm_up(match, workers)
        known, server_cpu = workers.jobs, match.server.cpu()
        took = match.enqueue(jobs, chunk=10, way="bulk", interval=0.01)
        workers.wait_for_jobs(known + jobs, size.limit)
        used = match.server.cpu() - server_cpu
        kept_up = jobs / took
        return {**_percentiles(workers, known), "sent_per_second": kept_up, "server_us_per_job": used / jobs * 1e6}


def waiting(match: Match, size: Size, processes: int) -> Figures:
    """Let many workers wait for nothing."""
    processes = processes if size.factor == 1 else 3
    # To say each few milliseconds that nothing has been handled would be most of what they do.
    with match.workers(processes, report_every=5.0) as workers:
        workers.go()
        # What they do once, when they begin, is not what waiting costs.
        time.sleep(size.seconds(10))
        pids = [program.pid for program in workers.programs]
        begun, server, clients = time.perf_counter(), match.server.cpu(), sum(map(cpu_of, pids))
        time.sleep(size.seconds(60))
        took = time.perf_counter() - begun
        workers.check()
        return {
            "client_ms_per_second": (sum(map(cpu_of, pids)) - clients) / took * 1000,
            "server_ms_per_second": (match.server.cpu() - server) / took * 1000,
            "connections": match.connections(),
        }


def _warm_up(match: Match, workers: Workers) -> None:
    """Let each worker get to where it waits: the first jobs meet empty caches and connections that are being made."""
    time.sleep(1.5)
    _one_at_a_time(match, workers, 20, 10.0)


def _one_at_a_time(match: Match, workers: Workers, jobs: int, seconds: float) -> list[float]:
    """Send up to ``jobs``, as many as there is time for: some look for new ones every few seconds only.

    :return: the seconds that each call that enqueues has taken.
    """
    deadline, took = time.monotonic() + seconds, list[float]()
    for _ in range(jobs):
        wanted = workers.jobs + 1
        took.append(match.enqueue(1, chunk=1, way="one"))
        workers.wait_for_jobs(wanted, seconds)
        if time.monotonic() > deadline:
            break
        # Not in step with whatever the worker does at intervals.
        time.sleep(random.uniform(0.02, 0.04))
    return took


def _percentiles(workers: Workers, known: int) -> Figures:
    # By the time of their handling: what was sent for warming up comes first.
    took = [(at - sent) * 1000 for sent, at in sorted(workers.stamps, key=lambda stamp: stamp[1])[known:]]
    return {"p50_ms": quantile(took, 0.5), "p99_ms": quantile(took, 0.99), "worst_ms": max(took), "jobs": len(took)}


def takes(contestant: Contestant) -> bool:
    """One of those that wait alike."""
    if contestant.family == "raw":
        return contestant.name == LISTEN
    if contestant.family == "sqlaqueue":
        return bool(contestant.options["on_complete"] == "keep" and not contestant.tuned)
    return contestant.family not in {"replay", "sqlalchemy"}


CASES = [
    Case("idle", idle, takes, LISTEN),
    Case("1,000 jobs/s, 8 workers", steady, takes, LISTEN),
    Case("50 idle workers", partial(waiting, processes=50), takes, LISTEN),
]
