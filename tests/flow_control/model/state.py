"""A state of the model: the committed rows, and what each worker's transaction has done so far.

All parts are tuples, so that a state can be hashed and the workers can be sorted. Who holds a lock is not a part of its
own: it follows from the transactions in flight.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tests.flow_control.model.design import Model

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
    """Return the jobs of a key, by their numbers."""
    return [number for number, own in enumerate(model.scope.keys) if own == key]


def running(model: Model, state: State, key: int) -> list[int]:
    """Return the running jobs of a key by a fresh snapshot."""
    return [number for number in jobs_of(model, key) if state.jobs[number].status == "running"]


def head(model: Model, state: State, key: int) -> int:
    """Return the job of an ordered key that may run by a fresh snapshot, or -1."""
    passed_over = {"finished", "delayed"} if model.design.head == "first due" else {"finished"}
    return next((number for number in jobs_of(model, key) if state.jobs[number].status not in passed_over), -1)


def key_is_locked(state: State, key: int) -> bool:
    """Whether a transaction holds the advisory lock of a key."""
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
    """Whether no transaction is in flight."""
    return all(isinstance(worker.transaction, Idle) for worker in state.workers)
