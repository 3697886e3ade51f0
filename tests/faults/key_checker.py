"""What must hold of the keys of flow control, as rules on the audit of a round. Pure, no I/O.

A rule reports only what the audit proves. So it compares by snapshots where it can, and an exception that the
documentation makes is an exception here:

* The limit in force for a claim is the one that its statement saw. Jobs that began without a limit count once their
  claim is seen.
* An earlier job holds a later one back if it did so at the beginning of the claim's statement, at the end of its
  transaction, and all the time between: one that is requeued or committed in between may come too late.
* A rate is checked from the beginning of one claim's statement to the admission of the last job of another one: the
  tolerance is the duration of the first statement.
* A turn may be lost if a fault or another transaction held the jobs of a key, which gives the tolerance of ``turns``.

Under strategies whose transaction holds the jobs, a slot belongs to a transaction, from the moment when ``hold()`` has
admitted a job until snapshots show that the transaction has ended. So what runs beside a job is exact, whatever has
ended the others.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from tests.faults.history import Record, Violations, violations_of
from tests.faults.key_history import Audit, Change, Hold, Mark, Run

_LONG = 5.0
"""Seconds after which each snapshot shows a commit."""

_COMMITTING = 0.05
"""Seconds between the record of a commit and its end, at most; only a rule with a tolerance of its own uses it."""

_HOLDING = {"lock", "claim"}
"""The actions of operators that hold jobs and then let them wait again."""

_CLOCK = 0.001
"""Seconds by which the clocks of a worker and of the server may differ, on one machine."""


# -- what rules of both kinds of strategies share ----------------------------------------------------------------------


def _states_during(
    changes: Sequence[Change], began: Callable[[Change], bool], ended: Callable[[Change], bool]
) -> list[Change]:
    """Return the states of a job that a claim could have seen: at its beginning first, at its end last.

    :param began: whether the claim saw a change at its beginning.
    :param ended: whether it saw it at its end.
    """
    found: list[Change] = []
    for change in reversed(changes):
        if ended(change):
            found.insert(0, change)
            if began(change):
                return found
    return []  # it did not exist yet


def _holds_back(audit: Audit, state: Change, began: float) -> bool:
    """Return whether a job in this state held back those behind it when a claim began."""
    match state.new:
        case "processing":
            return True
        case "failed":
            return audit.configuration.order == "block"
        case "pending":
            return state.begun or state.due <= began
    return False


def _behind(
    audit: Audit, claim: Any, job: int, document: int | None, began: Callable[[Change], bool], ended: Any
) -> Violations:
    for changes in audit.before(job, document):
        states = _states_during(changes, began, ended)
        if states and all(_holds_back(audit, state, claim.began) for state in states):
            yield f"order {document}: {claim} began behind {states[-1]}"


class _Turn(NamedTuple):
    """A claim of a worker."""

    worker: str
    jobs: list[Change]
    """A change of each job that it has begun."""
    waits: Callable[[list[Change]], bool]
    """Whether a job with these changes waited all the time of the claim."""
    claim: Any


def _unfair(audit: Audit, claims: Iterable[_Turn]) -> Violations:
    config = audit.configuration
    # Only where nothing else holds the jobs of one customer back, so that each job that is due could begin.
    if config.fair is None or config.order or config.rates or set(config.limits) - {"queue"}:
        return
    faults = sum(record.event == "fault" or record.details.get("kind") in _HOLDING for record in audit.handlers)
    bound = config.fair * (2 + faults) + 1
    waiting: dict[Any, list[list[Change]]] = defaultdict(list)
    for changes in audit.by_job.values():
        waiting[changes[0].customer, changes[0].priority].append(changes)
    taken: dict[Any, Counter[Any]] = defaultdict(Counter)
    for worker, begun, waits, claim in claims:
        keys = {(job.customer, job.priority) for job in begun}
        for key, jobs in waiting.items():
            if not begun or key in keys or not any(map(waits, jobs)):
                taken.pop((worker, key), None)
                continue
            taken[worker, key].update(job.customer for job in begun if job.priority == key[1])
            customer, number = max(taken[worker, key].items(), key=lambda each: each[1], default=(None, 0))
            if number > bound:
                yield f"turns: {number} jobs of {customer} began in {worker} while {key} waited: {claim}"
                taken.pop((worker, key))


def _of_rate(audit: Audit, number: int) -> list[tuple[Any, Any]]:
    """Return the changes of the rows of a rate."""
    _, every, per, _ = audit.configuration.rates[number]
    name = f"{per or ''}/{every:g}s"
    return [(row, commit) for row, commit in audit.rate_changes if (row.after or row.before)["rate"] == name]


def _unrecorded(audit: Audit) -> Violations:
    """The rows are those that the changes have left."""
    final = {row.id: getattr(row, "status", "pending") for row in audit.rows["job"]}
    for job, changes in audit.by_job.items():
        if final.pop(job, None) != changes[-1].new:
            yield f"job {job} is not what its last change has left: {changes[-1]}"
        for before, after in pairwise(changes):
            if before.new != after.old:
                yield f"job {job} was changed without a record: {before}, then {after}"
    for job in final:
        yield f"job {job} has a row and was never enqueued"


# -- strategies with leases --------------------------------------------------------------------------------------------


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
        at_end = partial(claim.sees, at_commit=True)
        yield from _behind(audit, claim, claim.job, claim.document, claim.sees, at_end)


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
    for number, (_, _, per, _) in enumerate(audit.configuration.rates):
        by_key: dict[int, list[Any]] = defaultdict(list)
        for row, _ in _of_rate(audit, number):
            by_key[(row.after or row.before)["key"]].append(row)
        for claim in audit.begins:
            key = 0 if per is None else audit.hashes.get(claim.customer)
            seen = [row for row in by_key[key] if claim.seen.shows(row.xid)] if key is not None else []
            last = (seen[-1].after or {}).get("throttled_until") if seen else None
            if last is not None and claim.at < datetime.fromisoformat(last).timestamp() - 1e-5:
                later = [row.after and row.after["throttled_until"] for row in by_key[key] if row.seq > seen[-1].seq]
                yield f"rate {number} of {key}: {claim} began before {last}, which was then changed to {later[:1]}"


def turns(audit: Audit) -> Violations:
    """While jobs of a key wait, one process gives no other key more than its turn, and another one for each fault."""
    yield from _unfair(audit, _claims(audit))


def _claims(audit: Audit) -> Iterator[_Turn]:
    begun = [change for change in audit.begins if change.origin.startswith("worker")]
    for (worker, _), several in groupby(sorted(begun, key=lambda change: change.origin), _worker_and_claim):
        group = [change for change in several if change.before["lease_token"] is None]
        yield _Turn(worker, group, lambda changes, group=group: _waits(changes, group[-1]), group and group[-1])


def _worker_and_claim(change: Change) -> tuple[str, int]:
    return change.origin, change.xid


def _waits(changes: Sequence[Change], claim: Change) -> bool:
    """Return whether a job was due from the beginning of a claim to its end, and nothing touched it until then."""
    seen = [change for change in changes if claim.sees(change)]
    if not seen or seen[-1].new != "pending" or seen[-1].after["lease_token"] or seen[-1].due > claim.began:
        return False
    return len(seen) == len(changes) or changes[len(seen)].at > claim.commit.at


def nothing_is_lost(audit: Audit) -> Violations:
    """The rows are those that the changes have left."""
    yield from _unrecorded(audit)


def one_run_of_a_lease(audit: Audit) -> Violations:
    for (job, token), number in Counter((run.begin.job, run.begin.token) for run in audit.runs).items():
        if number > 1:
            yield f"job {job} began {number} times under the token {token}"
    for change in audit.changes:
        if change.old == change.new == "processing" and change.before["lease_token"] != change.after["lease_token"]:
            yield f"job {change.job} was claimed while it was running: {change}"


def handlers(audit: Audit) -> Violations:
    """A handler is called once for a lease, after its claim; the job is completed after it has returned, and once."""
    calls: dict[Any, list[Record]] = defaultdict(list)
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


# -- strategies whose transaction holds the jobs -----------------------------------------------------------------------


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


def held_order(audit: Audit) -> Violations:
    """No job of an ordered key is admitted while an earlier one is unfinished."""
    if audit.configuration.order is None:
        return
    for hold in audit.holds:
        document = audit.by_job[hold.job][0].document if hold.job in audit.by_job else None
        yield from _behind(audit, hold, hold.job, document, hold.saw_at_first, hold.saw_at_last)


def held_cancelled_behind(audit: Audit) -> Violations:
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


def held_rates(audit: Audit) -> Violations:
    """No more beginnings of a key are reserved in a window than the rate allows, and none while it is blocked."""
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
    most, every, _, _ = audit.configuration.rates[number]
    return [_Reservation(row, every / most) for row, _ in _of_rate(audit, number)]


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


def held_turns(audit: Audit) -> Violations:
    """While jobs of a key wait, one process gives no other key more than its turn, and another one for each fault."""
    yield from _unfair(audit, _held_claims(audit))


def _held_claims(audit: Audit) -> Iterator[_Turn]:
    first: dict[int, Mark] = {}
    for mark in audit.marks:
        first.setdefault(mark.job, mark)
    begun: dict[tuple[str, int], list[Mark]] = defaultdict(list)
    for mark in audit.marks:
        if mark.origin.startswith("worker") and first[mark.job] is mark:
            begun[mark.origin, mark.xid].append(mark)
    for (worker, _), group in begun.items():
        jobs, last = [audit.by_job[mark.job][0] for mark in group], group[-1]
        yield _Turn(worker, jobs, lambda changes, last=last: _waits_for(changes, first.get(changes[0].job), last), last)


def _waits_for(changes: Sequence[Change], begun: Mark | None, claim: Mark) -> bool:
    """Return whether a job was due before a claim began, and no transaction had it until after the claim."""
    seen = [change for change in changes if change.commit.at < claim.began - _COMMITTING]
    if len(seen) < len(changes) and changes[len(seen)].at <= claim.at:
        return False
    free = begun is None or begun.began > claim.at
    return bool(seen) and free and seen[-1].new == "pending" and seen[-1].due <= claim.began


def held_nothing_is_lost(audit: Audit) -> Violations:
    """The rows are those that the changes have left, and a worker ends a job by one effect of its handler, or none."""
    yield from _unrecorded(audit)
    effects = Counter((row.job, row.xid) for row in audit.rows["effect"])
    buried = {(row.after["key"][0], row.xid) for row in audit.rows["letter_change"] if row.after is not None}
    for job, changes in audit.by_job.items():
        last = {change.xid: change for change in changes}
        for xid, change in last.items():
            mine, worker = effects.pop((job, xid), 0), change.origin.startswith("worker")
            completed = change.new == "completed" or (change.new is None and (job, xid) not in buried)
            if mine != (worker and completed):
                yield f"job {job} has {mine} effects of the transaction of {change}"
    for job, xid in effects:
        yield f"job {job} has effects of the transaction {xid}, which has not ended it"


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
HELD_RULES: Sequence[Callable[[Audit], Violations]] = (
    slots,
    running,
    admitted,
    held_order,
    held_cancelled_behind,
    held_rates,
    reserved,
    held_turns,
    held_nothing_is_lost,
)


def violations(audit: Audit) -> dict[str, list[str]]:
    """Return the violations of each rule by its name; empty if all hold."""
    return violations_of(RULES if audit.configuration.strategy == "update_status" else HELD_RULES, audit)
