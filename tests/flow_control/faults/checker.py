"""What must hold, as rules on the audit of a round. Pure, no I/O.

A rule reports only what the audit proves. So it compares by snapshots where it can, and an exception that the
documentation makes is an exception here:

* The limit in force for a claim is the one that its statement saw. Jobs that began without a limit count once their
  claim is seen.
* An earlier job holds a later one back if it did so at the beginning of the claim's statement, at the end of its
  transaction, and all the time between: one that is requeued or committed in between may come too late.
* A rate is checked from the beginning of one claim's statement to the admission of the last job of another one: the
  tolerance is the duration of the first statement.
* A turn may be lost if a fault or another transaction held the jobs of a key, which gives the tolerance of ``turns``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from typing import Any

from tests.flow_control.faults import held_checker
from tests.flow_control.faults.transactions import Audit, Change, Run

Violations = Iterator[str]

_LONG = 5.0
"""Seconds after which each snapshot shows a commit."""

_HOLDING = {"lock", "claim"}
"""The actions of operators that hold jobs and then let them wait again."""

_CLOCK = 0.001
"""Seconds by which the clocks of a worker and of the server may differ, on one machine."""


def limits(audit: Audit) -> Violations:
    """No claim begins a job of a key whose running jobs have reached the limit."""
    for kind in audit.configuration.limits:
        yield from _too_many(audit, kind, lambda change, kind=kind: audit.limit(kind, change))


def one_of_a_key(audit: Audit) -> Violations:
    """No two jobs of an ordered key run at once."""
    if audit.configuration.order is not None:
        yield from _too_many(audit, "order", lambda change: (change.document, 1))


def _too_many(audit: Audit, name: str, limit_of: Callable[[Change], tuple[Any, int | None]]) -> Violations:
    by_key: dict[Any, list[tuple[Run, int | None]]] = defaultdict(list)
    for run in sorted(audit.runs, key=lambda run: (run.begin.commit.at, run.begin.seq)):
        key, limit = limit_of(run.begin)
        if key is not None:
            by_key[key].append((run, limit))
    for key, runs in by_key.items():
        active: list[tuple[Run, int | None]] = []
        for _, several in groupby(runs, lambda each: each[0].begin.xid):
            # The order in which one claim admits jobs is not recorded. If any order is allowed, this one is.
            group = sorted(several, key=lambda each: float("inf") if each[1] is None else each[1])
            last = group[-1][0].begin
            active = [each for each in active if each[0].end is None or each[0].end.commit.at > last.commit.at - _LONG]
            before = [run for run, most in active if _runs_beside(run, most, last)]
            for number, (run, limit) in enumerate(group, len(before) + 1):
                if limit is not None and number > limit:
                    others = ", ".join(f"{other.begin.job} of {other.begin.xid}" for other in before)
                    yield f"{name} {key}: {run.begin} is number {number} of {limit}; running: {others}"
            active += group


def _runs_beside(run: Run, limit: int | None, claim: Change) -> bool:
    if run.end is not None and claim.sees(run.end, at_commit=True):
        return False
    return limit is not None or claim.sees(run.begin)


def order(audit: Audit) -> Violations:
    """No job of an ordered key begins while an earlier one is unfinished."""
    if audit.configuration.order is None:
        return
    for claim in audit.begins:
        for changes in audit.before(claim.job, claim.document):
            states = _states_during(changes, claim)
            if states and all(_holds_back(audit, state, claim) for state in states):
                yield f"order {claim.document}: {claim} began behind {states[-1]}"


def _states_during(changes: Sequence[Change], claim: Change) -> list[Change]:
    """Return the states of a job that a claim could have seen: at its beginning first, at its commit last."""
    found: list[Change] = []
    for change in reversed(changes):
        if claim.sees(change, at_commit=True):
            found.insert(0, change)
            if claim.sees(change):
                return found
    return []  # it did not exist yet


def _holds_back(audit: Audit, state: Change, claim: Change) -> bool:
    match state.new:
        case "processing":
            return True
        case "failed":
            return audit.configuration.order == "block"
        case "pending":
            return state.begun or state.due <= claim.began
    return False


def cancelled_behind(audit: Audit) -> Violations:
    """A job that waits behind a failed one is cancelled in the same transaction, where the order says so."""
    if audit.configuration.order != "cancel":
        return
    for failed, changes in audit.behind_failed():
        seen = [change for change in changes if failed.sees(change)]
        following = changes[len(seen)] if len(seen) < len(changes) else None
        if seen and seen[-1].new == "pending" and following is not None and following.begins:
            yield f"order {failed.document}: {following} was not cancelled by {failed}"


def rates(audit: Audit) -> Violations:
    """In no window begin more jobs of a key than the rate allows."""
    for most, every, per, burst in audit.configuration.rates:
        by_key: dict[Any, list[Change]] = defaultdict(list)
        for change in audit.begins:
            if per is None or change.customer is not None:
                by_key[change.customer if per else 0].append(change)
        for key, changes in by_key.items():
            claims = [list(group) for _, group in groupby(changes, lambda change: change.xid)]
            for first in range(len(claims)):
                number = 0
                for claim in claims[first:]:
                    number += len(claim)
                    seconds = claim[-1].at - claims[first][0].began
                    allowed = burst + seconds * most / every
                    if number > allowed + 0.01:
                        yield f"rate {key}: {number} of {allowed:.2f} began from {claims[first][0]} to {claim[-1]}"
                        break


def throttled(audit: Audit) -> Violations:
    """No job of a key begins before the time until which a handler has held the key back."""
    for most, every, per, _ in audit.configuration.rates:
        name = f"{per or ''}/{every:g}s"
        by_key: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        for row, commit in audit.rate_changes:
            values = row.after or row.before
            if values["rate"] == name:
                by_key[values["key"]].append((row, commit))
        for claim in audit.begins:
            key = 0 if per is None else audit.hashes.get(claim.customer)
            seen = [row for row, _ in by_key[key] if claim.seen.shows(row.xid)] if key is not None else []
            last = (seen[-1].after or {}).get("throttled_until") if seen else None
            if last is not None and claim.at < datetime.fromisoformat(last).timestamp() - 1e-5:
                later = [row.after and row.after["throttled_until"] for row, _ in by_key[key] if row.seq > seen[-1].seq]
                yield f"rate {name} of {most}: {claim} began before {last}, which was then changed to {later[:1]}"


def turns(audit: Audit) -> Violations:
    """While jobs of a key wait, one process gives no other key more than its turn, and another one for each fault."""
    config = audit.configuration
    # Only where nothing else holds the jobs of one customer back, so that each job that is due could begin.
    if config.fair is None or config.order or config.rates or set(config.limits) - {"queue"}:
        return
    faults = sum(record.event == "fault" or record.details.get("kind") in _HOLDING for record in audit.handlers)
    bound = config.fair * (2 + faults) + 1
    waiting: dict[Any, list[list[Change]]] = defaultdict(list)
    for changes in audit.by_job.values():
        waiting[changes[0].customer, changes[0].priority].append(changes)
    for begun in _of_workers(audit.begins).values():
        taken: dict[Any, Counter[Any]] = defaultdict(Counter)
        for _, several in groupby(begun, lambda change: change.xid):
            group = [change for change in several if change.before["lease_token"] is None]
            keys = {(change.customer, change.priority) for change in group}
            for key, jobs in waiting.items():
                if not group or key in keys or not any(_waits(changes, group[-1]) for changes in jobs):
                    taken.pop(key, None)
                    continue
                taken[key].update(change.customer for change in group if change.priority == key[1])
                customer, number = max(taken[key].items(), key=lambda each: each[1], default=(None, 0))
                if number > bound:
                    yield f"turns: {number} jobs of {customer} began in one process while {key} waited: {group[-1]}"
                    taken.pop(key)


def _waits(changes: Sequence[Change], claim: Change) -> bool:
    """Return whether a job was due from the beginning of a claim to its end, and nothing touched it until then."""
    seen = [change for change in changes if claim.sees(change)]
    if not seen or seen[-1].new != "pending" or seen[-1].after["lease_token"] or seen[-1].due > claim.began:
        return False
    return len(seen) == len(changes) or changes[len(seen)].at > claim.commit.at


def _of_workers(changes: Sequence[Change]) -> Mapping[str, list[Change]]:
    found: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        if change.origin.startswith("worker"):
            found[change.origin].append(change)
    return found


def nothing_is_lost(audit: Audit) -> Violations:
    """The rows are those that the changes have left."""
    final = {row.id: row.status for row in audit.rows["job"]}
    for job, changes in audit.by_job.items():
        if final.pop(job, None) != changes[-1].new:
            yield f"job {job} is not what its last change has left: {changes[-1]}"
        for before, after in pairwise(changes):
            if before.new != after.old:
                yield f"job {job} was changed without a record: {before}, then {after}"
    for job in final:
        yield f"job {job} has a row and was never enqueued"


def one_run_of_a_lease(audit: Audit) -> Violations:
    """A lease has one run."""
    for (job, token), number in Counter((run.begin.job, run.begin.token) for run in audit.runs).items():
        if number > 1:
            yield f"job {job} began {number} times under the token {token}"
    for change in audit.changes:
        if change.old == change.new == "processing" and change.before["lease_token"] != change.after["lease_token"]:
            yield f"job {change.job} was claimed while it was running: {change}"


def handlers(audit: Audit) -> Violations:
    """A handler is called once for a lease, after its claim; the job is completed after it has returned, and once."""
    calls: dict[Any, list[Any]] = defaultdict(list)
    for record in audit.handlers:
        if record.event in {"start", "end"}:
            calls[record.key, record.details["token"]].append(record)
    effects = Counter((row.job, row.token) for row in audit.rows["effect"])
    for run in audit.runs:
        mine = run.begin.job, run.begin.token
        records, end = calls.pop(mine, []), run.end
        if sum(record.event == "start" for record in records) > 1:
            yield f"the handler was called twice for one lease of job {mine[0]}"
        if records and records[0].details["at"] < run.begin.at - _CLOCK:
            yield f"the handler of job {mine[0]} was called before its claim: {run.begin}"
        # What an operator completes has no handler.
        completed = end is not None and end.new == "completed" and end.origin.startswith("worker")
        if effects[mine] != completed:
            yield f"job {mine[0]} has {effects[mine]} effects of the run that ended by {end}"
        if end is not None and completed:
            returned = [record.details["at"] <= end.at + _CLOCK for record in records if record.event == "end"]
            if not any(returned):
                yield f"job {mine[0]} was completed before its handler had returned: {end}"
    for job, _ in calls:
        yield f"the handler was called for job {job} without a claim that was committed"


RULES: Sequence[Callable[[Audit], Violations]] = (
    limits,
    one_of_a_key,
    order,
    cancelled_behind,
    rates,
    throttled,
    turns,
    nothing_is_lost,
    one_run_of_a_lease,
    handlers,
)


def violations(audit: Audit) -> dict[str, list[str]]:
    """Return the violations of each rule by its name; empty if all hold."""
    rules = RULES if audit.configuration.strategy == "update_status" else held_checker.RULES
    found = {rule.__name__: list(rule(audit)) for rule in rules}
    return {name: texts for name, texts in found.items() if texts}
