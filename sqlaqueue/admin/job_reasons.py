"""The reasons why a job does not run: pure functions of the facts that were read about it.

To add a reason, write a function that yields it, and put it into :data:`REASONS`. If it needs another fact, add that to
:class:`Facts`, and read it in :mod:`sqlaqueue.admin.explain_job`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from sqlaqueue.admin.jobs import JobInfo
from sqlaqueue.admin.state import failing_consumers, names_if_all_quiet, unclaimable_jobs
from sqlaqueue.flow_control.held_back import HeldBackBy
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.run import key_text, key_tuple
from sqlaqueue.queue.spec import QueueSpec, WaitRelation
from sqlaqueue.strategies.existing_messages import ExistingMessages
from sqlaqueue.strategies.listing import OTHER
from sqlaqueue.strategies.unique_key import duplicate_in
from sqlaqueue.texts import duration_text, moment_text

MOST_COUNTED = 1000
"""Number of jobs up to which those before a job are counted."""


class Awaited(NamedTuple):
    """The jobs that a waiting job waits for by one relationship."""

    wait: WaitRelation
    key: Any
    """The key of the job that waits."""
    number: int
    """How many jobs it waits for."""
    total: int
    """How many there are, with those that have ended."""
    failed: int
    """How many have failed or were cancelled."""
    first: Sequence[tuple[Any, str]]
    """The keys and states of some of them, the failed ones first."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was read about one job. A fact that does not apply to the job, or was not needed, has its default."""

    spec: QueueSpec
    key: Any
    """The key as it was given: a value, or a tuple for a composite key."""
    info: JobInfo | None
    """The job; None without an error."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The values of its row, by column name."""
    paused_since: datetime | None = None
    """When the queue was paused; None if it is not."""
    due_in: float | None = None
    """The seconds until the job is due, negative if it is; None if it has no time."""
    lease_left: float | None = None
    """The seconds until its lease ends, negative if it has expired; None if it has none."""
    consumers: Sequence[Any] | None = None
    """The live Consumers of the queue, as rows of ``consumers()``; None if they are not known."""
    last_heartbeat: datetime | None = None
    """When a Consumer has sent a heartbeat last, if none is alive; None if none is recorded."""
    claimed_here: bool = False
    """Whether the session's own transaction holds the job."""
    written_here: bool = False
    """Whether the session's transaction, which is not committed, has written the row."""
    locked: bool | None = False
    """Whether another transaction has locked the pending job; None if the role or the session may not lock it."""
    has_message: bool = True
    """Whether the pending job has a message, if the strategy needs one."""
    quarantined: bool = False
    """Whether its last worker died."""
    waits_for_duplicate: bool = False
    """Whether it waits until a duplicate does not count any more."""
    duplicate: JobInfo | None = None
    """The duplicate that counts, of a job that waits for it or has finished; None without an error."""
    awaited: Sequence[Awaited] | None = ()
    """What a waiting job waits for, and what that waits for, to the end of the chain; None if it was not read."""
    is_open: bool = False
    """Whether a batch is open."""
    is_counted: bool = True
    """Whether triggers count what a job waits for; otherwise claims look."""
    held_back: Sequence[HeldBackBy] = ()
    """What holds the due job back, of the limits, rates and the order of its queue."""
    before: int = 0
    """The number of due jobs with an earlier place in the claim order, at most :data:`MOST_COUNTED`."""

    @property
    def state(self) -> str | None:
        return None if self.info is None else self.info.state

    @property
    def is_due(self) -> bool:
        """Whether the job is pending, and its time has come."""
        return self.state == "pending" and (self.due_in is None or self.due_in <= 0)

    @property
    def is_held(self) -> bool:
        return self.state == "pending" and (self.claimed_here or bool(self.locked))

    @property
    def may_be_claimed(self) -> bool:
        """Whether the next claim could take the job, as far as its row tells."""
        return self.is_due and not self.is_held and self.has_message

    @property
    def has_expired(self) -> bool:
        running = self.state == "processing" and not self.waits_for_duplicate
        return running and self.lease_left is not None and self.lease_left <= 0

    def runners(self) -> list[str]:
        return [each.name for each in self.consumers or () if self._key_texts in map(list, each.running)]

    def refused_by(self) -> list[tuple[str, str]]:
        """Return the names of the live Consumers that cannot claim the job, each with the error."""
        return [
            (each.name, error)
            for each in self.consumers or ()
            for key, error in unclaimable_jobs(each)
            if key == self._key_texts
        ]

    @property
    def _key_texts(self) -> list[str]:
        return [] if self.info is None else list(map(str, key_tuple(self.info.key)))


@dataclass(frozen=True)
class Reason:
    """One reason why a job does not run, or what there is to say about its state.

    ::

        for reason in admin.explain(1).reasons:
            print(reason.code, reason.text)
    """

    code: str
    """A stable identifier, such as ``paused``."""
    text: str
    """A sentence with the facts, and what to do about it."""


MISCOUNTED = Reason(
    "miscounted",
    "All that it waits for has ended, and its count says otherwise: triggers were bypassed; reconcile(), which "
    "Consumers execute regularly, counts again.",
)

_WAITED = Reason("waited", "All that it waits for has ended: the next claim of the queue makes it pending.")

_MOST_NAMES = 3
"""Number of Consumers that a sentence names."""


def _missing(facts: Facts) -> Iterator[Reason]:
    if facts.state is not None:
        return
    ways = ["it was never enqueued", "the transaction that inserts it is not committed", "it was deleted"]
    spec = facts.spec
    if not spec.strategy.keeps_rows:
        ways.append(
            "it is completed, as a claim deletes the row and only failed and cancelled jobs become dead letters"
        )
    elif spec.config.on_complete == "delete":
        ways.append('it is completed, as on_complete="delete" deletes the rows of completed jobs')
    if spec.config.retention:
        ways.append(f"it has finished ({', '.join(spec.config.retention)}) and its retention time is over")
    key = key_text(facts.key)
    yield Reason("missing", f"There is no job {key} in {spec.name}: {', or '.join(ways)}.")


def _finished(facts: Facts) -> Iterator[Reason]:
    info = facts.info
    if info is None or info.state not in FINISHED:
        return
    when = f" at {moment_text(info.finished_at)}" if info.finished_at is not None else ""
    verb = {"completed": "was completed", "failed": "failed", "cancelled": "was cancelled"}[info.state]
    error = (info.last_error or "").splitlines()[:1]
    after = f" after {info.attempts} attempts" if info.state == "failed" and info.attempts else ""
    said = f" with the last error {error[0]!r}" if error else ""
    again = "requeue() makes it pending again"
    if facts.spec.config.unique is not None and not facts.spec.has("status"):
        again += ", unless a duplicate of it counts by then"
    if facts.duplicate is not None:
        key = key_text(facts.duplicate.key)
        again = f"requeue() does not make it pending again while its duplicate, job {key}, counts"
    yield Reason("finished", f"It {verb}{when}{after}{said}; {again}.")


def _cancelled_for_duplicate(facts: Facts) -> Iterator[Reason]:
    info = facts.info
    if info is None or info.state != "cancelled" or facts.spec.config.unique is None:
        return
    duplicate = duplicate_in(info.last_error)
    if duplicate is not None:
        names = ", ".join(facts.spec.config.unique.attributes)
        yield Reason(
            "duplicate",
            f"It was cancelled when it was to be pending again, since job {duplicate} had equal {names} and counted.",
        )


def _unknown_status(facts: Facts) -> Iterator[Reason]:
    if facts.state != OTHER:
        return
    column = facts.spec.columns["status"]
    yield Reason(
        "unknown_status",
        f"Its {column.name} is {facts.row.get(column.name)!r}, which is no status value of the queue, so no claim "
        "takes it; write the value for pending into the row, or name this value in QueueConfig(states=States(...)).",
    )


def _unknown_class(facts: Facts) -> Iterator[Reason]:
    mapper = facts.spec.mapper
    column = mapper.polymorphic_on
    if facts.state in {None, *FINISHED} or not isinstance(column, sa.Column):
        return
    value = facts.row.get(column.name)
    # NULL loads the class of the queue itself.
    if value is not None and value not in mapper.polymorphic_map:
        known = ", ".join(repr(each) for each in mapper.polymorphic_map)
        yield Reason(
            "unknown_class",
            f"Its {column.name} is {value!r}, which belongs to no class mapped in this process ({known}): a claim "
            "of it cannot load the instance; import the class with this polymorphic_identity in the worker, or correct "
            "the row.",
        )


def _uncommitted(facts: Facts) -> Iterator[Reason]:
    if facts.state is not None and facts.written_here and not facts.claimed_here:
        yield Reason(
            "uncommitted",
            "The transaction of this session has written the row and is not committed, so no worker sees the job as it "
            "is here; commit.",
        )


def _waits_for_duplicate(facts: Facts) -> Iterator[Reason]:
    unique = facts.spec.config.unique
    if not facts.waits_for_duplicate or unique is None:
        return
    if facts.duplicate is None:
        until = (
            "until its duplicate does not count any more; the duplicate is gone, so the next rescue of a Consumer, or "
            "rescue(), makes it pending"
        )
    else:
        until = (
            f"for job {key_text(facts.duplicate.key)}, which has equal {', '.join(unique.attributes)} and is "
            f"{facts.duplicate.state}; when that does not count any more, a rescue makes this job pending"
        )
    yield Reason(
        "waits_for_duplicate", f'A run of it has ended, and as Unique(on_return="wait") says it waits {until}.'
    )


def _waits(facts: Facts) -> Iterator[Reason]:
    if facts.state != "waiting":
        return
    for awaited in facts.awaited or ():
        wait = awaited.wait
        batch, others = (
            f"{wait.waiting.model.__name__} {key_text(key_tuple(awaited.key))}",
            awaited.number - len(awaited.first),
        )
        shown = [f"{wait.awaited.model.__name__} {key_text(key_tuple(key))} is {state}" for key, state in awaited.first]
        more = f", and {others} more" if others else ""
        failed = [state for _, state in awaited.first if state in {"failed", "cancelled"}]
        fix = "; requeue what has failed, and this job runs when that has completed" if failed else ""
        of_all = f" of {awaited.total}" if wait.to_many else ""
        of_all += f", {awaited.failed} have failed," if wait.to_many and awaited.failed else ""
        what = f"{batch} waits for {awaited.number}{of_all} in {wait.name}"
        yield Reason("waits_for", f"{what}: {', '.join(shown)}{more}{fix}.")
    if facts.is_open:
        name = facts.spec.attributes["is_open"]
        yield Reason("open", f"The batch is open: it waits until its {name} is False.")
    if facts.awaited is None:
        number = facts.row.get(facts.spec.columns["waits_for_count"].name)
        if number:
            names = ", ".join(wait.name for wait in facts.spec.waits)
            yield Reason("waits_for", f"It waits for {number} {'job' if number == 1 else 'jobs'} in {names}.")
    elif not (facts.awaited or facts.is_open):
        yield MISCOUNTED if facts.is_counted else _WAITED


def _lease_expired(facts: Facts) -> Iterator[Reason]:
    info = facts.info
    if info is None or not facts.has_expired:
        return
    rescue = (
        f"one of the live Consumers ({_names([each.name for each in facts.consumers])}) rescues it soon"
        if facts.consumers
        else "no live Consumer is there to rescue it: start one, or call rescue()"
    )
    owner = "" if info.claimed_by is None else f" of {info.claimed_by}"
    when = f"{moment_text(info.lease_expires_at)}, {duration_text(-(facts.lease_left or 0))} ago"
    yield Reason(
        "lease_expired", f"The lease{owner} expired at {when}: its worker died or lost the database; {rescue}."
    )


def _running(facts: Facts) -> Iterator[Reason]:
    info = facts.info
    if info is None or info.state != "processing" or facts.waits_for_duplicate or facts.has_expired:
        return
    if facts.spec.strategy.holds_transaction:
        name = facts.spec.strategy.name
        yield Reason(
            "running",
            f'Its row reads as processing, which the strategy "{name}" never writes, so no claim takes it; set it to '
            "pending if no other program runs it.",
        )
        return
    since = "" if info.started_at is None else f" since {moment_text(info.started_at)}"
    text = f"It is running{since}, claimed by {info.claimed_by or 'an unknown worker'}"
    if facts.lease_left is None:
        text += "; it has no lease, so nothing rescues it if its worker has died"
    else:
        text += f", with a lease until {moment_text(info.lease_expires_at)}, in {duration_text(facts.lease_left)}"
    yield Reason("running", f"{text}. {_owner(facts, info.claimed_by)}")


def _owner(facts: Facts, name: str | None) -> str:
    if facts.runners():
        return f"The Consumer {_names(facts.runners())} was running its handler at the last heartbeat."
    if any(each.name == name for each in facts.consumers or ()):
        return "That Consumer is alive, and had not called the handler at its last heartbeat."
    return (
        "No live Consumer has this name: it is a program that calls claim() itself, or it has died and the job is "
        "rescued after the end of the lease."
    )


def _unclaimable(facts: Facts) -> Iterator[Reason]:
    refused = facts.refused_by()
    if refused and facts.state not in FINISHED:
        errors = list(dict.fromkeys(error for _, error in refused))
        others = len(facts.consumers or ()) - len({name for name, _ in refused})
        rest = "the other Consumers may claim it" if others > 0 else "no other Consumer is alive"
        yield Reason(
            "unclaimable",
            f"{_names([name for name, _ in refused])} cannot claim it, rescue it or end its run: {_names(errors)}; "
            f"{rest}. "
            "Start a version of the program that can load the row, or correct the row or what refuses the change.",
        )


def _claims_fail(facts: Facts) -> Iterator[Reason]:
    failing = failing_consumers(facts.consumers or ())
    if not failing or not facts.may_be_claimed:
        return
    others = len(facts.consumers or ()) - len(failing)
    rest = "the other Consumers may claim it" if others > 0 else "no other Consumer is alive"
    first = failing[0]
    yield Reason(
        "claims_fail",
        f"Every claim of {_names([each.name for each in failing])} has failed since {moment_text(first.since)}: "
        f"{first.error.removesuffix('.')}. {rest[0].upper()}{rest[1:]}.",
    )


def _held(facts: Facts) -> Iterator[Reason]:
    if facts.claimed_here:
        yield Reason(
            "running", "The transaction of this session has claimed it; complete, retry or fail it, and commit."
        )
    elif facts.is_held and facts.runners():
        yield Reason("running", f"The Consumer {_names(facts.runners())} runs it in a transaction that is open.")
    elif facts.is_held:
        claimed = [each.name for each in facts.consumers or () if each.claimed]
        holder = "one that has written the row and is not committed"
        if facts.spec.strategy.holds_transaction:
            holder += ", or that of a worker which has claimed it"
        if claimed:
            holder += f" ({_names(claimed)} had claimed jobs that were not running at the last heartbeat)"
        yield Reason(
            "locked",
            f"Another transaction has locked it, so claims skip it: {holder}; pg_stat_activity shows open "
            "transactions.",
        )


def _no_message(facts: Facts) -> Iterator[Reason]:
    if facts.has_message or facts.claimed_here:
        return
    fix = "reconcile(), which Consumers execute regularly, inserts it"
    if isinstance(facts.spec.strategy, ExistingMessages):
        fix = "the application inserts the messages, so it has to insert one for this job"
    yield Reason("no_message", f"It is pending and has no message, without which no claim finds it; {fix}.")


def _paused(facts: Facts) -> Iterator[Reason]:
    if facts.state == "pending" and facts.paused_since is not None:
        yield Reason(
            "paused",
            f"The queue {facts.spec.name} has been paused since {moment_text(facts.paused_since)}, so no claim takes a "
            "job; resume() or `sqlaqueue resume` ends that.",
        )


def _not_due(facts: Facts) -> Iterator[Reason]:
    if facts.info is not None and facts.state == "pending" and not facts.is_due:
        attempts = facts.info.attempts
        after = f"; its attempt {attempts} has failed or was released" if attempts else ""
        yield Reason(
            "not_due", f"It is due at {moment_text(facts.info.run_at)}, in {duration_text(facts.due_in)}{after}."
        )


def _no_consumer(facts: Facts) -> Iterator[Reason]:
    if facts.state == "pending" and not facts.is_held and facts.consumers is not None and not facts.consumers:
        yield Reason(
            "no_consumer",
            f"No live Consumer works for {facts.spec.name}: {_last_heartbeat(facts)}; start one, for instance with "
            "`sqlaqueue worker`.",
        )


def _last_heartbeat(facts: Facts) -> str:
    if facts.last_heartbeat is None:
        # Consumers delete their rows when they stop, and those of dead ones after a day.
        return "all have stopped, or none has run for a day"
    return f"the last heartbeat was sent at {moment_text(facts.last_heartbeat)}"


def _all_quiet(facts: Facts) -> Iterator[Reason]:
    if facts.may_be_claimed and (names := names_if_all_quiet(facts.consumers or ())):
        yield Reason(
            "all_quiet",
            f"Every live Consumer ({_names(names)}) was asked to claim no more jobs; `sqlaqueue workers --resume` ends "
            "that.",
        )


def _quarantined(facts: Facts) -> Iterator[Reason]:
    if facts.quarantined and facts.state == "pending" and not facts.is_held:
        yield Reason(
            "quarantined",
            "The worker that ran it last has died, so Consumers claim it apart from other jobs, a few of these at a "
            "time.",
        )


def _held_back(facts: Facts) -> Iterator[Reason]:
    for one in facts.held_back:
        yield Reason(one.kind, one.text)


def _jobs_before(facts: Facts) -> Iterator[Reason]:
    if facts.before:
        number = f"at least {MOST_COUNTED}" if facts.before >= MOST_COUNTED else str(facts.before)
        jobs = "1 due job is" if facts.before == 1 else f"{number} due jobs are"
        yield Reason("jobs_before", f"{jobs} before it in the claim order; more workers would reach it sooner.")


def _busy(facts: Facts) -> Iterator[Reason]:
    if not facts.may_be_claimed or not facts.consumers or names_if_all_quiet(facts.consumers):
        return
    if all(each.running for each in facts.consumers):
        parts = [f"{each.name} ({len(each.running)} running, {each.claimed} claimed)" for each in facts.consumers]
        yield Reason(
            "busy",
            f"Every live Consumer was running jobs at its last heartbeat: {_names(parts)}; if their handlers are all "
            "in use, the job waits for the end of one.",
        )


def _polling(facts: Facts) -> Iterator[Reason]:
    if not facts.may_be_claimed or not facts.consumers or names_if_all_quiet(facts.consumers):
        return
    if not any(each.listening for each in facts.consumers):
        yield Reason(
            "polling",
            f"The live Consumers ({_names([each.name for each in facts.consumers])}) receive no notifications and only "
            "poll, so they find the job at their next poll_interval.",
        )


def _names(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


REASONS: tuple[Callable[[Facts], Iterator[Reason]], ...] = (
    _missing,
    _unknown_class,
    _unknown_status,
    _cancelled_for_duplicate,
    _finished,
    _uncommitted,
    _waits_for_duplicate,
    _waits,
    _lease_expired,
    _running,
    _unclaimable,
    _claims_fail,
    _held,
    _no_message,
    _paused,
    _not_due,
    _no_consumer,
    _all_quiet,
    _quarantined,
    _held_back,
    _jobs_before,
    _busy,
    _polling,
)
"""The functions that yield reasons, in the order of their importance."""


def reasons_of(facts: Facts) -> tuple[Reason, ...]:
    found = tuple(reason for function in REASONS for reason in function(facts))
    if found:
        return found
    text = "It is due, and nothing stands against it: the next claim takes it, unless the Consumers select other jobs."
    if facts.locked is None:
        text += (
            " Whether another transaction has locked it is not known, since this session may not lock it (the "
            "privilege UPDATE is missing, or the transaction is read-only)."
        )
    return (Reason("ready", text),)
