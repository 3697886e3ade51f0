"""Horizon: the throughput while an open transaction keeps VACUUM from removing dead rows.

The same without such a transaction shows the effect of growing tables and checkpoints.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import psycopg

from docs.benchmarks.system_under_test import SystemUnderTest, Workers
from docs.benchmarks.systems import System
from docs.benchmarks.workloads import Case, Figures, Size

HELD = 60.0
WINDOW = 10.0
AHEAD = 50_000
"""The maximum number of due jobs."""
CHUNK = 10_000


def hold(sut: SystemUnderTest, size: Size, *, snapshot: bool, **options: Any) -> Figures:
    """Run jobs with or without an open snapshot, while the queue is kept filled.

    :param options: more options of the worker.
    """
    held = max(size.seconds(HELD), 4.0)
    window = held * WINDOW / HELD
    ahead, chunk = size.jobs(AHEAD), size.jobs(CHUNK)
    sut.enqueue(ahead, way="fill")
    sut.checkpoint()
    with psycopg.connect(sut.url) as holder, sut.workers(**options) as workers:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT 1")
        if not snapshot:
            holder.rollback()
        workers.go()
        samples = _keep_filled(sut, workers, held, ahead=ahead, chunk=chunk)
        holder.rollback()
    first = _rate(samples, samples[0][0], samples[0][0] + window)
    last = _rate(samples, samples[-1][0] - window, samples[-1][0])
    return {"first_jobs_per_second": first, "last_jobs_per_second": last, "kept": last / first if first else 0.0}


def _keep_filled(
    sut: SystemUnderTest, workers: Workers, seconds: float, *, ahead: int, chunk: int
) -> list[tuple[float, int]]:
    """Keep the queue filled; return pairs of a time and the number of handled jobs."""
    start = time.perf_counter()
    samples, sent, enqueuer = [(start, 0)], ahead, None
    while (now := time.perf_counter()) < start + seconds:
        handled = workers.jobs
        samples.append((now, handled))
        if enqueuer is not None and enqueuer.has_event("enqueued"):
            enqueuer.wait_for("enqueued")
            sent, enqueuer = sent + chunk, None
        if enqueuer is None and sent - handled < ahead:
            enqueuer = sut.request_enqueue(chunk, way="fill")
        workers.check()
        time.sleep(0.01)
    return samples


def _rate(samples: list[tuple[float, int]], begin: float, end: float) -> float:
    within = [mark for mark in samples if begin <= mark[0] <= end]
    (first, before), (last, after) = within[0], within[-1]
    return (after - before) / (last - first) if last > first else 0.0


def includes(system: System) -> bool:
    """Tuned versions of the other queues, and each strategy with its defaults and tuned."""
    options = system.options
    if system.family == "raw":
        return bool(options["batch"] >= 100 and not options.get("listen"))
    if system.family == "sqlaqueue":
        return bool(options["kind"] == "sync")
    return system.tuned and system.family != "replay"


CASES = [
    Case("60 s", partial(hold, snapshot=True), includes),
    Case("60 s without it", partial(hold, snapshot=False), includes),
]
