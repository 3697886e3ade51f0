"""Visit every reachable state, breadth first, so that the first fault that is found has the shortest trace."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tests.flow_control.model.changes import Action, successors
from tests.flow_control.model.design import Model
from tests.flow_control.model.invariants import fault_of_state, fault_of_step
from tests.flow_control.model.state import State, canonical, initial_state


@dataclass(frozen=True)
class Result:
    """What a search has found."""

    states: int
    """The number of states that were visited."""
    fault: str
    """The invariant that is broken, or an empty string."""
    trace: tuple[str, ...]
    """The steps that lead to the fault."""

    def __str__(self) -> str:
        steps = [f"{number:3}. {step}" for number, step in enumerate(self.trace, 1)]
        return "\n".join([f"{self.states} states: {self.fault or 'no fault'}", *steps])


def search(model: Model, most: int = 20_000_000) -> Result:
    """Visit the states until a fault is found or none is left."""
    first = initial_state(model)
    parents: dict[State, State | None] = {canonical(first): None}
    waiting = deque(parents)
    while waiting:
        state = waiting.popleft()
        for action, found in successors(model, state):
            after = canonical(found)
            fault = fault_of_step(model, state, action, found)
            is_new = after not in parents
            if is_new:
                fault = fault or fault_of_state(model, after)
                parents[after] = state
                waiting.append(after)
            if fault:
                path = _path(parents, state)
                return Result(len(parents), fault, _trace(model, [*path, after], fault))
        if len(parents) > most:
            message = f"more than {most} states: narrow the scope"
            raise OverflowError(message)
    return Result(len(parents), "", ())


def _path(parents: dict[State, State | None], last: State) -> list[State]:
    """Return the states from the first one to the last one."""
    path = []
    state: State | None = last
    while state is not None:
        path.append(state)
        state = parents[state]
    return path[::-1]


def _trace(model: Model, path: list[State], fault: str) -> tuple[str, ...]:
    """Describe the steps; they are taken once more without sorting the workers, so that each keeps its number."""
    state = initial_state(model)
    lines = []
    for position, wanted in enumerate(path[1:], 2):
        is_last = position == len(path)
        for action, found in successors(model, state):
            if canonical(found) == wanted and (
                not is_last or fault in {fault_of_step(model, state, action, found), fault_of_state(model, wanted)}
            ):
                lines.append(describe(action, state, found))
                state = found
                break
    return tuple(lines)


def describe(action: Action, before: State, after: State) -> str:
    """Return a line of a trace."""
    words = [action.name]
    if action.key >= 0:
        words.append(f"of key {action.key + 1}" if action.name == "look" else f"{action.key + 1}")
    if action.job >= 0:
        words.append(f"job {action.job + 1}")
    if action.value:
        words.append(f"to {action.value}" if action.name == "change limit" else f"with token {action.value}")
    if action.worker >= 0:
        words.insert(0, f"worker {action.worker + 1}:")
    jobs = ", ".join(
        f"job {number} {job.status}"
        for number, (old, job) in enumerate(zip(before.jobs, after.jobs, strict=True), 1)
        if old.status != job.status
    )
    return " ".join(words) + (f" -> {jobs}" if jobs else "")
