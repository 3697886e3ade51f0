"""Which outcome a run has under the rules of one Consumer: attempts, conflicts, lost connections. No I/O."""

from __future__ import annotations

from dataclasses import replace

from sqlaqueue.consumer.core.transient_errors import is_conflict
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.consumer.settling.conflicts import MOST_AT_ONCE, Conflicts
from sqlaqueue.consumer.settling.outcomes import NotSettled, Outcome, judge
from sqlaqueue.keys import Key
from sqlaqueue.queue.run import Run


class Judge:
    """Turns the results of handlers into outcomes.

    :param marks_rows: whether a quarantined job is marked in its row.
    """

    def __init__(self, settings: ConsumerSettings, conflicts: Conflicts, *, marks_rows: bool) -> None:
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
        outcome = judge(error, run, self._settings.retry_policy, has_run_at=spec.has("run_at"))
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
