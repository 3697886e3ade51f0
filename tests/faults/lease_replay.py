"""Replays the history of a test against the model of a lease: the events of each job have to be a path of the model.

A history has what processes have recorded, each at some time after it was committed. So the search follows all paths
that may explain it: it takes the records of each process in their order, and between them steps that nobody records,
such as the expiry of a lease. Where a fault may have kept a process from recording, since it was killed or lost its
connection, paths may have steps of it as well.

Each path knows a lower bound of the time that it has reached: what a process records has happened after its record
before, and a lease expires not before its length after its claim. Records that are older cannot follow.

Under a strategy that holds a transaction, the lease of the model is that transaction. While it is open, others see the
row as it was before the claim; and the journal, not the row, counts the attempts of a worker that dies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.faults.checker import History, Job, Tables
from tests.faults.history import Record, with_event
from tests.faults.lease_model import Design, Row, Run, Scope, State, steps

DESIGN = Design()
MOST_UNRECORDED = 4
"""So many unrecorded steps of one job are tried."""
SETTLES = {
    "completed": (("return",), "completed"),
    "retried": (("raise",), "pending"),
    "failed": (("raise", "fail"), "failed"),
    "cancelled": (("raise", "fail"), "cancelled"),
    "released": (("release",), "pending"),
}
"""The events of a Consumer that has settled a run: how the handler may have ended, and the status of the job."""
ENDS = {"return": ("returns",), "raise": ("raises", "fails", "releases")}
"""The steps that the record of a handler's end may be."""
RESCUES = ("the job is rescued", "the job is rescued, and spared")
IGNORED = {"enqueueing", "enqueued", "rolled back", "at gate", "fault"}


class Event(NamedTuple):
    record: Record
    since: int
    """A time before which it has not happened."""


class Place(NamedTuple):
    """What a path has come to. The last three are bounds: with lower ones, it can go on in more ways."""

    state: State
    taken: tuple[int, ...]
    """How many events of each process."""
    now: int = 0
    """A lower bound of the time."""
    claimed_at: int = 0
    """A lower bound of the time of the last claim."""
    unrecorded: int = 0
    """How many steps a fault has kept processes from recording."""


class Replay:
    """The replay of one job.

    :param holds: whether an open transaction holds claimed jobs, not a lease.
    """

    def __init__(self, history: History, job: Job, *, holds: bool) -> None:
        self._job, self._holds = job, holds
        self._row, self._effects = history.tables.rows.get(job.key), history.effects[job.key]
        ready = with_event(history.records, "ready")
        started = {record.process: record.time_ns for record in ready}
        self._lease = int(min((record.details.get("lease", 0) for record in ready), default=0) * 1e9)
        by_process: dict[str, list[Event]] = {}
        for record in job.records:
            if record.event not in IGNORED:
                events = by_process.setdefault(record.process, [])
                events.append(Event(record, _since(record, events, started.get(record.process, 0))))
        self._events = list(by_process.values())
        self._silent = silent_processes(history.records)
        """Those that may have committed something which they have not recorded."""
        self._may_be_unrecorded = min(history.unrecorded_claims, MOST_UNRECORDED)
        self._most_unrecorded = 0
        workers = tuple(sorted({*by_process, *self._silent} - {"test"}))
        self._scope = Scope(workers=workers, attempts=job.max_attempts, runs=99, lost=99, spared=2)

    def unexplained(self) -> str:
        """Return what no path explains, or an empty text."""
        # Paths with few unrecorded steps first: there are few of them, and mostly one explains the history.
        for number in range(self._may_be_unrecorded + 1):
            self._most_unrecorded = number
            furthest = self._search()
            if self._is_end(furthest):
                return ""
        if (first := self._first_left(furthest)) is not None:
            return f"job {self._job.key}: no step of the model explains {first}"
        return f"job {self._job.key}: no path of the model ends with {self._row} and {self._effects} effects"

    def _search(self) -> Place:
        """Return the end of a path that explains all, or the place that explains all records for the longest time."""
        start = Place(State(), tuple(0 for _ in self._events))
        seen: dict[tuple[State, tuple[int, ...]], list[Place]] = {}
        waiting, furthest = [start], start
        while waiting:
            place = waiting.pop()
            if self._is_end(place):
                return place
            if self._reaches(place) > self._reaches(furthest):
                furthest = place
            for after in (*self._hidden(place), *self._recorded(place)):
                others = seen.setdefault((after.state, after.taken), [])
                if not any(_has_lower_bounds(other, after) for other in others):
                    others.append(after)
                    waiting.append(after)
        return furthest

    def _first_left(self, place: Place) -> Record | None:
        left = (event.record for event in self._next(place).values())
        return min(left, key=lambda record: record.time_ns, default=None)

    def _reaches(self, place: Place) -> float:
        """Return the time up to which a place has explained all records."""
        first = self._first_left(place)
        return math.inf if first is None else first.time_ns

    def _is_end(self, place: Place) -> bool:
        row = place.state.row
        if self._next(place):
            return False
        if self._job.has_effect and row.effects != self._effects:
            return False
        if self._row is None:
            return row.status == "completed" or self._job.enqueue_outcome != "enqueued"
        return row.status == self._row.state and (self._holds or row.attempts == self._row.attempts)

    def _next(self, place: Place) -> dict[int, Event]:
        """Return the next event of each process that has some left, by the number of the process."""
        taken = zip(self._events, place.taken, strict=True)
        return {number: events[count] for number, (events, count) in enumerate(taken) if count < len(events)}

    # -- what a record may be --------------------------------------------------------------------------------------

    def _recorded(self, place: Place) -> Iterator[Place]:
        """Yield the places after the next record of each process."""
        for number, event in self._next(place).items():
            if event.record.time_ns < place.now:
                continue
            now = max(place.now, event.since)
            claimed_at = now if event.record.event == "claimed" else place.claimed_at
            taken = (*place.taken[:number], place.taken[number] + 1, *place.taken[number + 1 :])
            for state in self._after(place.state, event.record):
                yield Place(state, taken, now, claimed_at, place.unrecorded)

    def _after(self, state: State, record: Record) -> Iterator[State]:
        """Yield the states after what a record may be."""
        process, row = record.process, state.row
        match record.event:
            case "claimed":
                claimed = self._steps(state, f"{process} claims")
                yield from (one for one in claimed if self._holds or one.row.attempts == record.details["attempt"])
            case "rescued":
                has_failed = record.details.get("attempt") is not None
                rescued = self._steps(state, *RESCUES)
                yield from (one for one in rescued if one.row.status == "failed" or not has_failed)
            case "requeued":
                # By plain SQL, which keeps the attempts.
                yield state._replace(row=row._replace(status="pending", effects=0))
            case "observed":
                yield from [state] if self._is_visible(row, record) else []
            case "start" | "return" | "raise":
                yield from self._calls(state, record)
            case _:
                yield from self._settlements(state, record)

    def _calls(self, state: State, record: Record) -> Iterator[State]:
        """Yield the states after the start or the end of a handler."""
        if record.event != "start":
            yield from self._steps(state, *(f"{record.process} {does}" for does in ENDS[record.event]))
            return
        # Within a run the handler is called again if its batch has failed, or if its commit was lost.
        for run in _runs_of(state, record.process):
            yield _with_run(state, run, run._replace(phase="running"))

    def _settlements(self, state: State, record: Record) -> Iterator[State]:
        """Yield the states after a run was settled, or was given up."""
        for run in _runs_of(state, record.process):
            if _holds_job(state.row, run):
                yield from self._settled(state, run, record.event)
            elif record.event == "lease_lost" or (self._holds and record.event == "released"):
                # Where a transaction holds the job, its end has released it.
                yield _with_run(state, run)
            elif run.phase == "?return" and record.event == "completed":
                # The commit whose reply was lost has arrived.
                yield _with_run(state, run)

    def _settled(self, state: State, run: Run, event: str) -> Iterator[State]:
        ends, status = SETTLES.get(event, ((), ""))
        for phase in ends:
            # A handler that was not called, or was stopped, has no record of its end.
            may_differ = event == "released" or (event != "completed" and run.phase == "running")
            if run.phase == phase or may_differ:
                ended = _with_run(state, run, run._replace(phase=phase))
                settled = self._steps(ended, f"{run.worker} settles {phase}")
                yield from (one for one in settled if one.row != state.row and one.row.status == status)

    def _is_visible(self, row: Row, record: Record) -> bool:
        """Return whether others see a row as it was observed."""
        if self._holds:
            status = "pending" if row.status == "processing" else row.status
            return status == record.details["state"]
        return (row.status, row.attempts) == (record.details["state"], record.details["attempts"])

    # -- what nobody records ---------------------------------------------------------------------------------------

    def _hidden(self, place: Place) -> Iterator[Place]:
        """Yield the places after each step that is not recorded."""
        for step in steps(DESIGN, self._scope, place.state):
            if step.name == "the lease expires":
                expires_at = 0 if self._holds else place.claimed_at + self._lease
                yield place._replace(state=step.after, now=max(place.now, expires_at))
            elif self._holds and step.name in RESCUES:
                # The transaction has ended without a commit, which no worker records.
                yield place._replace(state=step.after)
            elif place.unrecorded < self._most_unrecorded and self._is_silent(step.name):
                yield place._replace(state=step.after, unrecorded=place.unrecorded + 1)

    def _is_silent(self, name: str) -> bool:
        worker, _, does = name.partition(" ")
        # With its reply lost, a settlement leaves a run that may be reported later, or never.
        is_commit = does == "claims" or does.endswith("and the reply is lost")
        return name in RESCUES or (worker in self._silent and is_commit)

    def _steps(self, state: State, *names: str) -> Iterator[State]:
        return (step.after for step in steps(DESIGN, self._scope, state) if step.name in names)


def _since(record: Record, before: Sequence[Event], started: int) -> int:
    """Return a time before which a process has not done what it records after other records."""
    if not before:
        return started
    # One commit settles runs and claims, and is recorded in this order.
    together = record.event == "claimed" and before[-1].record.event in {*SETTLES, "lease_lost"}
    return before[-1].since if together else before[-1].record.time_ns


def _has_lower_bounds(one: Place, other: Place) -> bool:
    bounds = (one.now, other.now), (one.claimed_at, other.claimed_at), (one.unrecorded, other.unrecorded)
    return all(mine <= its for mine, its in bounds)


def _runs_of(state: State, worker: str) -> Iterator[Run]:
    return (run for run in state.runs if run.worker == worker)


def _holds_job(row: Row, run: Run) -> bool:
    return row.token == run.token and row.status == "processing"


def _with_run(state: State, run: Run, *after: Run) -> State:
    """Return the state with another run in the place of one, or without it."""
    runs = [*state.runs]
    runs.remove(run)
    return state._replace(runs=tuple(sorted((*runs, *after))))


def silent_processes(records: Sequence[Record]) -> set[str]:
    """Return the processes that may have committed something which they have not recorded.

    They were killed, or have exited; and if any connection or the server was lost, it may be any process.
    """
    faults = with_event(records, "fault")
    if any(record.details["kind"] not in {"SIGKILL", "SIGSTOP"} for record in faults):
        return {record.process for record in with_event(records, "ready")}
    killed = {record.details["to"] for record in faults if record.details["kind"] == "SIGKILL"}
    return killed | {record.details["worker"] for record in with_event(records, "exited")}


def unexplained(records: Iterable[Record], tables: Tables, *, holds: bool) -> list[str]:
    """Return for each job the first event that no path of the model explains; nothing if all are explained."""
    history = History(records, tables)
    jobs = (job for job in history.jobs.values() if job.enqueue_outcome != "rolled back")
    return [text for job in jobs if (text := Replay(history, job, holds=holds).unexplained())]
