"""Search every state that the model of the claim can reach, for one that breaks what must hold.

``python -m tests.flow_control.claim_search [--deep] [NAME]`` prints a table of the designs, or the trace of one.

I1. When a claim commits that admits a job, at most as many jobs of its key run as the limit in the snapshot of the
    claim's statement. Rows that plain SQL has put to ``processing`` count if they were committed before the claim's
    look at the key; later ones are not the claim's fault.
I2. When a claim commits that admits a job of an ordered key, no other job of the key runs and no earlier one is
    unfinished. Excepted are the jobs that got unfinished, or were put to ``processing`` by plain SQL, after the claim's
    look at the key. The strict promise has no exception for requeued jobs.
I3. A job has at most one worker whose lease is valid; the worker's token is that of the row, which is ``processing``.
    A worker without a valid lease changes nothing.
I4. If no transaction is in flight and a job is due whose key is below its limit, a claim admits a job, and each worker
    that may claim it will look without waiting for a further notification.
"""

import argparse
import sys
from collections import deque
from dataclasses import dataclass

from tests.flow_control.claim_model import (
    DESIGN,
    SETTLES,
    UNLIMITED,
    Action,
    Claim,
    Design,
    Idle,
    Model,
    Operation,
    Scope,
    State,
    admitted,
    advance,
    canonical,
    initial_state,
    is_plain,
    is_quiet,
    jobs_of,
    running,
    start,
    successors,
)


def fault_of_step(model: Model, before: State, action: Action, after: State) -> str:
    """Return what is wrong with a step, or an empty string."""
    if action.name == "commit":
        claim = before.workers[action.worker].transaction
        assert isinstance(claim, Claim)
        for number in admitted(model, claim):
            fault = _fault_of_admission(model, claim, after, number)
            if fault:
                return fault
    elif action.name in SETTLES:
        is_zombie = action.value in before.jobs[action.job].zombies
        if is_zombie and before.jobs[action.job].status != after.jobs[action.job].status:
            return f"I3: a worker without a lease has settled job {action.job + 1}"
    return ""


def _fault_of_admission(model: Model, claim: Claim, after: State, number: int) -> str:
    key = model.scope.keys[number]
    # A claim cannot know the rows that plain SQL has changed after its look.
    known = [other for other in running(model, after, key) if other in claim.seen or not is_plain(after.jobs[other])]
    if key not in model.scope.ordered:
        limit = claim.limits[key]
        return "" if len(known) <= limit else f"I1: {len(known)} jobs of key {key + 1} run, its limit is {limit}"
    if len(known) > 1:
        return f"I2: {len(known)} jobs of the ordered key {key + 1} run"
    for earlier in jobs_of(model, key):
        is_known = model.scope.strict_requeue or earlier in claim.seen
        if earlier < number and after.jobs[earlier].status != "finished" and is_known:
            return f"I2: job {number + 1} runs before job {earlier + 1}"
    return ""


def fault_of_state(model: Model, state: State) -> str:
    for number, job in enumerate(state.jobs):
        if job.runs and (job.status != "running" or job.runs != (job.token,)):
            return f"I3: job {number + 1} is {job.status} with token {job.token}, but {job.runs} have leases on it"
    if is_quiet(state):
        for index in range(len(state.workers)):
            fault = _fault_of_rest(model, state, index)
            if fault:
                return fault
    return ""


def _fault_of_rest(model: Model, state: State, index: int) -> str:
    """Return what is wrong with a state in which no transaction is in flight, for one of the workers."""
    due = [key for key in range(model.count_of_keys) if _is_due(model, state, index, key)]
    if not due:
        return ""
    keys = " and ".join(str(key + 1) for key in due)
    if not state.workers[index].awake:
        return f"I4: a job of key {keys} is due, but worker {index + 1} waits for a notification"
    if not _admits(model, state, index):
        return f"I4: a job of key {keys} is due, but a claim admits nothing"
    return ""


def _is_due(model: Model, state: State, index: int, key: int) -> bool:
    """Whether a job of the key may be admitted, by the limit that the worker knows."""
    count = len(running(model, state, key))
    if key in model.scope.ordered:
        unfinished = [number for number in jobs_of(model, key) if state.jobs[number].status != "finished"]
        return not count and bool(unfinished) and state.jobs[unfinished[0]].status == "pending"
    limit = state.workers[index].version or state.limits[key]
    return count < limit and any(state.jobs[number].status == "pending" for number in jobs_of(model, key))


def _admits(model: Model, state: State, index: int) -> bool:
    """Whether a claim admits a job while no other transaction is in flight."""
    now = start(model, state, index)
    while not isinstance(claim := now.workers[index].transaction, Idle):
        assert isinstance(claim, Claim)
        if claim.step == "commit":
            return bool(admitted(model, claim))
        now = advance(model, now, index, claim)
    return False


# -- the search, breadth first, so that the first fault that is found has the shortest trace -----------------------


@dataclass(frozen=True)
class Result:
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


# -- the designs that are searched, and the scope within which each is ---------------------------------------------
SETTLE: tuple[Operation, ...] = ("complete", "retry")
LEASES: tuple[Operation, ...] = (*SETTLE, "rescue")
DELAYS: tuple[Operation, ...] = (*SETTLE, "retry later", "fall due")
CONTROL: tuple[Operation, ...] = (*SETTLE, "cancel", "requeue", "roll back")
LIMITS: tuple[Operation, ...] = (*SETTLE, "change limit")
THREE = (0, 0, 0)
FIRST = frozenset({0})


@dataclass(frozen=True)
class Variant:
    """A design, the scope within which it is searched, and the invariant that it breaks."""

    name: str
    scope: Scope
    design: Design = DESIGN
    breaks: str = ""
    steps: int = 0
    """The length of the shortest trace to the fault."""

    @property
    def model(self) -> Model:
        return Model(self.design, self.scope)


HOLDS = [
    Variant("limit that changes", Scope(keys=(0, 0), operations=(*LIMITS, "roll back"))),
    Variant("limit, three workers", Scope(keys=(0, 0), versions=THREE, operations=SETTLE)),
    Variant("limit of 2", Scope(keys=(0, 0, 0), limits=(2,), operations=SETTLE)),
    Variant("limit, plain SQL", Scope(keys=(0, 0), operations=(*LEASES, "plain start"))),
    Variant("leases", Scope(keys=(0, 0), limits=(2,), operations=LEASES)),
    Variant("two keys", Scope(keys=(0, 0, 1), operations=SETTLE)),
    Variant(
        "two keys, rows locked after each look",
        Scope(keys=(0, 0, 1), limits=(1, 2), operations=SETTLE),
        Design(locks_rows="after each look"),
    ),
    Variant("two configurations", Scope(keys=(0, 0, 0), versions=(1, 2), wakeups=True, operations=SETTLE)),
    Variant("order, three workers", Scope(keys=(0, 0, 0), ordered=FIRST, versions=THREE, operations=CONTROL)),
    Variant("order, leases and delays", Scope(keys=(0, 0), ordered=FIRST, operations=(*LEASES, *DELAYS, *CONTROL))),
    Variant("order beside a limit", Scope(keys=(0, 1, 0, 1), ordered=FIRST, operations=SETTLE)),
    Variant(
        "wake-ups, limit that changes", Scope(keys=(0, 0), wakeups=True, operations=(*LIMITS, "cancel", "requeue"))
    ),
    Variant("wake-ups, order", Scope(keys=(0, 0, 0), ordered=FIRST, wakeups=True, operations=(*DELAYS, "cancel"))),
    Variant("wake-ups, two keys", Scope(keys=(0, 0, 1), wakeups=True, batch=1, operations=(*SETTLE, "cancel"))),
]
"""The design of the library, which breaks nothing."""
HOLDS_DEEP = [
    Variant(
        "limit that changes, three workers", Scope(keys=(0, 0, 0), versions=THREE, operations=(*LIMITS, "roll back"))
    ),
    Variant("limit of 2, four jobs", Scope(keys=(0, 0, 0, 0), limits=(2,), versions=THREE, operations=SETTLE)),
    Variant("limit that changes, plain SQL", Scope(keys=(0, 0), operations=(*LEASES, *LIMITS, "plain start"))),
    Variant("limit, plain SQL, three jobs", Scope(keys=(0, 0, 0), operations=(*LEASES, "plain start"))),
    Variant("limit that changes, leases", Scope(keys=(0, 0), versions=THREE, operations=(*LIMITS, *LEASES))),
    Variant("leases, three workers", Scope(keys=(0, 0), limits=(2,), versions=THREE, operations=LEASES)),
    Variant("leases, three jobs", Scope(keys=(0, 0, 0), versions=THREE, operations=LEASES)),
    Variant("two keys that change", Scope(keys=(0, 0, 1), operations=LIMITS)),
    Variant("two keys, four jobs", Scope(keys=(0, 0, 1, 1), limits=(1, 2), versions=THREE, operations=SETTLE)),
    Variant(
        "two configurations, three workers",
        Scope(keys=(0, 0, 0), versions=(1, 1, 2), wakeups=True, operations=(*SETTLE, "cancel")),
    ),
    Variant("order, four jobs", Scope(keys=(0, 0, 0, 0), ordered=FIRST, versions=THREE, operations=CONTROL)),
    Variant("order, five jobs", Scope(keys=(0, 0, 0, 0, 0), ordered=FIRST, operations=CONTROL)),
    Variant(
        "order, leases, three workers",
        Scope(keys=(0, 0, 0), ordered=FIRST, versions=THREE, operations=(*LEASES, "cancel", "requeue")),
    ),
    Variant(
        "order, delays, three workers",
        Scope(keys=(0, 0, 0), ordered=FIRST, versions=THREE, operations=(*DELAYS, "cancel", "requeue")),
    ),
    Variant(
        "order beside a limit, three workers",
        Scope(keys=(0, 1, 0, 1, 0), ordered=FIRST, versions=THREE, operations=SETTLE),
    ),
    Variant(
        "wake-ups, three workers",
        Scope(keys=(0, 0), versions=THREE, wakeups=True, batch=1, operations=(*LIMITS, *LEASES, "cancel", "requeue")),
    ),
    Variant(
        "wake-ups, order, three workers",
        Scope(keys=(0, 0, 0), ordered=FIRST, versions=THREE, wakeups=True, operations=(*DELAYS, "cancel", "requeue")),
    ),
    Variant(
        "wake-ups, two keys, three workers",
        Scope(keys=(0, 0, 1), versions=THREE, wakeups=True, batch=1, operations=(*SETTLE, "cancel")),
    ),
]
"""The same with wider bounds."""
_REQUEUE_RACES = Scope(keys=(0, 0), initial="fp", ordered=FIRST, operations=CONTROL, strict_requeue=True)
_SKIPPED_ROW = Scope(keys=(0,), wakeups=True, operations=(*SETTLE, "cancel", "roll back"))
_FIRST_LIMIT = Scope(keys=(0, 0), limits=(UNLIMITED,), limit_values=(1, UNLIMITED), operations=LIMITS)
NOT_PROMISED = [
    Variant("a job requeued behind a claim's back comes first", _REQUEUE_RACES, breaks="I2", steps=6),
    Variant("a claim wakes up for a skipped row", _SKIPPED_ROW, breaks="I4", steps=7),
    Variant("the first limit of a key counts at once", _FIRST_LIMIT, breaks="I1", steps=11),
]
"""Promises that the design does not make: the search has found that it breaks them."""
ALTERNATIVES = [
    Variant("requeues lock the key", _REQUEUE_RACES, Design(requeue_locks_key=True)),
    Variant("skipped rows are reported", _SKIPPED_ROW, Design(reports_locked_rows=True)),
    Variant("unlimited keys are locked", _FIRST_LIMIT, Design(locks_unlimited_keys=True)),
]
"""Designs that make these promises."""
_PLAIN = Scope(keys=(0, 0), operations=SETTLE)
_ORDERED = Scope(keys=(0, 0), ordered=FIRST, operations=CONTROL)
_WAKEUPS = Scope(keys=(0, 0), wakeups=True, operations=(*SETTLE, "cancel"))
_ORDERED_WAKEUPS = Scope(keys=(0, 0), ordered=FIRST, wakeups=True, operations=(*SETTLE, "cancel"))
BROKEN = [
    Variant("count in the statement's snapshot", _PLAIN, Design(count="statement"), "I1", 13),
    Variant("no lock of the key", _PLAIN, Design(key_lock="none"), "I1", 10),
    Variant("key locked after the count", _PLAIN, Design(key_lock="after look"), "I1", 13),
    Variant("key unlocked before the commit", _PLAIN, Design(unlocks_before_commit=True), "I1", 14),
    Variant(
        "counter that expires under a running job",
        Scope(keys=(0, 0), operations=(*SETTLE, "time out")),
        Design(counter=True),
        "I1",
        13,
    ),
    Variant("counter that leaks", Scope(keys=(0, 0), operations=LEASES), Design(counter=True), "I4", 8),
    Variant("order past a locked head", _ORDERED, Design(head="first unlocked"), "I2", 7),
    Variant("order by the statement's snapshot", _ORDERED, Design(head="statement"), "I2", 8),
    Variant("head beside a running job", _ORDERED, Design(head_waits_for_running=False), "I2", 14),
    Variant(
        "order past a delayed head",
        Scope(keys=(0, 0), ordered=FIRST, operations=DELAYS),
        Design(head="first due"),
        "I2",
        12,
    ),
    Variant("settle without the token", Scope(keys=(0,), operations=LEASES), Design(fenced=False), "I3", 13),
    Variant("contention not reported", _WAKEUPS, Design(reports_contention=False), "I4", 10),
    Variant(
        "batch cut off first", Scope(keys=(0, 0, 1), batch=1, operations=SETTLE), Design(limit_first=True), "I4", 6
    ),
    Variant("no notification of a free slot", _WAKEUPS, Design(silent=("complete",)), "I4", 12),
    Variant("no notification of a cancelled head", _ORDERED_WAKEUPS, Design(silent=("cancel",)), "I4", 7),
]
"""Designs that lack a safeguard each."""


# -- the command line ----------------------------------------------------------------------------------------------
GROUPS = {
    "The design": HOLDS,
    "Promises that the design does not make": NOT_PROMISED,
    "Alternatives that make them": ALTERNATIVES,
    "Designs that lack a safeguard": BROKEN,
}
DEEP = {"The design, with wider bounds": HOLDS_DEEP}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.flow_control.claim_search")
    parser.add_argument("name", nargs="?", default="", help="a part of the name of a design; its trace is printed")
    parser.add_argument("--deep", action="store_true", help="search with wider bounds as well, for some minutes")
    arguments = parser.parse_args()
    for title, variants in (GROUPS | (DEEP if arguments.deep else {})).items():
        chosen = [variant for variant in variants if arguments.name in variant.name]
        if chosen:
            sys.stdout.write(f"\n{title:50}{'states':>10}  {'result':8}{'steps':>5}\n")
        for variant in chosen:
            _print(variant, with_trace=bool(arguments.name))


def _print(variant: Variant, *, with_trace: bool) -> None:
    result = search(variant.model)
    broken = result.fault.partition(":")[0] or "holds"
    sys.stdout.write(f"{variant.name:50}{result.states:10,}  {broken:8}{len(result.trace) or '':>5}\n")
    if with_trace:
        sys.stdout.write(f"{result}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
