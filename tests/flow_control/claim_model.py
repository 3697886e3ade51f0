"""A model of the claim: the choices that make it correct, and each step of what happens beside each other.

All parts of a state are tuples, so that it can be hashed and the workers can be sorted. Who holds a lock is not a part
of its own: it follows from the transactions in flight.

The claim is one statement under READ COMMITTED in a short transaction. Each of its steps is atomic, and those of other
transactions may come between any two:

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

The operations beside the claim are each a transaction of one statement. A change of a row that is not pending is one
step, as its lock is not observable: no claim can admit such a job, whether it finds the row locked or not, and other
changes wait for the lock. Cancelling a pending job takes two steps, because a claim skips the row in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

Operation = Literal[
    "complete",
    "retry",
    "retry later",
    "fall due",
    "rescue",
    "cancel",
    "requeue",
    "change limit",
    "plain start",
    "roll back",
    "time out",
]
UNLIMITED = 9
"""The limit of a key without one."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """The choices of which each makes the claim correct; the defaults are the design of the library."""

    count: Literal["fresh", "statement"] = "fresh"
    """The snapshot that counts the running jobs of a key: a fresh one, or that of the claim's statement."""
    head: Literal["fresh", "statement", "first unlocked", "first due"] = "fresh"
    """The job of an ordered key that may run: the first unfinished one by a fresh snapshot, or by that of the claim's
    statement, or the first pending job of which the row is not locked, or the first unfinished one that is due."""
    head_waits_for_running: bool = True
    """Whether the head of an ordered key is left alone while another job of the key runs."""
    key_lock: Literal["before look", "after look", "none"] = "before look"
    """When the advisory lock of a key is tried."""
    locks_unlimited_keys: bool = False
    """Whether a claim takes the advisory lock of a key without a limit as well."""
    locks_rows: Literal["after all looks", "after each look"] = "after all looks"
    """When the rows of a key are locked: once all keys are looked at, or before the next key is."""
    unlocks_before_commit: bool = False
    """Whether the advisory locks end with the statement instead of the transaction."""
    counter: bool = False
    """Whether a stored counter replaces the count of running jobs; each settle takes one off."""
    fenced: bool = True
    """Whether a settle compares its token with that of the row."""
    reports_contention: bool = True
    """Whether a claim that was refused an advisory lock tells its worker to look again."""
    reports_locked_rows: bool = False
    """Whether a claim that skipped a locked row tells its worker to look again."""
    limit_first: bool = False
    """Whether the batch is cut off before the keys without a free slot are left out."""
    requeue_locks_key: bool = False
    """Whether a requeue waits for the advisory lock of the key."""
    silent: tuple[Operation, ...] = ()
    """The operations that send no notification."""


DESIGN = Design()
"""The design of the library."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    keys: tuple[int, ...]
    """The key of each job, in the order of the jobs' numbers."""
    initial: str = ""
    """The first status of each job, a letter each: (p)ending, (r)unning, (d)elayed, (f)inished; by default pending."""
    ordered: frozenset[int] = frozenset()
    """The keys of which the jobs run in strict order."""
    limits: tuple[int, ...] = (1, 1)
    """The limit of each key in its table at the beginning."""
    limit_values: tuple[int, ...] = (1, 2)
    """The limits that the table may get."""
    versions: tuple[int, ...] = (0, 0)
    """The limit that the configuration of each worker contains, or 0 if it reads the table."""
    operations: tuple[Operation, ...] = ()
    """What may happen beside the claims, at any time and any number of times."""
    batch: int = UNLIMITED
    """The most jobs a claim admits."""
    wakeups: bool = False
    """Whether it is recorded which workers will look again, so that a lost wake-up is found."""
    strict_requeue: bool = False
    """Whether a claim may not pass over a job that was requeued while the claim was in flight."""


@dataclass(frozen=True)
class Model:
    design: Design
    scope: Scope

    @property
    def count_of_keys(self) -> int:
        return max(self.scope.keys) + 1


# -- the committed rows, and what each worker's transaction has done so far ----------------------------------------
Status = Literal["pending", "delayed", "running", "finished"]
"""``running`` is the status ``processing``, and a ``delayed`` job is pending but not due yet; completed, failed and
cancelled jobs are all ``finished``."""
STATUSES: dict[str, Status] = {"p": "pending", "d": "delayed", "r": "running", "f": "finished"}


class Job(NamedTuple):
    """A committed row, and the workers that execute it or believe to."""

    status: Status
    token: int = 0
    """The token of the last claim; 0 in a row that plain SQL has put to ``processing``."""
    runs: tuple[int, ...] = ()
    """The tokens of the workers that execute the job under a lease."""
    zombies: tuple[int, ...] = ()
    """The tokens of the workers that have lost their lease and do not know it."""

    def new_token(self) -> int:
        """Return the least token that is not in use; tokens are used again so that the states stay finite."""
        used = {self.token, *self.runs, *self.zombies} if self.status == "running" else {*self.runs, *self.zombies}
        return min({1, 2, 3} - used)


ClaimStep = Literal["lock key", "look", "lock row", "unlock keys", "commit", "release"]


class Claim(NamedTuple):
    """The transaction of a claim, from the snapshot of its statement on."""

    step: ClaimStep
    """What it does next."""
    limits: tuple[int, ...]
    """The limit of each key in the statement's snapshot."""
    keys: tuple[int, ...]
    """The keys whose free slots are not determined yet."""
    candidates: tuple[int, ...]
    """The jobs pending and due in the statement's snapshot whose rows are still to be locked."""
    free: tuple[int, ...]
    """How many jobs of each key may be admitted."""
    key_locks: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    """The jobs whose rows it has locked."""
    looks_again: bool = False
    """Whether the worker claims again without waiting for a notification."""
    counted: tuple[int, ...] = ()
    """The running jobs of each key in the statement's snapshot, for the designs that use it."""
    heads: tuple[int, ...] = ()
    """The head of each key in the statement's snapshot, for the designs that use it."""
    seen: tuple[int, ...] = ()
    """Recorded for the invariants: the jobs that a fresh snapshot shows in the way, see ``claims.in_the_way``."""


class Change(NamedTuple):
    """A transaction that has changed a pending row and not committed yet."""

    step: Literal["cancel", "plain start"]
    job: int


class Idle(NamedTuple):
    """No transaction is in flight."""

    step: Literal["idle"] = "idle"


Transaction = Claim | Change | Idle


class Worker(NamedTuple):
    """A connection that runs one transaction after the other."""

    version: int
    """The limit in its configuration, or 0 if it reads the table."""
    awake: bool = True
    """Whether it will claim again without a further notification."""
    transaction: Transaction = Idle()


class State(NamedTuple):
    """The committed state of the database, and the transactions in flight."""

    jobs: tuple[Job, ...]
    limits: tuple[int, ...]
    counters: tuple[int, ...]
    """For the design with a stored counter: the slots of each key that are counted as taken."""
    workers: tuple[Worker, ...]

    def with_job(self, number: int, job: Job) -> State:
        """Return the state after a change of a committed row."""
        jobs = (*self.jobs[:number], job, *self.jobs[number + 1 :])
        return State(jobs, self.limits, self.counters, self.workers)

    def with_transaction(self, index: int, transaction: Transaction, *, awake: bool | None = None) -> State:
        """Return the state after a step of a worker's transaction."""
        worker = self.workers[index]
        worker = Worker(worker.version, worker.awake if awake is None else awake, transaction)
        workers = (*self.workers[:index], worker, *self.workers[index + 1 :])
        return State(self.jobs, self.limits, self.counters, workers)

    def with_counter(self, key: int, change: int) -> State:
        """Return the state after a change of the stored counter of a key; it does not fall below zero."""
        counters = list(self.counters)
        counters[key] = max(0, counters[key] + change)
        return self._replace(counters=tuple(counters))


def initial_state(model: Model) -> State:
    """Return the state in which every search begins."""
    scope = model.scope
    statuses: list[Status] = [STATUSES[letter] for letter in scope.initial or "p" * len(scope.keys)]
    jobs = [Job(status, 1, (1,)) if status == "running" else Job(status) for status in statuses]
    workers = [Worker(version) for version in scope.versions]
    counters = [0] * model.count_of_keys
    for job, key in zip(jobs, scope.keys, strict=True):
        counters[key] += model.design.counter and job.status == "running"
    return State(tuple(jobs), scope.limits[: model.count_of_keys], tuple(counters), tuple(workers))


def canonical(state: State) -> State:
    """Return the state with its workers sorted: those of one version differ in what they do only."""
    return State(state.jobs, state.limits, state.counters, tuple(sorted(state.workers)))


def jobs_of(model: Model, key: int) -> list[int]:
    return [number for number, own in enumerate(model.scope.keys) if own == key]


def running(model: Model, state: State, key: int) -> list[int]:
    """Return the running jobs of a key by a fresh snapshot."""
    return [number for number in jobs_of(model, key) if state.jobs[number].status == "running"]


def head(model: Model, state: State, key: int) -> int:
    """Return the job of an ordered key that may run by a fresh snapshot, or -1."""
    passed_over = {"finished", "delayed"} if model.design.head == "first due" else {"finished"}
    return next((number for number in jobs_of(model, key) if state.jobs[number].status not in passed_over), -1)


def key_is_locked(state: State, key: int) -> bool:
    return any(isinstance(one := worker.transaction, Claim) and key in one.key_locks for worker in state.workers)


def row_is_locked(state: State, job: int) -> bool:
    """Whether a transaction in flight holds the lock on a row; in PostgreSQL it ends when the changes get visible."""
    for worker in state.workers:
        transaction = worker.transaction
        if isinstance(transaction, Claim):
            if job in transaction.rows:
                return True
        elif isinstance(transaction, Change) and transaction.job == job:
            return True
    return False


def is_quiet(state: State) -> bool:
    return all(isinstance(worker.transaction, Idle) for worker in state.workers)


# -- the steps of a claim ------------------------------------------------------------------------------------------


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


# -- the operations beside the claim -------------------------------------------------------------------------------
CHANGES_OF_PENDING_ROWS: Final = ("cancel", "plain start")
SETTLES: Final[dict[Operation, Status]] = {"complete": "finished", "retry": "pending", "retry later": "delayed"}
"""The operations of the workers, and the status that each gives the job."""


class Action(NamedTuple):
    """One atomic step."""

    name: str
    worker: int = -1
    """The index of the worker whose transaction it is a part of."""
    job: int = -1
    key: int = -1
    value: int = 0
    """The token of the worker that settles, or the new limit."""


def successors(model: Model, state: State) -> Iterator[tuple[Action, State]]:
    """Yield every step that is possible in a state, with the state after it."""
    for index in range(len(state.workers)):
        yield from _steps_of_worker(model, state, index)
    for number, job in enumerate(state.jobs):
        yield from _changes_of_job(model, state, number, job)
    for key in range(model.count_of_keys):
        yield from _changes_of_key(model, state, key)


def _steps_of_worker(model: Model, state: State, index: int) -> Iterator[tuple[Action, State]]:
    transaction = state.workers[index].transaction
    operations = model.scope.operations
    if isinstance(transaction, Idle):
        yield Action("start claim", index), start(model, state, index)
        for name in CHANGES_OF_PENDING_ROWS:
            if name in operations:
                for number, job in enumerate(state.jobs):
                    if job.status == "pending" and not row_is_locked(state, number):
                        yield Action(name, index, number), state.with_transaction(index, Change(name, number))
        return
    if isinstance(transaction, Claim):
        yield _action_of(model, transaction, index), advance(model, state, index, transaction)
    else:
        yield (
            Action(f"commit {transaction.step}", index, transaction.job),
            _commit_change(model, state, index, transaction),
        )
    if "roll back" in operations and transaction.step != "release":
        # The error reaches the worker, which claims again.
        yield Action("roll back", index), state.with_transaction(index, Idle(), awake=True)


def _action_of(model: Model, claim: Claim, index: int) -> Action:
    if claim.step in {"lock key", "look"}:
        return Action(claim.step, index, key=claim.keys[0])
    if claim.step == "lock row":
        return Action(claim.step, index, next_row(model, claim))
    return Action(claim.step, index)


def _commit_change(model: Model, state: State, index: int, change: Change) -> State:
    """Make the change of a pending row visible."""
    job = state.jobs[change.job]
    job = job._replace(status="finished") if change.step == "cancel" else job._replace(status="running", token=0)
    state = state.with_transaction(index, Idle()).with_job(change.job, job)
    return _notify(model, state, "cancel") if change.step == "cancel" else state


def _changes_of_job(model: Model, state: State, number: int, job: Job) -> Iterator[tuple[Action, State]]:
    if row_is_locked(state, number):
        # These statements wait for the lock and then see the newest version.
        return
    operations = model.scope.operations
    for name in SETTLES:
        if name in operations:
            for token in job.runs + job.zombies:
                yield Action(name, job=number, value=token), _settle(model, state, number, token, name)
    # The bound on zombies keeps the states finite.
    if "rescue" in operations and job.status == "running" and not job.zombies:
        rescued = state.with_job(number, Job("pending", zombies=job.runs))
        yield Action("rescue", job=number), _notify(model, rescued, "rescue")
    if "fall due" in operations and job.status == "delayed":
        # The workers have a timer for the next job that falls due.
        yield (
            Action("fall due", job=number),
            _notify(model, state.with_job(number, job._replace(status="pending")), "fall due"),
        )
    if "requeue" in operations and job.status == "finished":
        key = model.scope.keys[number]
        if not (model.design.requeue_locks_key and key_is_locked(state, key)):
            requeued = state.with_job(number, job._replace(status="pending"))
            yield Action("requeue", job=number), _notify(model, requeued, "requeue")


def _settle(model: Model, state: State, number: int, token: int, name: Operation) -> State:
    """Settle a job by the worker with a token; the worker is done with it, whether the row still has that token."""
    job = state.jobs[number]
    runs, zombies = _others(job.runs, token), _others(job.zombies, token)
    if job.status != "running" or (model.design.fenced and job.token != token):
        return state.with_job(number, job._replace(runs=runs, zombies=zombies))
    state = state.with_job(number, Job(SETTLES[name], 0, runs, zombies))
    if model.design.counter:
        state = state.with_counter(model.scope.keys[number], -1)
    return _notify(model, state, name)


def _others(tokens: tuple[int, ...], token: int) -> tuple[int, ...]:
    return tuple(one for one in tokens if one != token)


def _changes_of_key(model: Model, state: State, key: int) -> Iterator[tuple[Action, State]]:
    if "change limit" in model.scope.operations:
        for value in model.scope.limit_values:
            if value != state.limits[key]:
                limits = (*state.limits[:key], value, *state.limits[key + 1 :])
                action = Action("change limit", key=key, value=value)
                yield action, _notify(model, state._replace(limits=limits), "change limit")
    if "time out" in model.scope.operations and state.counters[key]:
        yield Action("time out", key=key), state.with_counter(key, -state.counters[key])


def _notify(model: Model, state: State, operation: Operation) -> State:
    """Wake all workers, as the operation may have made a job claimable; they receive it when it is visible."""
    if not model.scope.wakeups or operation in model.design.silent:
        return state
    return state._replace(workers=tuple(worker._replace(awake=True) for worker in state.workers))
