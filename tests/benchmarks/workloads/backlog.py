"""Backlog: what else is in the table, and what it makes of the first ``MEASURED`` jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import psycopg

from tests.benchmarks.contestants import Contestant
from tests.benchmarks.match import Match
from tests.benchmarks.report import quantile
from tests.benchmarks.workloads import Case, Figures, Size

READY = 100_000
MILLION = 1_000_000
LOCKED = 10_000
SINGLES = 40
PATIENCE = 30.0
"""Seconds for what comes at once: by then, the server has looked at the tables again, or will do so soon."""
LATER = 86_400.0
"""Seconds: none of them becomes due while we measure."""

Load = Callable[[Match, Size], bool]


def ready(match: Match, size: Size, jobs: int = READY) -> bool:
    """Nothing but jobs that are due."""
    match.enqueue(size.jobs(jobs), way="fill")
    return True


def behind_future(match: Match, size: Size) -> bool:
    """A million jobs for tomorrow that are more urgent than those of today."""
    match.enqueue(size.jobs(MILLION), way="fill", priority=-1, delay=LATER)
    return ready(match, size)


def beside_finished(match: Match, size: Size) -> bool:
    """A million jobs that have been done, where finished ones are kept."""
    if not match.words.get("finish"):
        return False
    match.enqueue(size.jobs(MILLION), way="fill")
    match.execute(match.words["finish"] or "")
    return ready(match, size)


def of_many_priorities(match: Match, size: Size) -> bool:
    """A thousand different priorities."""
    priorities = max(int(1000 * min(size.factor * 20, 1)), 10)
    for priority in range(priorities):
        match.enqueue(size.jobs(READY) // priorities, way="fill", priority=priority)
    return True


def measure(match: Match, size: Size, load: Load, *, analyze: bool = True, locked: bool = False) -> Figures | None:
    """Drain a part of what is due; where the contestant can tell, ask what its claims cost meanwhile."""
    if not load(match, size):
        return None
    if locked and not match.words.get("lock"):
        return None
    match.settle_down(analyze=analyze)
    jobs = size.jobs(READY) - (size.jobs(LOCKED) if locked else 0)
    # The first half is timed. Then the server explains some of the claims, which takes time of its own.
    half = jobs // 2
    look = {"explain": 20 if size.factor == 1 else 2, "explain_after": half}
    with _lock(match, size) if locked else contextlib.nullcontext(), match.workers(**look) as workers:
        begun = time.perf_counter()
        workers.go()
        workers.wait_for_jobs(half, size.limit)
        figures = {"jobs_per_second": workers.jobs / (time.perf_counter() - begun)}
        workers.wait_for_jobs(jobs, size.limit / 2)
        workers.stop()
        claims = workers.programs[0].claims
    if claims:
        buffers, took = [claim["buffers"] for claim in claims], [claim["ms"] for claim in claims]
        figures["claim_buffers"] = quantile(buffers, 0.5)
        figures["worst_claim_buffers"] = max(buffers)
        figures["claim_ms"] = quantile(took, 0.5)
        figures["worst_claim_ms"] = max(took)
    return figures


def burst(match: Match, size: Size) -> Figures:
    """Let many jobs come at once to a worker that has had one at a time to do, in tables of a few rows.

    What the server has planned for these must not be what it does with the many.
    """
    match.enqueue(1, chunk=1, way="one")
    match.settle_down()
    with match.workers() as workers:
        workers.go()
        for known in range(1, SINGLES):
            workers.wait_for_jobs(known, size.limit)
            match.enqueue(1, chunk=1, way="one")
        workers.wait_for_jobs(SINGLES, size.limit)
        begun, jobs = time.perf_counter(), size.jobs(READY)
        match.enqueue(jobs, way="fill")
        workers.wait_for_jobs(SINGLES + jobs, size.seconds(PATIENCE))
        return {"jobs_per_second": (workers.jobs - SINGLES) / (time.perf_counter() - begun)}


@contextlib.contextmanager
def _lock(match: Match, size: Size) -> Iterator[None]:
    with psycopg.connect(match.url) as holder:
        holder.execute((match.words["lock"] or "").replace("LIMIT 1", f"LIMIT {size.jobs(LOCKED)}").encode())
        yield
        holder.rollback()


def takes(contestant: Contestant) -> bool:
    """The best settings of each peer, and each strategy as it comes."""
    options = contestant.options
    if contestant.family == "raw":
        return bool(options["batch"] == 100 and not options.get("listen"))
    if contestant.family == "sqlaqueue":
        return bool(options["kind"] == "sync" and options["on_complete"] == "keep" and not options["tuned"])
    return contestant.tuned and contestant.family != "replay"


def _has_priorities(contestant: Contestant) -> bool:
    return contestant.family != "beanqueue" and takes(contestant)


def _is_quick(contestant: Contestant) -> bool:
    """Whether ten million jobs can be loaded in reasonable time."""
    return contestant.family in {"raw", "sqlaqueue", "graphile-worker"}


CASES = [
    Case("100 k ready", partial(measure, load=ready), takes),
    Case("1 M ready", partial(measure, load=partial(ready, jobs=MILLION)), takes),
    Case(
        "10 M ready",
        partial(measure, load=partial(ready, jobs=10 * MILLION)),
        lambda one: _is_quick(one) and takes(one),
    ),
    Case("1 M future, more urgent", partial(measure, load=behind_future), _has_priorities),
    Case("1 M finished", partial(measure, load=beside_finished), takes),
    Case("1,000 priorities", partial(measure, load=of_many_priorities), _has_priorities),
    Case("not analysed", partial(measure, load=ready, analyze=False), takes),
    Case("100 k after idling", burst, takes),
    Case("10 k locked at the head", partial(measure, load=ready, locked=True), takes),
]
