"""ClaimedJobs horizon: a transaction stays open, and nothing that has been done can be vacuumed away.

The same without one tells what else changes in a minute: the tables outgrow the server's cache, and checkpoints begin.
"""

from __future__ import annotations

import time
from functools import partial

import psycopg

from tests.benchmarks.contestants import Contestant
from tests.benchmarks.match import Match, Workers
from tests.benchmarks.workloads import Case, Figures, Size

HELD = 60.0
WINDOW = 10.0
AHEAD = 50_000
"""How many jobs wait at most: a queue in use is not a million jobs behind."""
CHUNK = 10_000


def hold(match: Match, size: Size, *, snapshot: bool) -> Figures:
    """Work under a snapshot that somebody holds, or without one, the queue being filled up meanwhile."""
    held = max(size.seconds(HELD), 4.0)
    window = held * WINDOW / HELD
    ahead, chunk = size.jobs(AHEAD), size.jobs(CHUNK)
    match.enqueue(ahead, way="fill")
    match.settle_down()
    with psycopg.connect(match.url) as holder, match.workers() as workers:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT 1")
        if not snapshot:
            holder.rollback()
        workers.go()
        marks = _serve(match, workers, held, ahead=ahead, chunk=chunk)
        holder.rollback()
    first = _rate(marks, marks[0][0], marks[0][0] + window)
    last = _rate(marks, marks[-1][0] - window, marks[-1][0])
    return {"first_jobs_per_second": first, "last_jobs_per_second": last, "kept": last / first if first else 0.0}


def _serve(match: Match, workers: Workers, seconds: float, *, ahead: int, chunk: int) -> list[tuple[float, int]]:
    """Keep the queue filled; return how many jobs had been handled when."""
    begun = time.perf_counter()
    marks, sent, feeder = [(begun, 0)], ahead, None
    while (now := time.perf_counter()) < begun + seconds:
        handled = workers.jobs
        marks.append((now, handled))
        if feeder is not None and feeder.said("enqueued"):
            feeder.wait_for("enqueued")
            sent, feeder = sent + chunk, None
        if feeder is None and sent - handled < ahead:
            feeder = match.order(chunk, way="fill")
        workers.check()
        time.sleep(0.01)
    return marks


def _rate(marks: list[tuple[float, int]], begin: float, end: float) -> float:
    within = [mark for mark in marks if begin <= mark[0] <= end]
    (first, before), (last, after) = within[0], within[-1]
    return (after - before) / (last - first) if last > first else 0.0


def takes(contestant: Contestant) -> bool:
    """The best settings of each peer, and each strategy as it comes and at its best."""
    options = contestant.options
    if contestant.family == "raw":
        return bool(options["batch"] >= 100 and not options.get("listen"))
    if contestant.family == "sqlaqueue":
        return bool(options["kind"] == "sync")
    return contestant.tuned and contestant.family != "replay"


CASES = [
    Case("60 s", partial(hold, snapshot=True), takes),
    Case("60 s without it", partial(hold, snapshot=False), takes),
]
