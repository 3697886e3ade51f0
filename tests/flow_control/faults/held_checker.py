"""What must hold under strategies whose transaction holds the jobs, as rules on the audit of a round. Pure, no I/O.

A slot belongs to a transaction, from the moment when ``hold()`` has admitted a job until snapshots show that the
transaction has ended. So what runs beside a job is exact, whatever has ended the others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from tests.flow_control.faults.transactions import Audit, Change, Hold, Mark

Violations = Iterator[str]

_COMMITTING = 0.05
"""Seconds between the record of a commit and its end, at most; only a rule with a tolerance of its own uses it."""

_HOLDING = {"lock", "claim"}
"""The actions of operators that hold jobs and then let them wait again."""


def slots(audit: Audit) -> Violations:
    """No claim admits a job of a key when as many transactions hold the key as its limit says; an order has one."""
    holders: dict[Any, list[tuple[Hold, int]]] = defaultdict(list)
    known: set[Any] = set()
    for hold in sorted(audit.holds, key=lambda hold: hold.at):
        for key, most in hold.slots:
            if (key, hold.xid) in known:
                continue  # a slot of the transaction serves all of its jobs
            known.add((key, hold.xid))
            beside = [(other, its) for other, its in holders[key] if not hold.after.shows(other.xid)]
            holders[key] = [*beside, (hold, most)]
            # One that was admitted meanwhile may have come second, with a larger limit of its own.
            before = sum(other.at < hold.started for other, _ in beside)
            if before + 1 > most or len(holders[key]) > max(its for _, its in holders[key]):
                others = ", ".join(f"{other.job} of {other.xid}" for other, _ in beside)
                yield f"{key}: {hold} has a limit of {most}; {before} were admitted before; held by: {others}"


def running(audit: Audit) -> Violations:
    """The same by the marks of the handlers, where the limit does not change; and no job runs twice at once."""
    config = audit.configuration
    kinds: dict[str, tuple[int, Callable[[Change], Any]]] = {
        "number": (config.most, lambda job: job.customer),
        "queue": (config.most_of_queue, lambda _: "all"),
        "pair": (config.most, lambda job: None if job.customer is None else (job.customer, job.kind)),
    }
    wanted = {kind: kinds[kind] for kind in config.limits if kind in kinds}
    wanted["job"] = (1, lambda job: job.job)
    if config.order is not None:
        wanted["order"] = (1, lambda job: job.document)
    for kind, (most, key_of) in wanted.items():
        running: dict[Any, dict[int, Mark]] = defaultdict(dict)
        for mark in audit.marks:
            key = key_of(audit.by_job[mark.job][0])
            if key is None or mark.seen.shows(mark.xid):
                continue  # its transaction had ended, so that it held nothing any more
            beside = {xid: other for xid, other in running[key].items() if not mark.seen.shows(xid)}
            running[key] = beside | {mark.xid: mark}
            if len(running[key]) > most:
                yield f"{kind} {key}: {mark} runs beside {', '.join(map(str, beside.values()))}"


def admitted(audit: Audit) -> Violations:
    """Each job that runs was admitted by its transaction."""
    if not audit.configuration.limits and audit.configuration.order is None:
        return
    holds = {(hold.xid, hold.job) for hold in audit.holds}
    for mark in audit.marks:
        if (mark.xid, mark.job) not in holds:
            yield f"{mark} runs and was not admitted"


def order(audit: Audit) -> Violations:
    """No job of an ordered key is admitted while an earlier one is unfinished."""
    if audit.configuration.order is None:
        return
    for hold in audit.holds:
        document = audit.by_job[hold.job][0].document if hold.job in audit.by_job else None
        for changes in audit.before(hold.job, document):
            states = _states_during(changes, hold)
            if states and all(_holds_back(audit, state, hold) for state in states):
                yield f"order {document}: {hold} was admitted behind {states[-1]}"


def _states_during(changes: Sequence[Change], hold: Hold) -> list[Change]:
    """Return the states of a job that the function could have seen: at its beginning first, at its end last."""
    found: list[Change] = []
    for change in reversed(changes):
        if hold.after.shows(change.xid) and change.xid != hold.xid:
            found.insert(0, change)
            if hold.before.shows(change.xid):
                return found
    return []  # it did not exist yet


def _holds_back(audit: Audit, state: Change, hold: Hold) -> bool:
    match state.new:
        case "failed":
            return audit.configuration.order == "block"
        case "pending":
            return state.begun or state.due <= hold.began
    return False


def cancelled_behind(audit: Audit) -> Violations:
    """A job that waits behind a failed one is cancelled in the same transaction, where the order says so."""
    if audit.configuration.order != "cancel":
        return
    for failed, changes in audit.behind_failed():
        before = [change for change in changes if failed.sees(change)]
        after = [change for change in changes if change.xid == failed.xid or failed.commit.seen.shows(change.xid)]
        if before and before[-1].new == "pending" and after[-1] is before[-1]:
            yield f"order {failed.document}: {before[-1]} was not cancelled by {failed}"


class _Reservation:
    """A change of a rate's row: between ``least`` and ``most`` jobs may begin."""

    def __init__(self, row: Any, interval: float) -> None:
        before, after = row.before or {}, row.after or {}
        self.row, self.key, self.origin = row, (row.after or row.before)["key"], row.origin
        new, old = _time(after.get("next_at")), _time(before.get("next_at"))
        self.least = self.most = 0
        if new is not None and new != old:
            # The clock was read between the beginning of the statement and the record.
            self.least = max(0, math.ceil((new - max(old or 0, row.at)) / interval - 0.01))
            self.most = max(0, math.floor((new - max(old or 0, row.began)) / interval + 0.01))
        held_back = _time(before.get("throttled_until"))
        self.held_back = self.least > 0 and held_back is not None and held_back > row.at + 1e-5


def _time(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()


def rates(audit: Audit) -> Violations:
    """No more beginnings of a key are reserved in a window than the rate allows, and none while it is held back."""
    for number, (most, every, _, burst) in enumerate(audit.configuration.rates):
        by_key: dict[Any, list[_Reservation]] = defaultdict(list)
        for each in _reservations(audit, number):
            if each.held_back:
                yield f"rate {each.key}: a beginning was reserved by {each.origin} while it was held back: {each.row}"
            if each.least:
                by_key[each.key].append(each)
        for key, several in by_key.items():
            for first, begin in enumerate(several):
                taken = 0
                for end in several[first:]:
                    taken += end.least
                    allowed = burst + (end.row.at - begin.row.began) * most / every
                    if taken > allowed + 0.01:
                        yield f"rate {key}: {taken} of {allowed:.2f} from {begin.row.at:.4f} to {end.row.at:.4f}"
                        break


def _reservations(audit: Audit, number: int) -> list[_Reservation]:
    most, every, per, _ = audit.configuration.rates[number]
    name = f"{per or ''}/{every:g}s"
    rows = [row for row, _ in audit.rate_changes if (row.after or row.before)["rate"] == name]
    return [_Reservation(row, every / most) for row in rows]


def reserved(audit: Audit) -> Violations:
    """Each beginning was reserved before, in the same process."""
    for number, (_, _, per, _) in enumerate(audit.configuration.rates):
        events: list[tuple[float, str, int, int, Any]] = [
            (each.row.at, each.origin, each.key, each.most, None) for each in _reservations(audit, number)
        ]
        for mark in audit.marks:
            customer = audit.by_job[mark.job][0].customer
            if mark.origin.startswith("worker") and (per is None or customer is not None):
                events.append((mark.at, mark.origin, audit.hashes[customer] if per else 0, -1, mark))
        left: Counter[tuple[str, int]] = Counter()
        for _, origin, key, taken, mark in sorted(events, key=lambda event: event[0]):
            left[origin, key] += taken
            if mark is not None and left[origin, key] < 0:
                yield f"rate {key}: {mark} began without a reservation"


def turns(audit: Audit) -> Violations:
    """While jobs of a key wait, one process gives no other key more than its turn, and another one for each fault."""
    config = audit.configuration
    if config.fair is None or config.order or config.rates or set(config.limits) - {"queue"}:
        return
    faults = sum(record.event == "fault" or record.details.get("kind") in _HOLDING for record in audit.handlers)
    bound = config.fair * (2 + faults) + 1
    first: dict[int, Mark] = {}
    for mark in audit.marks:
        first.setdefault(mark.job, mark)
    waiting: dict[Any, list[list[Change]]] = defaultdict(list)
    for changes in audit.by_job.values():
        waiting[changes[0].customer, changes[0].priority].append(changes)
    begun: dict[tuple[str, int], list[Mark]] = defaultdict(list)
    for mark in audit.marks:
        if mark.origin.startswith("worker") and first[mark.job] is mark:
            begun[mark.origin, mark.xid].append(mark)
    taken: dict[tuple[str, Any], Counter[Any]] = defaultdict(Counter)
    for (origin, _), group in begun.items():
        claimed = [audit.by_job[mark.job][0] for mark in group]
        keys = {(job.customer, job.priority) for job in claimed}
        for key, jobs in waiting.items():
            if key in keys or not any(_waits(changes, first.get(changes[0].job), group[-1]) for changes in jobs):
                taken.pop((origin, key), None)
                continue
            taken[origin, key].update(job.customer for job in claimed if job.priority == key[1])
            customer, number = max(taken[origin, key].items(), key=lambda each: each[1], default=(None, 0))
            if number > bound:
                yield f"turns: {number} jobs of {customer} began in {origin} while {key} waited: {group[-1]}"
                taken.pop((origin, key))


def _waits(changes: Sequence[Change], begun: Mark | None, claim: Mark) -> bool:
    """Return whether a job was due before a claim began, and no transaction had it until after the claim."""
    seen = [change for change in changes if change.commit.at < claim.began - _COMMITTING]
    if len(seen) < len(changes) and changes[len(seen)].at <= claim.at:
        return False
    free = begun is None or begun.began > claim.at
    return bool(seen) and free and seen[-1].new == "pending" and seen[-1].due <= claim.began


def nothing_is_lost(audit: Audit) -> Violations:
    """The rows are those that the changes have left, and a worker ends a job by one effect of its handler, or none."""
    final = {row.id: getattr(row, "status", "pending") for row in audit.rows["job"]}
    effects = Counter((row.job, row.xid) for row in audit.rows["effect"])
    buried = {(row.after["key"][0], row.xid) for row in audit.rows["letter_change"] if row.after is not None}
    for job, changes in audit.by_job.items():
        if final.pop(job, None) != changes[-1].new:
            yield f"job {job} is not what its last change has left: {changes[-1]}"
        for before, after in pairwise(changes):
            if before.new != after.old:
                yield f"job {job} was changed without a record: {before}, then {after}"
        last = {change.xid: change for change in changes}
        for xid, change in last.items():
            mine, worker = effects.pop((job, xid), 0), change.origin.startswith("worker")
            completed = change.new == "completed" or (change.new is None and (job, xid) not in buried)
            if mine != (worker and completed):
                yield f"job {job} has {mine} effects of the transaction of {change}"
    for job in final:
        yield f"job {job} has a row and was never enqueued"
    for job, xid in effects:
        yield f"job {job} has effects of the transaction {xid}, which has not ended it"


RULES: Sequence[Callable[[Audit], Violations]] = (
    slots,
    running,
    admitted,
    order,
    cancelled_behind,
    rates,
    reserved,
    turns,
    nothing_is_lost,
)
