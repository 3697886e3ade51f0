"""What must hold: for every step, and in every state.

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

from __future__ import annotations

from tests.flow_control.model.changes import SETTLES, Action
from tests.flow_control.model.claims import admitted, advance, is_plain, start
from tests.flow_control.model.design import Model
from tests.flow_control.model.state import Claim, Idle, State, is_quiet, jobs_of, running


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
    """Return what is wrong with a state, or an empty string."""
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
