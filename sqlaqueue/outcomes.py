"""How a run ends: a handler's result turned into what is written about the job. Pure, no I/O."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from sqlaqueue.backoff import Exponential, RetryPolicy, seconds
from sqlaqueue.exc import Cancel, Fail, Retry, Snooze
from sqlaqueue.spec import Run
from sqlaqueue.statements import delayed, error_text
from sqlaqueue.strategies import Settlement

logger = logging.getLogger("sqlaqueue")

Ending = Literal["completed", "retried", "failed", "cancelled", "released"]

_STATES: dict[Ending, Literal["completed", "pending", "failed", "cancelled"]] = {
    "completed": "completed",
    "retried": "pending",
    "failed": "failed",
    "cancelled": "cancelled",
    "released": "pending",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run ends."""

    ending: Ending
    delay: float | None = None
    """Seconds until the job is due again; None leaves its ``run_at``."""
    error: str | None = None
    """The text for ``last_error``."""
    cause: BaseException | None = None
    """What the handler raised, for events and the log."""

    def settlement(self, starts: int = 1) -> Settlement:
        """Return what is written: ``starts`` counts as attempts unless the job is given back."""
        return Settlement(
            _STATES[self.ending],
            starts=0 if self.ending == "released" else starts,
            run_at=None if self.delay is None else delayed(self.delay),
            error=None if self.error is None else sa.literal(error_text(self.error), sa.Text()),
        )



class Abandoned(BaseException):
    """A Consumer that stops gave a running handler up; its job goes back with the attempt."""


COMPLETED = Outcome("completed")
RELEASED = Outcome("released")


def judge(error: BaseException | None, run: Run, policy: RetryPolicy, *, has_run_at: bool = True) -> Outcome:
    """Return how a run ends whose handler returned (``error`` is None) or raised.

    :param policy: gives the delay before the next attempt, or None for none.
    :param has_run_at: whether the model can hold a job back; without, a job runs again at once.
    """
    if error is None:
        return COMPLETED
    outcome = _judge_raised(error, run, policy)
    if not has_run_at and outcome.delay is not None:
        return Outcome(outcome.ending, None, outcome.error, outcome.cause)
    return outcome


def _judge_raised(error: BaseException, run: Run, policy: RetryPolicy) -> Outcome:
    match error:
        case Abandoned():
            return RELEASED
        case Snooze():
            return Outcome("released", seconds(error.delay, "Snooze(delay)"), cause=error)
        case Fail():
            return Outcome("failed", error=error.reason, cause=error)
        case Cancel():
            return Outcome("cancelled", error=error.reason, cause=error)
    text = error.error if isinstance(error, Retry) else error_text(error)
    if run.attempt >= run.max_attempts:
        return Outcome("failed", error=text or error_text(error), cause=error)
    if isinstance(error, Retry) and error.delay is not None:
        return Outcome("retried", seconds(error.delay, "Retry(delay)"), text, error)
    delay = _ask(policy, run, error)
    if delay is None:
        return Outcome("failed", error=text or error_text(error), cause=error)
    return Outcome("retried", delay, text, error)


def _ask(policy: RetryPolicy, run: Run, error: BaseException) -> float | None:
    """Ask the policy; a policy that fails itself must not cost the job its retry."""
    try:
        delay = policy(run.attempt, error)
        return None if delay is None else seconds(delay, "the retry policy's delay")
    except Exception:
        logger.exception("the retry policy %r failed for job %s; using the default backoff", policy, run.key)
        return Exponential()(run.attempt, error)
