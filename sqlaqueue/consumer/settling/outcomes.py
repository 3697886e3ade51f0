"""How a run ends: a handler's result turned into what is written about the job. Pure, no I/O."""

from __future__ import annotations

import traceback
from asyncio import CancelledError
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import sqlalchemy as sa

from sqlaqueue.consumer.core.error_text import text_of, text_with_kind
from sqlaqueue.consumer.core.transient_errors import is_connect_error, is_connection_lost
from sqlaqueue.exc import Cancel, Fail, HandlerSignal, JobTimeout, Retry, Snooze
from sqlaqueue.keys import Key
from sqlaqueue.queue.retry_policies import Delay, Exponential, RetryPolicy, seconds
from sqlaqueue.queue.run import Run
from sqlaqueue.statements.settle import delayed
from sqlaqueue.strategies import Settlement

Ending = Literal["completed", "retried", "failed", "cancelled", "released"]
State = Literal["completed", "pending", "failed", "cancelled"]

_STATES: dict[Ending, State] = {
    "completed": "completed",
    "retried": "pending",
    "failed": "failed",
    "cancelled": "cancelled",
    "released": "pending",
}

LONGEST_DELAY = 100 * 365 * 86400.0
"""Seconds; a later moment may not fit into the database's calendar."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run ends."""

    event: Ending
    """The name of the event that reports it."""
    delay: float | None = None
    """Seconds until the job is due again; None leaves its ``run_at``."""
    error: str | None = None
    """The text for ``last_error``."""
    cause: BaseException | None = None
    """The handler's exception, for events and the log."""
    quarantine: bool = False
    """The job runs by itself from now on."""

    @property
    def state(self) -> State:
        """The state that follows."""
        return _STATES[self.event]

    def settlement(self, starts: int = 1) -> Settlement:
        """Return what is written: ``starts`` counts as attempts unless the job is released."""
        return Settlement(
            self.state,
            starts=0 if self.event == "released" else starts,
            quarantine=self.quarantine,
            run_at=None if self.delay is None else delayed(self.delay),
            error=None if self.error is None else sa.literal(self.error, sa.Text()),
        )


class HandlerAbandoned(BaseException):
    """The grace period is over and the handler still runs: its job is released with the attempt."""


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
    """The claim is known to be committed; a run of another claim is not reported."""


def applies_to_batch(error: BaseException) -> bool:
    """Return whether the exception of a batch handler is about all of its jobs, so that none is tried by itself."""
    return decides_outcome(error) and not isinstance(error, CancellationRequested)


def decides_outcome(error: BaseException | None) -> bool:
    """Return whether an exception says how the run is to end, whatever else has happened."""
    return isinstance(error, HandlerSignal | JobTimeout | HandlerAbandoned | NotSettled)


def is_disconnected(error: BaseException, gone: bool) -> bool:  # noqa: FBT001 - both say the same
    """Return whether a run ended because its connection was lost, or could not be made.

    A handler that gave a statement up has ended the connection itself.

    :param gone: whether the connection of its session is gone.
    """
    if is_connection_lost(error) or is_connect_error(error):
        return True
    return gone and not decides_outcome(error) and not isinstance(error, TimeoutError | CancelledError)


def caught(error: BaseException) -> BaseException:
    """Return a handler's exception. To be called at once: without memory not even a socket can be read."""
    if isinstance(error, MemoryError):
        # The objects that fill the memory are referenced by the handler's frames.
        traceback.clear_frames(error.__traceback__)
    return error


def judge(error: BaseException | None, run: Run, policy: RetryPolicy, *, has_run_at: bool = True) -> Outcome:
    """Return the outcome of a run whose handler returned (``error`` is None) or raised; never raise.

    :param policy: gives the delay before the next attempt, or None for none.
    :param has_run_at: whether the model can delay a job; without, a job runs again at once.
    """
    if error is None:
        return COMPLETED
    try:
        outcome = _judge_raised(error, run, policy)
    except Exception as mistaken:  # noqa: BLE001 - such as Snooze(-1): the run has to end somehow, as a failed attempt
        outcome = _judge_raised(mistaken, run, policy)
    if outcome.delay is None:
        return outcome
    return replace(outcome, delay=min(outcome.delay, LONGEST_DELAY) if has_run_at else None)


def _judge_raised(error: BaseException, run: Run, policy: RetryPolicy) -> Outcome:  # noqa: PLR0911 - one for each outcome
    match error:
        case HandlerAbandoned():
            return RELEASED
        case Snooze():
            return Outcome("released", seconds(error.delay, "Snooze(delay)"), cause=error)
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
        delay: Delay | None = policy(run.attempt, error)
        return None if delay is None else seconds(delay, "the retry policy's delay")
    except Exception as mistaken:  # noqa: BLE001 - it is reported with the traceback of the handler's error
        said = "".join(traceback.format_exception(mistaken))
        note = f"the retry policy {policy!r} failed, using the default backoff:\n{said}"
        # A program may raise the same instance again and again.
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return Exponential()(run.attempt, error)
