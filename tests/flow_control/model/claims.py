"""The steps of a claim: each is atomic, and those of other transactions may come between any two.

The claim is one statement under READ COMMITTED in a short transaction:

1. start: take the statement's snapshot; its pending jobs that are due are the candidates, and it contains the limits.
2. For each key of the candidates that has a limit or is ordered, in a VOLATILE function:
   a. lock key: try the advisory lock of the key; pass the key over if another transaction holds it.
   b. look: count the running jobs in a fresh snapshot; the rest of the limit is free. Of an ordered key, which runs one
      job at a time, only the first unfinished job by the fresh snapshot stays a candidate.
3. lock row, for each candidate of a key with free slots: skip the row if it is locked, drop it if its newest committed
   version is not pending any more.
4. commit: of the locked jobs of a key, as many as it has free slots are running with a new token. This gets visible,
   and the locks on rows end with it.
5. release: the advisory locks end, after the changes have become visible.
"""

from __future__ import annotations

from tests.flow_control.model.design import UNLIMITED, Model
from tests.flow_control.model.state import (
    Claim,
    ClaimStep,
    Idle,
    Job,
    State,
    head,
    jobs_of,
    key_is_locked,
    row_is_locked,
    running,
)


def start(model: Model, state: State, index: int) -> State:
    """Take the snapshot of the statement; without a candidate, the claim ends at once."""
    candidates = tuple(number for number, job in enumerate(state.jobs) if job.status == "pending")
    if model.design.limit_first:
        candidates = candidates[: model.scope.batch]
    keys = range(model.count_of_keys)
    version = state.workers[index].version
    limits = (version,) * len(keys) if version else state.limits
    claim = Claim(
        step="look",
        limits=limits,
        keys=tuple(
            sorted({key for number in candidates if _is_locked_for(model, limits, key := model.scope.keys[number])})
        ),
        candidates=candidates,
        free=limits,
        # Only what a design uses is kept, as each value that is kept multiplies the states.
        counted=tuple(len(running(model, state, key)) for key in keys) if model.design.count == "statement" else (),
        heads=tuple(head(model, state, key) for key in keys) if model.design.head == "statement" else (),
    )
    state = state.with_transaction(index, claim, awake=not model.scope.wakeups)
    return _next(model, state, index, claim)


def _is_locked_for(model: Model, limits: tuple[int, ...], key: int) -> bool:
    """Whether a claim locks the key and looks at it."""
    return limits[key] != UNLIMITED or key in model.scope.ordered or model.design.locks_unlimited_keys


def advance(model: Model, state: State, index: int, claim: Claim) -> State:
    """Carry out the next step of a claim in flight."""
    match claim.step:
        case "lock key":
            return _lock_key(model, state, index, claim)
        case "look":
            return _look(model, state, index, claim)
        case "lock row":
            return _lock_row(model, state, index, claim)
        case "unlock keys":
            return state.with_transaction(index, claim._replace(step="commit", key_locks=()))
        case "commit":
            return _commit(model, state, index, claim)
        case "release":
            return _end(state, index, claim)


def _first_step(model: Model) -> ClaimStep:
    return "lock key" if model.design.key_lock == "before look" else "look"


def _lock_key(model: Model, state: State, index: int, claim: Claim) -> State:
    """Try the advisory lock of the first key that is left."""
    key = claim.keys[0]
    if key_is_locked(state, key):
        if model.scope.wakeups and model.design.reports_contention:
            claim = claim._replace(looks_again=True)
        return _next_key(model, state, index, _without(model, claim, key))
    claim = claim._replace(key_locks=(*claim.key_locks, key))
    if model.design.key_lock == "before look":
        return state.with_transaction(index, claim._replace(step="look"))
    return _next_key(model, state, index, claim)


def _look(model: Model, state: State, index: int, claim: Claim) -> State:
    """Determine the free slots of the first key that is left, and of an ordered key the job that may run."""
    key, design = claim.keys[0], model.design
    if design.counter:
        taken = state.counters[key]
    else:
        taken = claim.counted[key] if design.count == "statement" else len(running(model, state, key))
    free = claim.limits[key] - taken
    if key in model.scope.ordered:
        first = claim.heads[key] if design.head == "statement" else head(model, state, key)
        if design.head != "first unlocked":
            claim = _without(model, claim, key, but=first)
        free = 1 - taken if design.head_waits_for_running else 1
    if free <= 0:
        claim = _without(model, claim, key)
    else:
        seen = claim.seen + in_the_way(model, state, claim, key)
        claim = claim._replace(free=(*claim.free[:key], free, *claim.free[key + 1 :]), seen=seen)
    if design.key_lock == "after look":
        return state.with_transaction(index, claim._replace(step="lock key"))
    return _next_key(model, state, index, claim)


def in_the_way(model: Model, state: State, claim: Claim, key: int) -> tuple[int, ...]:
    """Return the jobs that the key's look, in a fresh snapshot, shows in the way of its candidates.

    These are the rows that plain SQL has put to ``processing`` and, of an ordered key, the unfinished jobs with earlier
    numbers. A claim answers for these; it cannot know those that come after its look.
    """
    last = max((number for number in claim.candidates if model.scope.keys[number] == key), default=-1)
    found = []
    for number in jobs_of(model, key):
        job = state.jobs[number]
        is_earlier = key in model.scope.ordered and number < last and job.status != "finished"
        if is_earlier or is_plain(job):
            found.append(number)
    return tuple(found)


def is_plain(job: Job) -> bool:
    """Whether plain SQL has put the row to ``processing``."""
    return job.status == "running" and not job.token


def _lock_row(model: Model, state: State, index: int, claim: Claim) -> State:
    """Lock the first candidate that is left, in its newest committed version."""
    number = next_row(model, claim)
    claim = claim._replace(candidates=tuple(other for other in claim.candidates if other != number))
    if row_is_locked(state, number):
        if model.scope.wakeups and model.design.reports_locked_rows:
            claim = claim._replace(looks_again=True)
    elif state.jobs[number].status == "pending":
        claim = claim._replace(rows=(*claim.rows, number))
    return _next(model, state, index, claim)


def _next_key(model: Model, state: State, index: int, claim: Claim) -> State:
    claim = claim._replace(keys=claim.keys[1:])
    if not claim.keys:
        claim = claim._replace(counted=(), heads=())
    return _next(model, state, index, claim)


def _next(model: Model, state: State, index: int, claim: Claim) -> State:
    """Determine the next step: a key, a row, or the end of the statement."""
    ready = _ready(model, claim)
    if claim.keys and not (ready and model.design.locks_rows == "after each look"):
        step = _first_step(model)
    elif ready:
        step = "lock row"
    elif not claim.rows:
        return _release(model, state, index, claim)
    else:
        step = "unlock keys" if model.design.unlocks_before_commit else "commit"
    return state.with_transaction(index, claim._replace(step=step))


def next_row(model: Model, claim: Claim) -> int:
    """Return the job whose row is locked next."""
    return _ready(model, claim)[0]


def _ready(model: Model, claim: Claim) -> list[int]:
    """Return the candidates of the keys that do not have to be looked at, or have been."""
    return [number for number in claim.candidates if model.scope.keys[number] not in claim.keys]


def admitted(model: Model, claim: Claim) -> list[int]:
    """Return the jobs that a claim admits when it commits."""
    free = list(claim.free)
    found: list[int] = []
    for number in claim.rows:
        key = model.scope.keys[number]
        if free[key] > 0 and len(found) < model.scope.batch:
            free[key] -= 1
            found.append(number)
    return found


def _commit(model: Model, state: State, index: int, claim: Claim) -> State:
    """Make the changes visible; the worker has its jobs from here on, which is earlier than it can be."""
    for number in admitted(model, claim):
        job = state.jobs[number]
        token = job.new_token()
        state = state.with_job(number, Job("running", token, (*job.runs, token), job.zombies))
        if model.design.counter:
            state = state.with_counter(model.scope.keys[number], 1)
    return _release(model, state, index, claim._replace(looks_again=model.scope.wakeups))


def _release(model: Model, state: State, index: int, claim: Claim) -> State:
    """Let the advisory locks end in a step of their own."""
    if not claim.key_locks:
        return _end(state, index, claim)
    nothing = (0,) * model.count_of_keys
    claim = claim._replace(step="release", limits=nothing, candidates=(), free=nothing, rows=(), seen=())
    return state.with_transaction(index, claim)


def _end(state: State, index: int, claim: Claim) -> State:
    awake = state.workers[index].awake or claim.looks_again
    return state.with_transaction(index, Idle(), awake=awake)


def _without(model: Model, claim: Claim, key: int, *, but: int = -1) -> Claim:
    """Return the claim without the candidates of a key, except for one."""
    kept = tuple(number for number in claim.candidates if number == but or model.scope.keys[number] != key)
    return claim._replace(candidates=kept)
