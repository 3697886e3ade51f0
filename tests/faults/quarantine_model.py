"""A model of jobs that are claimed together, one of which kills its worker: which death counts, and what runs alone.

It is the design of ``update_status``. Each execution of a claim has a new token; its *kind* says what its worker ran
meanwhile, see :mod:`sqlaqueue.strategies.update_status`. A rescued job keeps its token, which quarantines it. Leases
of living workers are valid here: those that expire too early are in :mod:`tests.faults.lease_model`.

In every reachable state or step:

Q1. A job that kills its worker in each run fails, with as many attempts as it may have.
Q2. A job whose handler returns completes, with as many attempts as workers were killed from outside, and one more.
Q3. Every sequence of steps ends, and ends with all jobs in a final state: a due job runs.
Q4. While a job runs that was claimed to run alone, its worker runs no other quarantined job.

Each safeguard of :class:`Design` is needed: without it, :func:`search` finds a trace that breaks one of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

ALONE, SHARED, QUARANTINED = "alone", "shared", "quarantined"
"""The kinds of tokens: the worker ran this claim only; or others as well; or these were several quarantined jobs."""


@dataclass(frozen=True)
class Design:
    """What keeps the promises; each can be switched off."""

    keeps_token: bool = True
    """A rescue leaves the token in the row, which quarantines the job."""
    spares_mates: bool = True
    """A death does not count for jobs that were claimed together."""
    counts_lonely_deaths: bool = True
    """A death counts for a job that ran alone."""
    sees_rescued_mates: bool = True
    """A rescue finds other jobs of the claim that were rescued before it, not only those that are processing."""
    marks_shared: bool = True
    """A worker that runs several claims at the same time says so in their tokens."""
    keeps_apart: bool = True
    """Quarantined jobs are claimed apart from new ones."""
    separates_at_last: bool = True
    """Quarantined jobs that lose their worker together run alone from then on."""
    one_lot_at_a_time: bool = True
    """A worker claims no quarantined job while it runs one."""


@dataclass(frozen=True)
class Scope:
    """What the search tries.

    :param jobs: what the handler of each job does: ``kills`` its worker, or ``works``.
    :param concurrency: how many handlers a worker runs at the same time.
    :param kills: how many workers are killed from outside.
    :param skips: whether a rescue may skip rows, since others have locked them; ``briefly`` if it finds them before
        any of the jobs that it has rescued is claimed.
    """

    jobs: tuple[str, ...] = ("kills", "works")
    workers: tuple[str, ...] = ("a",)
    concurrency: int = 1
    kills: int = 0
    skips: Literal["never", "briefly", "long"] = "never"
    most_attempts: int = 2


class Row(NamedTuple):
    status: str = "pending"
    token: int = 0
    """The number of the claim, 0 for none."""
    kind: str = ""
    attempts: int = 0


class Run(NamedTuple):
    worker: str
    job: int
    kind: str
    is_quarantined: bool


class State(NamedTuple):
    rows: tuple[Row, ...]
    runs: frozenset[Run] = frozenset()
    kills: int = 0


class Step(NamedTuple):
    name: str
    after: State


def steps(design: Design, scope: Scope, state: State) -> Iterator[Step]:
    """Yield every step that is possible in a state."""
    for worker in scope.workers:
        yield from _claims(design, scope, state, worker)
        mine = [run for run in state.runs if run.worker == worker]
        if mine and state.kills < scope.kills:
            after = state._replace(runs=state.runs.difference(mine), kills=state.kills + 1)
            yield Step(f"{worker} is killed", after)
    for run in sorted(state.runs):
        if scope.jobs[run.job] == "kills":
            left = frozenset(other for other in state.runs if other.worker != run.worker)
            yield Step(f"job {run.job} kills {run.worker}", state._replace(runs=left))
        else:
            done = state.rows[run.job]._replace(status="completed", token=0, kind="")
            after = state._replace(rows=_changed(state.rows, {run.job: done}), runs=state.runs - {run})
            yield Step(f"job {run.job} completes", after)
    yield from _rescues(design, scope, state)


def _claims(design: Design, scope: Scope, state: State, worker: str) -> Iterator[Step]:
    mine = [run for run in state.runs if run.worker == worker]
    room = scope.concurrency - len(mine)
    if (mine and scope.concurrency == 1) or room <= 0:
        return
    pending = [job for job, row in enumerate(state.rows) if row.status == "pending"]
    new = [job for job in pending if not (design.keeps_apart and state.rows[job].token)]
    kind = SHARED if scope.concurrency > 1 and design.marks_shared else ALONE
    # With one handler at a time, the jobs of a claim run one after the other.
    most = len(new) if scope.concurrency == 1 else room
    for jobs in _subsets(new, most):
        yield _claim(state, worker, jobs, kind, is_quarantined=False)
    if not design.keeps_apart or (design.one_lot_at_a_time and any(run.is_quarantined for run in mine)):
        return
    quarantined = [job for job in pending if state.rows[job].token]
    if scope.skips == "briefly" and _expired(state):
        return
    again = {job for job in quarantined if state.rows[job].kind == QUARANTINED and design.separates_at_last}
    together = [job for job in quarantined if job not in again]
    if scope.concurrency > 1 and len(together) > 1:
        yield _claim(state, worker, together[:room], QUARANTINED, is_quarantined=True)
    else:
        for job in quarantined:
            yield _claim(state, worker, [job], ALONE, is_quarantined=True)


def _claim(state: State, worker: str, jobs: Sequence[int], kind: str, *, is_quarantined: bool) -> Step:
    token = 1 + max(row.token for row in state.rows)
    rows = {
        job: Row("processing", token, kind, state.rows[job].attempts + 1)
        for job in jobs
    }  # fmt: skip
    runs = {Run(worker, job, kind, is_quarantined) for job in jobs}
    name = f"{worker} claims {' and '.join(f'job {job}' for job in jobs)}, {kind}"
    return Step(name, state._replace(rows=_changed(state.rows, rows), runs=state.runs | runs))


def _rescues(design: Design, scope: Scope, state: State) -> Iterator[Step]:
    expired = _expired(state)
    fewest = len(expired) if scope.skips == "never" else 1
    for jobs in _subsets(expired, len(expired), fewest=max(fewest, 1)):
        rows = {job: _rescued(design, scope, state, job) for job in jobs}
        name = f"{' and '.join(f'job {job}' for job in jobs)} rescued"
        yield Step(name, state._replace(rows=_changed(state.rows, rows)))


def _expired(state: State) -> list[int]:
    running = {run.job for run in state.runs}
    return [job for job, row in enumerate(state.rows) if row.status == "processing" and job not in running]


def _rescued(design: Design, scope: Scope, state: State, job: int) -> Row:
    row = state.rows[job]
    seen = {"processing", "pending"} if design.sees_rescued_mates else {"processing"}
    mates = [other for other in state.rows if other.token == row.token and other.status in seen]
    is_alone = row.kind == ALONE and (len(mates) == 1 or not design.spares_mates)
    if not (is_alone and design.counts_lonely_deaths):
        row = row._replace(attempts=row.attempts - 1)
    elif row.attempts >= scope.most_attempts:
        return Row("failed", attempts=row.attempts)
    if not design.keeps_token:
        row = row._replace(token=0, kind="")
    return row._replace(status="pending")


def _changed(rows: tuple[Row, ...], changes: dict[int, Row]) -> tuple[Row, ...]:
    """Return the rows with some changes, and with the lowest numbers for their tokens: it keeps the states few."""
    after = [changes.get(job, row) for job, row in enumerate(rows)]
    numbers = {0: 0}
    for row in after:
        numbers.setdefault(row.token, len(numbers))
    return tuple(row._replace(token=numbers[row.token]) for row in after)


def _subsets(jobs: Sequence[int], most: int, fewest: int = 1) -> Iterator[Sequence[int]]:
    for number in range(fewest, most + 1):
        yield from itertools.combinations(jobs, number)


# -- the search --------------------------------------------------------------------------------------------------------


def fault_of(scope: Scope, state: State) -> str:
    """Return what is wrong with a state, or an empty text."""
    for job, (does, row) in enumerate(zip(scope.jobs, state.rows, strict=True)):
        if does == "kills" and row.status == "failed" and row.attempts != scope.most_attempts:
            return f"Q1: job {job} has failed after {row.attempts} attempts"
        if does == "works" and row.status == "failed":
            return f"Q2: job {job} has failed, though its handler always returns"
        if does == "works" and row.attempts > 1 + state.kills:
            return f"Q2: job {job} has lost an attempt by the death of a worker that another job has killed"
    for run in state.runs:
        others = (other for other in state.runs if other.worker == run.worker and other != run)
        if run.is_quarantined and run.kind == ALONE and any(other.is_quarantined for other in others):
            return f"Q4: job {run.job} was claimed to run alone, and does not"
    return ""


class Found(NamedTuple):
    states: int
    fault: str = ""
    trace: tuple[str, ...] = ()


def search(design: Design, scope: Scope) -> Found:
    """Follow every sequence of steps to its end, and return the first one that breaks a promise.

    A sequence that comes back to a state that it has passed would go on for ever. Such a state is found as the search
    goes into the depth; so is the end of each sequence.
    """
    start = State(tuple(Row() for _ in scope.jobs))
    done: set[State] = set()
    path = [(start, "", steps(design, scope, start))]
    on_path = {start}
    while path:
        state, _, left = path[-1]
        step = next(left, None)
        if step is None:
            path.pop()
            on_path.discard(state)
            done.add(state)
            continue
        trace = (*(name for _, name, _ in path[1:]), step.name)
        if step.after in on_path:
            return Found(len(done), "Q3: the jobs are claimed and rescued again and again", trace)
        if fault := fault_of(scope, step.after) or _fault_of_end(design, scope, step.after):
            return Found(len(done), fault, trace)
        if step.after not in done:
            path.append((step.after, step.name, steps(design, scope, step.after)))
            on_path.add(step.after)
    return Found(len(done))


def _fault_of_end(design: Design, scope: Scope, state: State) -> str:
    if next(steps(design, scope, state), None) is not None:
        return ""
    waiting = [job for job, row in enumerate(state.rows) if row.status not in {"completed", "failed"}]
    return f"Q3: job {waiting[0]} never comes to its end" if waiting else ""
