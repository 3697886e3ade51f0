"""What outcome a run has: a handler's exception turned into completed, retried, failed, cancelled or released.

Pure, no I/O.
"""

from __future__ import annotations

import traceback
from contextvars import copy_context
from dataclasses import replace

from sqlaqueue.consumer.configuration.settings import ConsumerSettings
from sqlaqueue.consumer.core.database_errors import is_conflict
from sqlaqueue.consumer.core.error_text import text_of, text_with_kind
from sqlaqueue.consumer.settling.conflict_delays import MOST_AT_ONCE, ConflictDelays
from sqlaqueue.consumer.settling.outcomes import COMPLETED, RELEASED, HandlerAbandoned, NotSettled, Outcome
from sqlaqueue.exc import Cancel, ConfigurationError, Fail, Retry, Snooze, Throttle
from sqlaqueue.queue.retry_policies import Delay, Exponential, RetryPolicy, seconds
from sqlaqueue.queue.run import Key, Run
from sqlaqueue.queue.spec import QueueSpec

LONGEST_DELAY = 100 * 365 * 86400.0
"""Seconds; a later moment may not fit into the database's calendar."""


class OutcomeRules:
    """Turns the results of handlers into outcomes.

    :param marks_rows: whether a quarantined job is marked in its row.
    """

    def __init__(self, settings: ConsumerSettings, conflicts: ConflictDelays, *, marks_rows: bool) -> None:
        self._settings, self._conflicts, self._marks_rows = settings, conflicts, marks_rows
        self._disconnected: set[Key] = set()
        """Jobs that have lost a connection, where rows cannot be marked."""

    def outcome(self, error: BaseException | None, run: Run) -> Outcome:
        """Return the outcome of a run whose handler returned (``error`` is None) or raised."""
        spec = self._settings.spec
        if error is not None and (is_conflict(error) or isinstance(error, NotSettled)):
            times, delay = self._conflicts.record(run.key)
            if spec.has("run_at") or times <= MOST_AT_ONCE:
                return Outcome("released", delay if spec.has("run_at") else None, cause=error)
        if isinstance(error, Throttle):
            error = _checked_throttle(spec, error)
        outcome = outcome_of(error, run, self._settings.retry_policy, has_run_at=spec.has("run_at"))
        if outcome.event == "cancelled" and spec.config.states.cancelled is None:
            # The table has no value for it, and the run has to end: else it would be claimed again for ever.
            return replace(outcome, event="failed")
        return outcome

    def disconnected(self, error: BaseException, run: Run, *, alone: bool) -> Outcome:
        """Return the outcome of a run whose connection was lost.

        The server may have been restarted, or the job ends connections. So it costs no attempt, and from now on the job
        runs by itself; if it did so already, the attempt counts.
        """
        outcome = self.outcome(error, run) if alone else Outcome("released", cause=error)
        return replace(outcome, quarantine=outcome.state == "pending")

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
    if error.rate in known:
        return error
    named = " and ".join(repr(", ".join(per)) if per else "None" for per in dict.fromkeys(known)) or "none"
    msg = (
        f"{spec.model.__name__}: Throttle(rate={', '.join(error.rate) or None!r}): the queue has no rate of this key; "
        f"it has {named}"
    )
    mistake = ConfigurationError(msg)
    mistake.__cause__ = error
    return mistake


def outcome_of(error: BaseException | None, run: Run, policy: RetryPolicy, *, has_run_at: bool = True) -> Outcome:
    """Return the outcome of a run whose handler returned (``error`` is None) or raised; never raise.

    :param policy: gives the delay before the next attempt, or None for none.
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
    return replace(outcome, delay=min(outcome.delay, LONGEST_DELAY) if has_run_at else None)


def _outcome_of_error(error: BaseException, run: Run, policy: RetryPolicy) -> Outcome:  # noqa: PLR0911 - one for each outcome
    match error:
        case HandlerAbandoned():
            return RELEASED
        case Snooze():
            return Outcome("released", seconds(error.delay, "Snooze(delay)"), cause=error)
        case Throttle():
            return Outcome("released", seconds(error.delay, "Throttle(until)"), throttle=error.rate, cause=error)
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
