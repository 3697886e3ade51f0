"""A model of one job under leases: its row, the runs of its handler, and every step that they and faults can take.

The row has a status, the token of the claim that holds it, and a lease. A *run* is one call of the handler by a worker;
it remembers the token of its claim. Workers may be killed, be paused for any time (they take no step), lose the reply
to a commit, or lose the connection before it. All parts of a state are tuples, so that it can be hashed.

Safety, in every reachable state or step:

L1. What a handler has written is committed once in the life of a job, together with the status ``completed``.
L2. Only the run whose token is in the row changes it, so that at most one run can.
L3. A job is rescued only after its lease has expired.
L4. A row that is not processing has no token, and one that is has one.
L5. A job has no more attempts than it may have, and fails only by ``Fail`` or when none is left.

Liveness:

L6. From every reachable state the job can come to its end by steps that are no faults.
L7. A job that kills its worker in each run comes to its end: there is no circle of claims, kills and rescues.

Each safeguard of :class:`Design` is needed: without it, :func:`search` finds a trace that breaks one of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

WORKERS = ("a", "b")
MOST_ATTEMPTS, MOST_RUNS, MOST_LOST, MOST_REQUEUES = 2, 2, 1, 1
SUSPECT = 1
"""After so many deaths a job runs alone; the death before that costs no attempt."""

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


class Row(NamedTuple):
    status: str = "pending"
    token: str = ""
    is_leased: bool = False
    attempts: int = 0
    deaths: int = 0
    is_cancelled: bool = False
    """Whether the cancellation of the running job was asked for."""
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


def steps(design: Design, state: State) -> Iterator[Step]:
    """Yield every step that is possible in a state."""
    yield from _steps_of_row(design, state)
    for worker in WORKERS:
        left = tuple(run for run in state.runs if run.worker != worker)
        if left != state.runs:
            yield Step(f"{worker} is killed", state._replace(runs=left), is_trouble=True)
    for run in state.runs:
        yield from _steps_of(design, state, run)


def _steps_of_row(design: Design, state: State) -> Iterator[Step]:
    row = state.row
    if row.status == "pending":
        yield Step("cancel()", _with(state, row._replace(status="cancelled")), is_trouble=True)
        if len(state.runs) < MOST_RUNS:
            yield from (_claim(design, state, worker) for worker in WORKERS)
    if row.status == "processing":
        if row.is_leased:
            yield Step("the lease expires", _with(state, row._replace(is_leased=False)))
        if not row.is_cancelled:
            yield Step("cancel()", _with(state, row._replace(is_cancelled=True)), is_trouble=True)
        if design.rescues and not (row.is_leased and design.waits_for_lease):
            yield _rescue(design, state)
    if row.status in FINISHED and state.requeues < MOST_REQUEUES:
        after = _with(state, Row(effects=0))._replace(requeues=state.requeues + 1)
        yield Step("requeue()", after, is_trouble=True)


def _steps_of(design: Design, state: State, run: Run) -> Iterator[Step]:
    if run.phase == "running":
        if run.token == state.row.token and not state.row.is_leased:
            yield Step(f"{run.worker} extends its lease", _with(state, state.row._replace(is_leased=True)))
        yield Step(f"{run.worker}: the handler returns", _ended(state, run, "return"))
        for how in ("raise", "fail", "release"):
            yield Step(f"{run.worker}: {how}", _ended(state, run, how), is_trouble=True)
        return
    outcome = run.phase.removeprefix("?")
    if run.phase.startswith("?"):
        # It repeats the settlement, which changes nothing if the commit has arrived: the token is gone.
        yield Step(f"{run.worker} repeats", _ended(state, run, outcome))
        return
    after, fault = _settled(design, state, run, outcome)
    yield Step(f"{run.worker} settles: {outcome}", _without(after, run), fault)
    if state.lost < MOST_LOST:
        unknown = _ended(after._replace(lost=state.lost + 1), run, f"?{outcome}")
        yield Step(f"{run.worker} settles: {outcome}, and the reply is lost", unknown, fault, is_trouble=True)
        unknown = _ended(state._replace(lost=state.lost + 1), run, f"?{outcome}")
        yield Step(f"{run.worker} loses the connection before the commit", unknown, is_trouble=True)


def _claim(design: Design, state: State, worker: str) -> Step:
    # The names of the tokens that exist already are enough to choose a new one, and keep the number of states small.
    taken = {run.token for run in state.runs}
    token = next(name for name in "123456" if name not in taken) if design.tokens_are_new else worker
    row = state.row._replace(
        status="processing",
        token=token,
        is_leased=True,
        is_cancelled=False,
        attempts=state.row.attempts + design.counts_at_claim,
    )
    return Step(f"{worker} claims", _with(state, row, Run(worker, token)))


def _rescue(design: Design, state: State) -> Step:
    row = state.row
    fault = "L3: a job is rescued while its lease is valid" if row.is_leased else ""
    token = "" if design.clears_token else row.token
    if row.is_cancelled:
        after = row._replace(status="cancelled", token=token, is_leased=False)
    elif design.counts_at_claim and row.deaths < SUSPECT:
        # Another job of the claim may have killed the worker.
        after = row._replace(status="pending", token=token, attempts=row.attempts - 1, deaths=row.deaths + 1)
    elif row.attempts < MOST_ATTEMPTS:
        after = row._replace(status="pending", token=token)
    else:
        after = row._replace(status="failed", token=token)
    return Step("the job is rescued", _with(state, after._replace(is_leased=False, is_cancelled=False)), fault)


def _settled(design: Design, state: State, run: Run, outcome: str) -> tuple[State, str]:
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
    elif outcome == "fail" or attempts >= MOST_ATTEMPTS:
        row = row._replace(status="failed", attempts=attempts)
    else:
        row = row._replace(status="pending", attempts=attempts)
    return _with(state, row._replace(token="", is_leased=False, is_cancelled=False, deaths=0)), fault


def _with(state: State, row: Row, *runs: Run) -> State:
    return state._replace(row=row, runs=tuple(sorted((*state.runs, *runs))))


def _without(state: State, run: Run) -> State:
    runs = [*state.runs]
    runs.remove(run)
    return state._replace(runs=tuple(runs))


def _ended(state: State, run: Run, phase: str) -> State:
    return _with(_without(state, run), state.row, run._replace(phase=phase))


# -- the search --------------------------------------------------------------------------------------------------------


def fault_of(state: State) -> str:
    """Return what is wrong with a state, or an empty text."""
    row = state.row
    if row.effects != (row.status == "completed"):
        return f"L1: the job is {row.status}, and its effects were committed {row.effects} times"
    if (row.status == "processing") is not bool(row.token):
        return f"L4: the job is {row.status}, and its token is {row.token!r}"
    if row.token and sum(run.token == row.token for run in state.runs) > 1:
        return "L2: two runs have the token of the row"
    if not 0 <= row.attempts <= MOST_ATTEMPTS:
        return f"L5: the job has {row.attempts} attempts"
    return ""


class Found(NamedTuple):
    states: int
    fault: str = ""
    trace: tuple[str, ...] = ()


def search(design: Design) -> Found:
    """Examine every state that can be reached, and return the shortest trace to what breaks a promise."""
    before: dict[State, tuple[State, str] | None] = {State(): None}
    after: dict[State, list[Step]] = {}
    waiting = deque([State()])
    while waiting:
        state = waiting.popleft()
        after[state] = [*steps(design, state)]
        for step in after[state]:
            if fault := step.fault or fault_of(step.after):
                return Found(len(before), fault, (*_trace(before, state), step.name))
            if step.after not in before:
                before[step.after] = state, step.name
                waiting.append(step.after)
    for state in _stuck(after):
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


def _stuck(after: dict[State, list[Step]]) -> list[State]:
    """Return the states from which no steps without trouble lead to the end of the job."""
    towards: dict[State, list[State]] = {}
    for state, found in after.items():
        for step in found:
            if not step.is_trouble:
                towards.setdefault(step.after, []).append(state)
    ends = {state for state in after if state.row.status in FINISHED}
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
    return step.name.endswith(("claims", "is killed", "expires", "is rescued"))
