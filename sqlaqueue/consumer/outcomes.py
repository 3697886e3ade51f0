"""How a run ends: its outcome, and the exceptions that decide it. Pure, no I/O."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import traceback
from asyncio import CancelledError
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from sqlaqueue.consumer.core.errors import (
    drop_callers,
    is_conflict,
    is_connect_error,
    is_connection_lost,
    stack_text,
    text_of,
    text_with_kind,
)
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.exc import Cancel, ConfigurationError, Fail, HandlerSignal, JobTimeout, Retry, Snooze, Throttle
from sqlaqueue.postgresql.side_tables import BOUNDS, COUNTED, ENDINGS, RUNS, WAITS
from sqlaqueue.queue.retry_policies import Delay, Exponential, RetryPolicy, seconds
from sqlaqueue.queue.run import Key, Run
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements.verbs import delayed
from sqlaqueue.strategies import Settlement
from sqlaqueue.strategies.unique_key import REASON

Ending = Literal["completed", "retried", "failed", "cancelled", "released"]
State = Literal["completed", "pending", "failed", "cancelled"]

_STATES: dict[Ending, State] = {
    "completed": "completed",
    "retried": "pending",
    "failed": "failed",
    "cancelled": "cancelled",
    "released": "pending",
}


class Outcome(NamedTuple):
    """How one run ends."""

    event: Ending
    delay: float | None = None
    """Seconds until the job is due again; None leaves its ``run_at``."""
    error: str | None = None
    cause: BaseException | None = None
    """The handler's exception, for events and the log."""
    quarantine: bool = False
    """The job runs by itself from now on."""
    throttle: tuple[str, ...] | None = None
    """The attributes of the rates whose key is held back for as long as the job; None for none."""
    traceback: str | None = None
    """The traceback that is stored below the error."""

    @property
    def state(self) -> State:
        return _STATES[self.event]

    def settlement(self, starts: int = 1) -> Settlement:
        """Return what is written: ``starts`` counts as attempts unless the job is released."""
        return Settlement(
            self.state,
            starts=0 if self.event == "released" else starts,
            quarantine=self.quarantine,
            run_at=None if self.delay is None else delayed(self.delay),
            error=None if self.error is None else sa.literal(self.stored_error, sa.Text()),
        )

    @property
    def stored_error(self) -> str | None:
        """The text for ``last_error``: the first line says what happened, the traceback comes last."""
        return self.error if self.traceback is None else f"{self.error}\n{self.traceback}"


class HandlerAbandoned(BaseException):
    """The grace period is over and the handler still runs: its job is released, and the attempt does not count."""


class NotSettled(Exception):
    """The outcome could not be written, for a reason that is not the job's; the handler's writes are undone."""


class CancellationRequested(Cancel):
    """A request to cancel arrived for some of the jobs that a handler was working on."""

    def __init__(self, keys: Collection[Key] = ()) -> None:
        super().__init__("cancelled on request")
        self.keys = keys


COMPLETED = Outcome("completed")
RELEASED = Outcome("released")


@dataclass(slots=True, eq=False)
class FinishedRun:
    """A run with its outcome, until it is settled."""

    run: Run
    outcome: Outcome
    job: Any = None
    starts: int = 1
    uncertain: bool = False
    """A commit was tried: if its reply was lost, the run may have been settled or not."""
    claim_committed: bool = True
    """False if the reply to the claim's commit was lost: settle the run, but emit no event for it."""
    duplicate: str | None = None
    """The key of the duplicate for which the job was cancelled instead of made pending."""

    @property
    def ended_as(self) -> Outcome:
        """How the run has ended in the database."""
        if self.duplicate is None:
            return self.outcome
        error = f"{REASON}{self.duplicate}"
        cancelled = Cancel(error)
        # The log and the listeners must not lose what the handler raised.
        cancelled.__cause__ = self.outcome.cause
        return Outcome("cancelled", error=error, cause=cancelled)


def applies_to_batch(error: BaseException) -> bool:
    """Return whether the exception of a batch handler is about all of its jobs, so that none is tried by itself."""
    return decides_outcome(error) and not isinstance(error, CancellationRequested)


def decides_outcome(error: BaseException | None) -> bool:
    """Return whether an exception says how the run is to end, whatever else has happened."""
    return isinstance(error, HandlerSignal | JobTimeout | HandlerAbandoned | NotSettled)


def is_disconnected(error: BaseException, gone: bool) -> bool:  # noqa: FBT001 - both say the same
    """Return whether a run ended because its connection was lost, or could not be made.

    A handler that gave a statement up has ended the connection itself.
    """
    if is_connection_lost(error) or is_connect_error(error):
        return True
    return gone and not decides_outcome(error) and not isinstance(error, TimeoutError | CancelledError)


def handler_exception(error: BaseException) -> BaseException:
    """Return a handler's exception, or another one if it cannot be read.

    For a MemoryError, first free the memory that the handler's frames refer to. It must be called at once: without
    memory not even a socket can be read.
    """
    if issubclass(type(error), MemoryError):
        # The objects that fill the memory are referenced by the handler's frames.
        traceback.clear_frames(error.__traceback__)
    try:
        for name in ("__cause__", "__context__", "__traceback__", "__class__"):
            getattr(error, name)
        getattr(error, "__notes__", type(error).__name__)
        with contextlib.suppress(Exception):
            # Its text may fail as that of any object may.
            str(error)
    except BaseException:  # noqa: BLE001 - its code may raise SystemExit as well, and the run has to end
        # Whoever looks at it would raise again: the rules of outcomes, the log, listeners of events.
        name = type.__getattribute__(type(error), "__qualname__")
        unreadable = RuntimeError(f"the handler raised an exception of the class {name}, which cannot be read")
        return unreadable.with_traceback(BaseException.__getattribute__(error, "__traceback__"))
    return error


_FIRST, _LONGEST = 0.1, 30.0
_MOST = 10_000
"""How many jobs are remembered; the counts of older ones begin anew."""

MOST_AT_ONCE = 10
"""After so many runs that ended in a conflict, one counts as an attempt where a job cannot be delayed."""


class ConflictDelays:
    """How many runs of each job in a row were released because of a conflict.

    :param draw: returns numbers from [0, 1): two jobs that conflicted with each other must not meet again.
    :param draining: whether a job is due again at once, as a drain ends when no job is due; later if that often fails.
    """

    def __init__(self, draw: Callable[[], float] = random.random, *, draining: bool = False) -> None:
        self._times: dict[Key, int] = {}
        self._lock, self._draw, self._draining = threading.Lock(), draw, draining

    def record(self, key: Key) -> tuple[int, float]:
        """Record a conflict; return how many there have been, and the seconds until the job should run again."""
        with self._lock:
            times = self._times[key] = self._times.pop(key, 0) + 1
            while len(self._times) > _MOST:
                del self._times[next(iter(self._times))]
        if self._draining and times <= MOST_AT_ONCE:
            return times, 0.0
        longest: float = min(_LONGEST, _FIRST * 2 ** min(times, 10))
        return times, longest * (0.5 + 0.5 * self._draw())

    def clear(self, keys: Iterable[Key]) -> None:
        """Forget the conflicts of jobs whose runs have ended in another way."""
        if self._times:
            with self._lock:
                for key in keys:
                    self._times.pop(key, None)


LONGEST_DELAY = 100 * 365 * 86400.0
"""Seconds; a later moment may not fit into the database's calendar."""


class OutcomeRules:
    """Turns the results of handlers into outcomes; ``marks_rows`` if a quarantined job is marked in its row."""

    def __init__(self, settings: ConsumerSettings, conflicts: ConflictDelays, *, marks_rows: bool) -> None:
        self._settings, self._conflicts, self._marks_rows = settings, conflicts, marks_rows
        self._disconnected: set[Key] = set()
        """Jobs that have lost a connection, where rows cannot be marked."""

    def outcome(self, error: BaseException | None, run: Run) -> Outcome:
        """Return the outcome of a run whose handler returned (``error`` is None) or raised."""
        spec = self._settings.spec
        if error is not None:
            drop_callers(error)
        if error is not None and (is_conflict(error) or isinstance(error, NotSettled)):
            times, delay = self._conflicts.record(run.key)
            if spec.has("run_at") or times <= MOST_AT_ONCE:
                return Outcome("released", delay if spec.has("run_at") else None, cause=error)
        if isinstance(error, Throttle):
            error = _checked_throttle(spec, error)
        outcome = outcome_of(error, run, self._settings.retry_policy, has_run_at=spec.has("run_at"))
        if outcome.event == "cancelled" and spec.config.states.cancelled is None:
            # The table has no value for it, and the run has to end: else it would be claimed again for ever.
            return outcome._replace(event="failed")
        if outcome.event in {"retried", "failed"} and outcome.error and outcome.cause is not None:
            return outcome._replace(traceback=stack_text(outcome.cause, self._room_below(outcome.error)))
        return outcome

    def _room_below(self, error: str) -> int | None:
        """Return how many characters of a traceback fit into a short column; None if all that is stored does."""
        column = self._settings.spec.columns.get("last_error")
        length = None if column is None else getattr(column.type, "length", None)
        return None if length is None else length - len(error) - 1

    def disconnected(self, error: BaseException, run: Run, *, alone: bool) -> Outcome:
        """Return the outcome of a run whose connection was lost.

        The server may have been restarted, or the job ends connections. So it costs no attempt, and from now on the job
        runs by itself; if it did so already, the attempt counts.
        """
        outcome = self.outcome(error, run) if alone else Outcome("released", cause=error)
        return outcome._replace(quarantine=outcome.state == "pending")

    def ran_alone(self, run: Run) -> bool:
        """Return whether a run under a lease that lost its connection is responsible for that, as far as is known."""
        if self._marks_rows:
            return run.isolated
        # Without marks in rows this Consumer remembers such jobs, as long as it runs.
        known = run.key in self._disconnected
        self._disconnected.add(run.key)
        return known


def _checked_throttle(spec: QueueSpec, error: Throttle) -> BaseException:
    """Return the signal, or the error that the queue has no such rate."""
    known = [one.per for one in spec.config.rates]
    if error.per in known:
        return error
    named = " and ".join(repr(", ".join(per)) if per else "None" for per in dict.fromkeys(known)) or "none"
    msg = (
        f"{spec.model.__name__}: Throttle(per={', '.join(error.per) or None!r}): the queue has no rate of this key; "
        f"it has {named}"
    )
    mistake = ConfigurationError(msg)
    mistake.__cause__ = error
    return mistake


def outcome_of(error: BaseException | None, run: Run, policy: RetryPolicy, *, has_run_at: bool = True) -> Outcome:
    """Return the outcome of a run whose handler returned (``error`` is None) or raised; never raise.

    :param has_run_at: whether the model can delay a job; without, a job runs again at once.
    """
    if error is None:
        return COMPLETED
    try:
        outcome = _outcome_of_error(error, run, policy)
    except Exception as mistaken:  # noqa: BLE001 - such as Snooze(-1): the run has to end somehow, as a failed attempt
        outcome = _outcome_of_error(mistaken, run, policy)
    if outcome.delay is None:
        return outcome
    return outcome._replace(delay=min(outcome.delay, LONGEST_DELAY) if has_run_at else None)


def _outcome_of_error(error: BaseException, run: Run, policy: RetryPolicy) -> Outcome:  # noqa: PLR0911 - one for each outcome
    match error:
        case HandlerAbandoned():
            return RELEASED
        case Snooze():
            return Outcome("released", seconds(error.delay, "Snooze(delay)"), cause=error)
        case Throttle():
            return Outcome("released", seconds(error.delay, "Throttle(until)"), throttle=error.per, cause=error)
        case Fail():
            return Outcome("failed", error=text_with_kind(error, error.reason), cause=error)
        case Cancel():
            return Outcome("cancelled", error=text_of(error.reason), cause=error)
    text = text_with_kind(error, error.error) if isinstance(error, Retry) else text_of(error)
    if run.attempt >= run.max_attempts:
        return Outcome("failed", error=text or text_of(error), cause=error)
    if isinstance(error, Retry) and error.delay is not None:
        return Outcome("retried", seconds(error.delay, "Retry(delay)"), text, error)
    delay = _ask_policy(policy, run, error)
    if delay is None:
        return Outcome("failed", error=text or text_of(error), cause=error)
    return Outcome("retried", delay, text, error)


def _ask_policy(policy: RetryPolicy, run: Run, error: BaseException) -> float | None:
    """Call the policy; a policy that fails itself must not cost the job its retry."""
    try:
        delay: Delay | None = copy_context().run(policy, run.attempt, error)
        return None if delay is None else seconds(delay, "the retry policy's delay")
    except Exception as mistaken:  # noqa: BLE001 - it is reported with the traceback of the handler's error
        said = "".join(traceback.format_exception(mistaken))
        note = f"the retry policy {policy!r} failed, using the default backoff:\n{said}"
        # A program may raise the same instance again and again.
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return Exponential()(run.attempt, error)


# -- statistics --------------------------------------------------------------------------------------------------------
# What has ended is counted here for ``QueueConfig(statistics=True)``, and written once a minute: a job costs no
# statement, and a process that is killed loses what it has counted since.


class MinuteCounts:
    """How many attempts have ended since the last write, by outcome and by how long they waited and ran.

    Callers hold the lock of the Consumer.
    """

    def __init__(self) -> None:
        self.since = time.monotonic()
        self._endings = dict.fromkeys(ENDINGS, 0)
        self._waits, self._runs = [0] * len(WAITS), [0] * len(RUNS)

    def __bool__(self) -> bool:
        return any(self._endings.values())

    def add(self, finished: Iterable[FinishedRun]) -> None:
        """Count runs that are settled; one that was released is no attempt."""
        endings, waits, runs = self._endings, self._waits, self._runs
        for one in finished:
            event = one.ended_as.event
            if event == "released":
                continue
            endings[event] += 1
            run = one.run
            if run.handler_started_at is None:
                continue
            if run.duration is not None:
                runs[bisect_left(BOUNDS, run.duration)] += 1
            # A job of a batch that is tried again by itself has waited for the whole batch as well.
            if run.due_at is not None and run.calls <= 1:
                waits[bisect_left(BOUNDS, run.handler_started_at - run.due_at)] += 1

    def add_rescued(self, *, retried: int, failed: int) -> None:
        """Count attempts whose worker has died: of jobs that are pending again, and of those that have failed."""
        self._endings["retried"] += retried
        self._endings["failed"] += failed

    def put_back(self, taken: MinuteCounts) -> None:
        """Add earlier counts that could not be written."""
        self.since = taken.since
        for name, number in taken._endings.items():
            self._endings[name] += number
        self._waits = [sum(both) for both in zip(self._waits, taken._waits, strict=True)]
        self._runs = [sum(both) for both in zip(self._runs, taken._runs, strict=True)]

    def values(self) -> dict[str, int | None]:
        """Return the values of the columns; None for nothing."""
        numbers = (*self._endings.values(), *self._waits, *self._runs)
        return {name: number or None for name, number in zip(COUNTED, numbers, strict=True)}
