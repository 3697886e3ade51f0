"""The operations beside the claim: each is a transaction of one statement.

A change of a row that is not pending is one step, as its lock is not observable: no claim can admit such a job, whether
it finds the row locked or not, and other changes wait for the lock. Cancelling a pending job takes two steps, because a
claim skips the row in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.flow_control.model.claims import advance, next_row, start
from tests.flow_control.model.design import Model, Operation
from tests.flow_control.model.state import Change, Claim, Idle, Job, State, Status, key_is_locked, row_is_locked

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
        yield Action(f"commit {transaction.step}", index, transaction.job), _commit(model, state, index, transaction)
    if "roll back" in operations and transaction.step != "release":
        # The error reaches the worker, which claims again.
        yield Action("roll back", index), state.with_transaction(index, Idle(), awake=True)


def _action_of(model: Model, claim: Claim, index: int) -> Action:
    if claim.step in {"lock key", "look"}:
        return Action(claim.step, index, key=claim.keys[0])
    if claim.step == "lock row":
        return Action(claim.step, index, next_row(model, claim))
    return Action(claim.step, index)


def _commit(model: Model, state: State, index: int, change: Change) -> State:
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
    runs, zombies = _without(job.runs, token), _without(job.zombies, token)
    if job.status != "running" or (model.design.fenced and job.token != token):
        return state.with_job(number, job._replace(runs=runs, zombies=zombies))
    state = state.with_job(number, Job(SETTLES[name], 0, runs, zombies))
    if model.design.counter:
        state = state.with_counter(model.scope.keys[number], -1)
    return _notify(model, state, name)


def _without(tokens: tuple[int, ...], token: int) -> tuple[int, ...]:
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
