"""What must hold of jobs, as rules on the history of a test and the final tables. Pure, no I/O.

The checker reports only what a history proves. A process records a commit after the commit, at any later time, or never
if it was killed in between. So records of different processes are compared only where their order in the database
follows from them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.history import Record, Violations, violations_of, with_event

FINAL_STATES = {"completed", "failed", "cancelled"}
SETTLED = {"completed", "retried", "failed", "cancelled", "released"}
"""The events of a Consumer that has settled a run."""


@dataclass(frozen=True)
class Row:
    state: str
    attempts: int


@dataclass(frozen=True)
class Tables:
    """The contents of the database when all jobs are in a final state."""

    rows: Mapping[int, Row]
    effects: Sequence[tuple[int, str]] = ()
    """The rows that handlers inserted: the key of the job and the id of the run."""
    messages: frozenset[int] = frozenset()
    """The keys in the message table, under a strategy that has one."""
    keeps_completed: bool = True
    """Whether a completed job leaves a row."""


@dataclass
class Job:
    """What the history contains about one job."""

    key: int
    expected_state: str = "completed"
    """The final state it should have."""
    max_attempts: int = 3
    has_effect: bool = True
    """Whether its handler inserts a row when it succeeds."""
    exits_process: bool = False
    """Whether its handler exits the process."""
    claim_order: tuple[Any, ...] | None = None
    """Its position in the order of claims; None if it is not known in advance."""
    enqueue_outcome: str = "unknown"
    """Whether the transaction that enqueued it was committed: ``enqueued``, ``rolled back`` or ``unknown``."""
    enqueued_at: int = 0
    records: list[Record] = field(default_factory=list)

    def count(self, *events: str) -> int:
        return len(with_event(self.records, *events))


class History:
    def __init__(self, records: Iterable[Record], tables: Tables) -> None:
        self.records, self.tables = sorted(records, key=lambda record: record.time_ns), tables
        self.jobs: dict[int, Job] = {}
        faults = with_event(self.records, "fault")
        self.faults = len(faults)
        self.unrecorded_claims = sum(record.details["kind"] != "SIGSTOP" for record in faults)
        """The largest number of claims of each job that a fault may have prevented a worker from recording."""
        self.unrecorded_claims += len(with_event(self.records, "exited"))
        self.effects = Counter(key for key, _ in tables.effects)
        for record in self.records:
            if record.key is None:
                continue
            job = self.jobs.setdefault(record.key, Job(record.key))
            job.records.append(record)
            match record.event:
                case "enqueueing":
                    order = record.details.get("claim_order")
                    expected = {**record.details, "claim_order": None if order is None else tuple(order)}
                    self.jobs[record.key] = Job(record.key, **expected, records=job.records)
                case "enqueued" | "rolled back":
                    job.enqueue_outcome, job.enqueued_at = record.event, record.time_ns

    def state(self, job: Job) -> str | None:
        """Return the final state of a job; None if neither the tables nor the history contain one."""
        if job.key in self.tables.rows:
            return self.tables.rows[job.key].state
        # Where a completed job leaves no row, the return of its handler is the only evidence. Effects have a rule.
        return "completed" if not self.tables.keeps_completed and job.count("return") else None


def no_committed_job_is_lost(history: History) -> Violations:
    """Every committed job has run and is in the final state that is expected."""
    for job in history.jobs.values():
        state = history.state(job)
        if state is None:
            if job.enqueue_outcome == "enqueued":
                yield f"job {job.key} was committed and is missing"
        elif state not in FINAL_STATES:
            yield f"job {job.key} is still {state}"
        elif state != job.expected_state:
            yield f"job {job.key} is {state}, expected {job.expected_state}"
        elif state == "completed" and not job.count("return"):
            yield f"job {job.key} is completed, but its handler has never returned"


def only_committed_jobs_exist(history: History) -> Violations:
    """A job that was rolled back has no row and no run, and only pending jobs have messages."""
    for key in sorted(history.jobs.keys() | history.tables.rows.keys()):
        job = history.jobs.get(key, Job(key))
        if not job.count("enqueueing"):
            yield f"job {key} was never enqueued"
        elif job.enqueue_outcome == "rolled back" and (history.state(job) is not None or job.count("start")):
            yield f"job {key} was rolled back by its producer, but it was {history.state(job) or 'run'}"
    pending = {key for key, row in history.tables.rows.items() if row.state == "pending"}
    for key in history.tables.messages - pending:
        yield f"job {key} has a message and is not pending"


def effects_are_committed_exactly_once(history: History) -> Violations:
    """A completed job has one effect, of a run that returned. Every other job has none."""
    returned = {record.details["run"]: record.key for record in with_event(history.records, "return")}
    for job in history.jobs.values():
        state = history.state(job)
        expected = int(state == "completed" and job.has_effect)
        if history.effects[job.key] != expected:
            yield f"job {job.key} is {state} and has {history.effects[job.key]} effects, expected {expected}"
    for key, run in history.tables.effects:
        if returned.get(run) != key:
            yield f"run {run} of job {key} has not returned and has an effect"


def each_claim_is_settled_at_most_once(history: History) -> Violations:
    """A worker settles only runs that it has claimed, and each claim is settled or rescued at most once."""
    for job in history.jobs.values():
        claimed, settled = (
            Counter(record.process for record in with_event(job.records, *events)) for events in (("claimed",), SETTLED)
        )
        for process, number in settled.items():
            if number > claimed[process]:
                yield f"{process} has claimed job {job.key} {claimed[process]} times and settled it {number} times"
        finished, requeued = job.count(*FINAL_STATES), job.count("requeued")
        if finished > 1 + requeued:
            yield f"job {job.key} was finished {finished} times and requeued {requeued} times"
        max_claims, ended = job.count("claimed") + history.unrecorded_claims, job.count(*SETTLED, "rescued")
        if ended > max_claims:
            yield f"job {job.key} was claimed at most {max_claims} times and settled or rescued {ended} times"


def attempts_stay_within_max_attempts(history: History) -> Violations:
    """No job has more attempts, or more starts that count, than ``max_attempts``.

    These starts need not be counted: the first start of a job that exits the process within a batch, as its
    responsibility is unknown; the additional run of a job that was requeued by plain SQL; a start that a fault
    interrupted; a run that was released; and a run within a batch, whose jobs may be tried one by one afterwards.
    """
    for job in history.jobs.values():
        row, requeued = history.tables.rows.get(job.key), job.count("requeued")
        if row is not None and row.attempts > job.max_attempts + requeued:
            yield f"job {job.key} has {row.attempts} attempts, limit {job.max_attempts}"
        starts, uncounted = job.count("start"), job.count("released") + requeued + history.faults + job.exits_process
        uncounted += sum(record.details.get("in_batch", False) for record in with_event(job.records, "start"))
        if starts > job.max_attempts + uncounted:
            yield f"job {job.key} was started {starts} times, limit {job.max_attempts} and {uncounted} uncounted starts"
        is_final = row is not None and row.state in FINAL_STATES
        if row is not None and is_final and not requeued and row.attempts > starts + history.faults:
            yield f"job {job.key} was started {starts} times and has {row.attempts} attempts"


def final_states_do_not_change(history: History) -> Violations:
    """A job stays in the final state that was observed or that a worker has recorded, until it is requeued."""
    for job in history.jobs.values():
        final: Mapping[str, Any] = {}
        for record in with_event(job.records, "observed", "requeued"):
            if final and record.event == "observed" and record.details != final:
                yield f"job {job.key} was observed as {final}, and later as {record.details}"
            final = record.details if record.details.get("state") in FINAL_STATES else {}
        state, recorded = history.state(job), with_event(job.records, *FINAL_STATES, "requeued")
        if final and state != final["state"]:
            yield f"job {job.key} was observed as {final['state']}, and its final state is {state}"
        if recorded and recorded[-1].event not in {"requeued", state}:
            last = recorded[-1]
            yield f"{last.process} has recorded job {job.key} as {last.event}, and its final state is {state}"


def jobs_are_claimed_in_order(history: History) -> Violations:
    """Without faults, one Consumer with ``concurrency=1`` claims no job while an earlier one in order is claimable."""
    ready = with_event(history.records, "ready")
    if len(ready) != 1 or ready[0].details.get("concurrency") != 1 or history.faults:
        return
    process = ready[0].process
    claimed: set[int] = set()
    claim_not_before = ready[0].time_ns
    """A lower bound for the start of the current claim: the last record of a handler. Events of the Consumer do not
    count, as the Consumer may emit them after a commit that already contained this claim."""
    for record in history.records:
        if record.process != process or record.key is None:
            continue
        job = history.jobs[record.key]
        if record.event in {"start", "return", "raise"}:
            claim_not_before = record.time_ns
        elif record.event == "claimed" and record.key not in claimed and job.claim_order is not None:
            claimed.add(record.key)
            for other in history.jobs.values():
                was_committed = other.enqueue_outcome == "enqueued" and other.enqueued_at < claim_not_before
                if not was_committed or other.key in claimed or other.claim_order is None:
                    continue
                if other.claim_order < job.claim_order:
                    yield f"job {record.key} was claimed before job {other.key}, which precedes it and was claimable"


RULES: Sequence[Callable[[History], Violations]] = (
    no_committed_job_is_lost,
    only_committed_jobs_exist,
    effects_are_committed_exactly_once,
    each_claim_is_settled_at_most_once,
    attempts_stay_within_max_attempts,
    final_states_do_not_change,
    jobs_are_claimed_in_order,
)


def violations(records: Iterable[Record], tables: Tables) -> dict[str, list[str]]:
    """Return the violations of each rule by its name; empty if all guarantees hold."""
    return violations_of(RULES, History(records, tables))
