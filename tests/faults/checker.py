"""Decides from a history and the tables that are left whether the queue kept its promises. Pure: no I/O.

What a history cannot prove is not held against the queue. A line that tells of a commit comes after it, by any
amount of time, or never when its process was killed in between; so of two lines of different processes only
those are compared whose order in the database follows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.history import Line, of

FINISHED = {"completed", "failed", "cancelled"}
ENDINGS = {"completed", "retried", "failed", "cancelled", "released"}
"""The events by which a Consumer tells that it has settled a run."""


@dataclass(frozen=True)
class Row:
    """What is left of one job."""

    state: str
    attempts: int


@dataclass(frozen=True)
class Tables:
    """What is in the database when all work is done."""

    rows: Mapping[int, Row]
    effects: Sequence[tuple[int, str]] = ()
    """What handlers did: the job's key and the id of the run, each as often as it is there."""
    messages: frozenset[int] = frozenset()
    """The keys of the messages, where jobs have some."""
    keeps_completed: bool = True
    """Whether a completed job leaves a row."""


@dataclass
class Job:
    """What the history says of one job."""

    key: int
    ends: str = "completed"
    """The state in which it should end."""
    limit: int = 3
    effect: bool = True
    """Whether a run that succeeds leaves something in the database."""
    killer: bool = False
    """Whether its handler ends the process."""
    order: tuple[Any, ...] | None = None
    """Its place among all jobs, where that is known before it is claimed."""
    fate: str = "unknown"
    """What became of the transaction that enqueued it."""
    enqueued_at: int = 0
    lines: list[Line] = field(default_factory=list)

    def count(self, *what: str) -> int:
        """Return how many lines about it say one of ``what``."""
        return len(of(self.lines, *what))


class History:
    """The lines by job, beside what is left in the tables."""

    def __init__(self, lines: Iterable[Line], tables: Tables) -> None:
        self.lines, self.tables = sorted(lines, key=lambda line: line.at), tables
        self.jobs: dict[int, Job] = {}
        faults = of(self.lines, "fault")
        self.faults = len(faults)
        self.unheard = sum(line.more["kind"] != "SIGSTOP" for line in faults) + len(of(self.lines, "died"))
        """How many claims there may be of which their workers could not tell, of each job."""
        self.effects = Counter(key for key, _ in tables.effects)
        for line in self.lines:
            if line.key is None:
                continue
            job = self.jobs.setdefault(line.key, Job(line.key))
            job.lines.append(line)
            match line.what:
                case "enqueueing":
                    order = line.more.get("order")
                    self.jobs[line.key] = Job(
                        line.key, **{**line.more, "order": None if order is None else tuple(order)}, lines=job.lines
                    )
                case "enqueued" | "rolled back":
                    job.fate, job.enqueued_at = line.what, line.at

    def state(self, job: Job) -> str | None:
        """Return the state in which a job is; None when there is no trace of it."""
        if job.key in self.tables.rows:
            return self.tables.rows[job.key].state
        # Where a completed job leaves no row, that its handler returned is the only trace; its effect is judged apart.
        return "completed" if not self.tables.keeps_completed and job.count("end") else None


Complaints = Iterator[str]


def nothing_is_lost(history: History) -> Complaints:
    """What was committed is there, and done."""
    for job in history.jobs.values():
        state = history.state(job)
        if state is None:
            if job.fate == "enqueued":
                yield f"job {job.key} was committed, and is gone"
        elif state not in FINISHED:
            yield f"job {job.key} is still {state}"
        elif state != job.ends:
            yield f"job {job.key} is {state}, and should be {job.ends}"
        elif state == "completed" and not job.count("end"):
            yield f"job {job.key} is completed, and no handler of it has returned"


def nothing_comes_from_nowhere(history: History) -> Complaints:
    """What was not committed is neither there nor run, and no message is left of what was."""
    for key in sorted(history.jobs.keys() | history.tables.rows.keys()):
        job = history.jobs.get(key, Job(key))
        if not job.count("enqueueing"):
            yield f"job {key} was enqueued by nobody"
        elif job.fate == "rolled back" and (history.state(job) is not None or job.count("start")):
            yield f"job {key} was rolled back by its producer, and yet was {history.state(job) or 'run'}"
    waiting = {key for key, row in history.tables.rows.items() if row.state == "pending"}
    for key in history.tables.messages - waiting:
        yield f"the message of job {key} is left, which does not wait"


def effects_happen_once(history: History) -> Complaints:
    """A completed job has had its effect once, by a run that returned, and no other job has had any."""
    returned = {line.more["run"]: line.key for line in of(history.lines, "end")}
    for job in history.jobs.values():
        state = history.state(job)
        expected = int(state == "completed" and job.effect)
        if history.effects[job.key] != expected:
            yield f"job {job.key} is {state}, and has {history.effects[job.key]} effects in place of {expected}"
    for key, run in history.tables.effects:
        if returned.get(run) != key:
            yield f"the run {run} of job {key} has not returned, and has an effect"


def a_claim_is_settled_once(history: History) -> Complaints:
    """Whoever settles a run has claimed it, and what one has settled, no other settles again."""
    for job in history.jobs.values():
        claimed, settled = (Counter(line.process for line in of(job.lines, *what)) for what in (("claimed",), ENDINGS))
        for process, number in settled.items():
            if number > claimed[process]:
                yield f"{process} has claimed job {job.key} {claimed[process]} times, and settled it {number} times"
        over, again = job.count(*FINISHED), job.count("requeued")
        if over > 1 + again:
            yield f"job {job.key} was finished {over} times, and requeued {again} times"
        claimed_at_most, ended = job.count("claimed") + history.unheard, job.count(*ENDINGS, "rescued")
        if ended > claimed_at_most:
            yield f"of at most {claimed_at_most} claims of job {job.key}, {ended} were settled or taken back"


def attempts_stay_in_their_limit(history: History) -> Complaints:
    """No job is counted, or started, more often than its limit says.

    Not counted are a killer's first start within a batch, since nobody knows then whom to blame, and the one more run
    of a job that plain SQL made wait again; a start that a fault cut short may not be counted, nor one that was given
    back, or together with others, each of which may then be tried by itself.
    """
    for job in history.jobs.values():
        row, again = history.tables.rows.get(job.key), job.count("requeued")
        if row is not None and row.attempts > job.limit + again:
            yield f"job {job.key} has {row.attempts} attempts, of {job.limit}"
        starts, uncounted = job.count("start"), job.count("released") + again + history.faults + job.killer
        uncounted += sum(line.more.get("together", False) for line in of(job.lines, "start"))
        if starts > job.limit + uncounted:
            yield f"job {job.key} was started {starts} times; it has {job.limit} attempts, {uncounted} uncounted"
        if row is not None and row.state in FINISHED and not again and row.attempts > starts + history.faults:
            yield f"job {job.key} was started {starts} times, and {row.attempts} attempts were counted"


def settled_stays_settled(history: History) -> Complaints:
    """What somebody has seen in a final state, or was told of, stays like that until it is requeued."""
    for job in history.jobs.values():
        settled: Mapping[str, Any] = {}
        for line in of(job.lines, "seen", "requeued"):
            if settled and line.what == "seen" and line.more != settled:
                yield f"job {job.key} was seen as {settled}, and then as {line.more}"
            settled = line.more if line.more.get("state") in FINISHED else {}
        state, told = history.state(job), of(job.lines, *FINISHED, "requeued")
        if settled and state != settled["state"]:
            yield f"job {job.key} was seen as {settled['state']}, and is {state} in the end"
        if told and told[-1].what not in {"requeued", state}:
            yield f"{told[-1].process} was told that job {job.key} is {told[-1].what}; it is {state} in the end"


def claims_come_in_order(history: History) -> Complaints:
    """One Consumer with one handler at a time, and no faults: no job is claimed before a better one that was there."""
    ready = of(history.lines, "ready")
    if len(ready) != 1 or ready[0].more.get("concurrency") != 1 or history.faults:
        return
    process = ready[0].process
    claimed: set[int] = set()
    begun = ready[0].at
    """No later than the beginning of the claim that is being read: a handler has said something since, as the consumer
    itself may just have told what it has settled with the same commit."""
    for line in history.lines:
        if line.process != process or line.key is None:
            continue
        job = history.jobs[line.key]
        if line.what in {"start", "end", "raise"}:
            begun = line.at
        elif line.what == "claimed" and line.key not in claimed and job.order is not None:
            claimed.add(line.key)
            for other in history.jobs.values():
                there = other.fate == "enqueued" and other.enqueued_at < begun and other.key not in claimed
                if there and other.order is not None and other.order < job.order:
                    yield f"job {line.key} was claimed before job {other.key}, which is better and was there"


RULES: Sequence[Callable[[History], Complaints]] = (
    nothing_is_lost,
    nothing_comes_from_nowhere,
    effects_happen_once,
    a_claim_is_settled_once,
    attempts_stay_in_their_limit,
    settled_stays_settled,
    claims_come_in_order,
)


def complaints(lines: Iterable[Line], tables: Tables) -> dict[str, list[str]]:
    """Return what each rule has to complain about; empty when the queue has kept its promises."""
    history = History(lines, tables)
    found: dict[str, list[str]] = defaultdict(list)
    for rule in RULES:
        for complaint in rule(history):
            found[rule.__name__].append(complaint)
    return dict(found)
