"""How a run ends: its outcome, and the exceptions that decide it. Pure, no I/O."""

from __future__ import annotations

import contextlib
import traceback
from asyncio import CancelledError
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from sqlaqueue.consumer.core.database_errors import is_connect_error, is_connection_lost
from sqlaqueue.exc import Cancel, HandlerSignal, JobTimeout
from sqlaqueue.queue.run import Key, Run
from sqlaqueue.statements.verbs import delayed
from sqlaqueue.strategies import Settlement
from sqlaqueue.strategies.twins import REASON

Ending = Literal["completed", "retried", "failed", "cancelled", "released"]
State = Literal["completed", "pending", "failed", "cancelled"]

_STATES: dict[Ending, State] = {
    "completed": "completed",
    "retried": "pending",
    "failed": "failed",
    "cancelled": "cancelled",
    "released": "pending",
}


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
    throttle: tuple[str, ...] | None = None
    """The attributes of the rates whose key is held back for as long as the job; None for none."""

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
    """The claim is known to be committed; a run of another claim is not reported."""
    twin: str | None = None
    """The key of the twin for which the job was cancelled instead of made pending."""

    @property
    def ended_as(self) -> Outcome:
        """How the run has ended in the database."""
        if self.twin is None:
            return self.outcome
        error = f"{REASON}: {self.twin}"
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

    :param gone: whether the connection of its session is gone.
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
