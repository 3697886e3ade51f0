"""A model of one job under leases: its row, the runs of its handler, and every step that they and faults can take.

The row has a status, the token of the claim that holds it, and a lease. A *run* is one call of the handler by a worker;
it remembers the token of its claim. Workers may be killed, be paused for any time (they take no step) or for ever,
lose the reply to a commit, or lose the connection before it. The extension of a lease and its commit are two steps,
between which the row is locked. All parts of a state are tuples, so that it can be hashed.

Safety, in every reachable state or step:

L1. What a handler has written is committed once in the life of a job, together with the status ``completed``.
L2. Only the run whose token is in the row changes it, so that at most one run can.
L3. A job is rescued only after its lease has expired.
L4. A row that is not processing has no token and no lease, and one that is has a token.
L5. A job has no more attempts than it may have, and fails only by ``Fail`` or when none is left.

Liveness:

L6. From every reachable state the job can come to its end by steps that are no faults.
L7. A job that kills its worker in each run comes to its end: there is no circle of claims, kills and rescues.
L8. A due job runs: from every state in which it is pending, it can be completed by steps that are no faults.

Each safeguard of :class:`Design` is needed: without it, :func:`search` finds a trace that breaks one of these.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NOBODY = "nobody"
ENDS = {"return": "returns", "raise": "raises", "fail": "fails", "release": "releases"}
"""How a handler may end, and the name of that step."""

FINISHED = ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Design:
    """What keeps the promises; each can be switched off."""

    compares_tokens: bool = True
    """A settlement changes the row only if it still has the token of the run."""
    tokens_are_new: bool = True
    """Each claim has a token of its own, instead of the name of its worker."""
    clears_token: bool = True
    """A rescue takes the token out of the row."""
    waits_for_lease: bool = True
    """A rescue waits until the lease has expired."""
    writes_together: bool = True
    """What the handler has written is committed with the end of its run."""
    counts_at_claim: bool = True
    """An attempt is counted when it starts, instead of when it ends."""
    rescues: bool = True
    claims_rescued: bool = True
    """A claim takes jobs that were rescued, too."""
    extends_own: bool = True
    """An extension changes the row only if it still has the token of the run."""
    ends_transactions: bool = True
    """The server ends a transaction that stays open while its worker is paused."""


@dataclass(frozen=True)
class Scope:
    """What the search tries.

    :param runs: how many runs there may be at the same time: more than one if a worker has lost its lease.
    :param lost: how many connections may be lost while a run is settled.
    :param requeues: how often the job may be requeued when it has ended.
    :param spared: how many deaths in succession may cost the job no attempt. In the library it is two: the job ran with
        others, and then with other quarantined jobs.
    """

    workers: tuple[str, ...] = ("a", "b")
    attempts: int = 2
    runs: int = 2
    lost: int = 1
    requeues: int = 0
    spared: int = 1


class Row(NamedTuple):
    status: str = "pending"
    token: str = ""
    is_leased: bool = False
    attempts: int = 0
    spared: int = 0
    """How many deaths in succession have cost no attempt."""
    is_cancelled: bool = False
    """Whether the cancellation of the running job was asked for."""
    locked_by: str = ""
    """The worker whose open transaction extends the lease; ``nobody`` if that worker is paused for ever."""
    effects: int = 0
    """How often what a handler has written was committed, in this life of the job."""


class Run(NamedTuple):
    worker: str
    token: str
    phase: str = "running"
    """``running``, then how the handler has ended; with ``?`` before it if the reply to the commit was lost."""


class State(NamedTuple):
    row: Row = Row()
    runs: tuple[Run, ...] = ()
    lost: int = 0
    requeues: int = 0


class Step(NamedTuple):
    name: str
    after: State
    fault: str = ""
    """What the step itself breaks."""
    is_trouble: bool = False
    """Whether it is a fault of the world, or of the handler, without which the job comes to its end."""


def steps(design: Design, scope: Scope, state: State) -> Iterator[Step]:
    """Yield every step that is possible in a state."""
    row = state.row
    if not row.locked_by:
        yield from _steps_of_row(design, scope, state)
    elif row.locked_by == NOBODY and design.ends_transactions:
        yield Step("the server ends the transaction", _with(state, row._replace(locked_by="")))
    for worker in scope.workers:
        if row.locked_by == worker:
            yield from _ends_of_extension(state, worker)
        left = tuple(run for run in state.runs if run.worker != worker)
        if left != state.runs:
            yield from _end_of(worker, state._replace(runs=left))
    for run in state.runs:
        yield from _steps_of(design, scope, state, run)


def _end_of(worker: str, left: State) -> Iterator[Step]:
    """Yield how a worker may end: in both cases it takes no further step."""
    row = left.row
    is_mine = row.locked_by == worker
    closed = _with(left, row._replace(locked_by="")) if is_mine else left
    yield Step(f"{worker} is killed", closed, is_trouble=True)
    if is_mine:
        # Without an open transaction it leaves the same as one that is killed.
        yield Step(f"{worker} is paused for ever", _with(left, row._replace(locked_by=NOBODY)), is_trouble=True)


def _steps_of_row(design: Design, scope: Scope, state: State) -> Iterator[Step]:
    row = state.row
    if row.status == "pending":
        yield Step("cancel()", _with(state, row._replace(status="cancelled")), is_trouble=True)
        if len(state.runs) < scope.runs and (design.claims_rescued or not row.spared):
            yield from (_claim(design, state, worker) for worker in scope.workers)
    if row.status == "processing":
        if row.is_leased:
            yield Step("the lease expires", _with(state, row._replace(is_leased=False)))
        if not row.is_cancelled:
            yield Step("cancel()", _with(state, row._replace(is_cancelled=True)), is_trouble=True)
        if design.rescues and not (row.is_leased and design.waits_for_lease):
            yield from _rescues(design, scope, state)
    if row.status in FINISHED and state.requeues < scope.requeues:
        after = _with(state, Row(effects=0))._replace(requeues=state.requeues + 1)
        yield Step("requeue()", after, is_trouble=True)


def _steps_of(design: Design, scope: Scope, state: State, run: Run) -> Iterator[Step]:
    if run.phase == "running":
        row = state.row
        is_mine = (row.token == run.token and row.status == "processing") or not design.extends_own
        if is_mine and not (row.is_leased or row.locked_by):
            yield Step(f"{run.worker} extends the lease", _with(state, row._replace(locked_by=run.worker)))
        for how in ("return", "raise", "fail", "release"):
            yield Step(f"{run.worker} {ENDS[how]}", _ended(state, run, how), is_trouble=how != "return")
        return
    outcome = run.phase.removeprefix("?")
    if run.phase.startswith("?"):
        # It repeats the settlement, which changes nothing if the commit has arrived: the token is gone.
        yield Step(f"{run.worker} repeats", _ended(state, run, outcome))
        return
    if state.row.locked_by:
        return
    after, fault = _settled(design, scope, state, run, outcome)
    yield Step(f"{run.worker} settles {outcome}", _without(after, run), fault)
    if state.lost < scope.lost:
        unknown = _ended(after._replace(lost=state.lost + 1), run, f"?{outcome}")
        yield Step(f"{run.worker} settles {outcome}, and the reply is lost", unknown, fault, is_trouble=True)
        unknown = _ended(state._replace(lost=state.lost + 1), run, f"?{outcome}")
        yield Step(f"{run.worker} loses the connection before the commit", unknown, is_trouble=True)


def _ends_of_extension(state: State, worker: str) -> Iterator[Step]:
    """Yield how the transaction may end that extends the lease; if its reply is lost, the worker extends it again."""
    unlocked = state.row._replace(locked_by="")
    yield Step(f"{worker} commits the extension", _with(state, unlocked._replace(is_leased=True)))
    yield Step(f"{worker} loses the connection before it", _with(state, unlocked), is_trouble=True)


def _claim(design: Design, state: State, worker: str) -> Step:
    # The names of the tokens that exist already are enough to choose a new one, and keep the number of states small.
    taken = {run.token for run in state.runs}
    token = (
        next(name for name in map(str, itertools.count(1)) if name not in taken) if design.tokens_are_new else worker
    )
    row = state.row._replace(
        status="processing",
        token=token,
        is_leased=True,
        is_cancelled=False,
        attempts=state.row.attempts + design.counts_at_claim,
    )
    return Step(f"{worker} claims", _with(state, row, Run(worker, token)))


def _rescues(design: Design, scope: Scope, state: State) -> Iterator[Step]:
    """Yield the rescues of the job: one that has run alone, and one whose worker another job may have killed."""
    row = state.row
    fault = "L3: a job is rescued while its lease is valid" if row.is_leased else ""
    left = row._replace(is_leased=False, is_cancelled=False, token="" if design.clears_token else row.token)
    if row.is_cancelled:
        yield Step("the job is rescued", _with(state, left._replace(status="cancelled")), fault)
        return
    if design.counts_at_claim and row.spared < scope.spared:
        spared = left._replace(status="pending", attempts=row.attempts - 1, spared=row.spared + 1)
        yield Step("the job is rescued, and spared", _with(state, spared), fault)
    if row.attempts < scope.attempts:
        yield Step("the job is rescued", _with(state, left._replace(status="pending", spared=1)), fault)
    else:
        yield Step("the job is rescued", _with(state, left._replace(status="failed")), fault)


def _settled(design: Design, scope: Scope, state: State, run: Run, outcome: str) -> tuple[State, str]:
    """Return the state after the transaction by which a run ends, and what that breaks."""
    row, fault = state.row, ""
    if outcome == "return" and not design.writes_together:
        row = row._replace(effects=row.effects + 1)
    is_mine = row.token == run.token and row.status == "processing"
    if not is_mine and design.compares_tokens:
        return _with(state, row), fault
    if not is_mine:
        fault = "L2: a run whose token is not in the row changes it"
    attempts = row.attempts + (not design.counts_at_claim)
    if outcome == "return":
        effects = row.effects + design.writes_together
        row = row._replace(status="completed", effects=effects, attempts=attempts)
    elif outcome == "release":
        row = row._replace(status="pending", attempts=max(row.attempts - 1, 0))
    elif row.is_cancelled:
        row = row._replace(status="cancelled")
    elif outcome == "fail" or attempts >= scope.attempts:
        row = row._replace(status="failed", attempts=attempts)
    else:
        row = row._replace(status="pending", attempts=attempts)
    return _with(state, row._replace(token="", is_leased=False, is_cancelled=False, spared=0)), fault


def _with(state: State, row: Row, *runs: Run) -> State:
    return state._replace(row=row, runs=tuple(sorted((*state.runs, *runs))))


def _without(state: State, run: Run) -> State:
    runs = [*state.runs]
    runs.remove(run)
    return state._replace(runs=tuple(runs))


def _ended(state: State, run: Run, phase: str) -> State:
    return _with(_without(state, run), state.row, run._replace(phase=phase))


# -- the search --------------------------------------------------------------------------------------------------------


def fault_of(scope: Scope, state: State) -> str:
    """Return what is wrong with a state, or an empty text."""
    row = state.row
    if row.effects != (row.status == "completed"):
        return f"L1: the job is {row.status}, and its effects were committed {row.effects} times"
    if row.is_leased and row.status != "processing":
        return f"L4: the job is {row.status}, and its lease is valid"
    if (row.status == "processing") is not bool(row.token):
        return f"L4: the job is {row.status}, and its token is {row.token!r}"
    if row.token and sum(run.token == row.token for run in state.runs) > 1:
        return "L2: two runs have the token of the row"
    if not 0 <= row.attempts <= scope.attempts:
        return f"L5: the job has {row.attempts} attempts"
    return ""


class Found(NamedTuple):
    states: int
    fault: str = ""
    trace: tuple[str, ...] = ()


def search(design: Design, scope: Scope) -> Found:
    """Examine every state that can be reached, and return the shortest trace to what breaks a promise."""
    before: dict[State, tuple[State, str] | None] = {State(): None}
    after: dict[State, list[Step]] = {}
    waiting = deque([State()])
    while waiting:
        state = waiting.popleft()
        after[state] = [*steps(design, scope, state)]
        for step in after[state]:
            if fault := step.fault or fault_of(scope, step.after):
                return Found(len(before), fault, (*_trace(before, state), step.name))
            if step.after not in before:
                before[step.after] = state, step.name
                waiting.append(step.after)
    for state in _stuck(after, ("completed",)):
        if state.row.status == "pending":
            return Found(len(before), "L8: a due job cannot be completed", _trace(before, state))
    for state in _stuck(after, FINISHED):
        return Found(len(before), "L6: the job cannot come to its end", _trace(before, state))
    circle = _circle(after)
    fault = "L7: a job that kills its worker is claimed again and again" if circle else ""
    return Found(len(before), fault, circle)


def _trace(before: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    names: list[str] = []
    while (found := before[state]) is not None:
        state, name = found
        names.append(name)
    return tuple(reversed(names))


def _stuck(after: dict[State, list[Step]], statuses: Sequence[str]) -> list[State]:
    """Return the states from which no steps without trouble lead to one of some statuses."""
    towards: dict[State, list[State]] = {}
    for state, found in after.items():
        for step in found:
            if not step.is_trouble:
                towards.setdefault(step.after, []).append(state)
    ends = {state for state in after if state.row.status in statuses}
    waiting = deque(ends)
    while waiting:
        for state in towards.get(waiting.popleft(), []):
            if state not in ends:
                ends.add(state)
                waiting.append(state)
    return [state for state in after if state not in ends]


def _circle(after: dict[State, list[Step]]) -> tuple[str, ...]:
    """Return the steps of a circle in which each run ends by the death of its worker, or nothing."""
    done: set[State] = set()
    for start, first in after.items():
        path: list[tuple[State, Iterator[Step]]] = [(start, filter(_kills, first))]
        names: list[str] = []
        on_path = {start}
        while path:
            state, left = path[-1]
            step = next(left, None)
            if step is None:
                path.pop()
                on_path.discard(state)
                done.add(state)
                names[-1:] = []
            elif step.after in on_path:
                return (*names, step.name)
            elif step.after not in done:
                path.append((step.after, filter(_kills, after[step.after])))
                on_path.add(step.after)
                names.append(step.name)
    return ()


def _kills(step: Step) -> bool:
    return step.name.endswith(("claims", "is killed", "expires", "is rescued", "and spared"))
