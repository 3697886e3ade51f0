"""The shutdown of a run: the grace period for running handlers, then what is settled, released and logged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from sqlaqueue.consumer.claiming.job_buffer import runs_of
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import is_connection_lost
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.held import discard_entries
from sqlaqueue.consumer.executing.report import release
from sqlaqueue.consumer.executing.settle_finished import settle_finished, settle_postponed
from sqlaqueue.consumer.in_flight import RunningExecutor
from sqlaqueue.consumer.maintenance.heartbeat import deregister
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.exc import HandlerNotStopped
from sqlaqueue.log import logger
from sqlaqueue.queue.run import key_text

HURRY = 5.0
"""Seconds for which anything waits for the database once the grace period is over, or all handlers have ended."""

LONGEST_END = 6.0
"""Seconds for the library's own threads or tasks to end then."""

SHUTDOWN = 8.0
"""Seconds for what is settled and released last. If the database does not answer, leases give the jobs back."""

_MOST_NAMED = 3


class GracePeriod:
    """The time for which the running handlers of a stopping consumer may continue."""

    def __init__(self, context: ConsumerContext) -> None:
        self._context, self._seconds = context, context.settings.grace
        self._deadline: float | None = None
        self._ended_before = self._released_before = 0

    def begin(self) -> None:
        """Begin the grace period, unless it has begun."""
        if self._deadline is None:
            context = self._context
            self._deadline = time.monotonic() + self._seconds
            self._ended_before, self._released_before = context.runs_ended, context.runs_released
            _log_shutdown(context, self._seconds)

    def left(self) -> float:
        """Return the seconds until it ends; inf before it begins."""
        return float("inf") if self._deadline is None else self._deadline - time.monotonic()

    def end(self) -> None:
        """Abandon the handlers that still run: they are interrupted if that is possible, and their results refused."""
        _log_grace_period_over(self._context, self._seconds)
        for executor in self._context.in_flight.busy():
            executor.abandoned = True
            executor.interrupt()

    def log_stopped(self) -> None:
        """Log how many runs have ended since it began, and how many jobs were released."""
        context = self._context
        if context.drained:
            return
        finished = context.runs_ended - self._ended_before
        # A transaction that a handler keeps open releases its jobs when it ends, at the latest with the process.
        held = len(context.claimed_runs()) if context.settings.holds_transaction else 0
        released = context.runs_released - self._released_before + held
        logger.info(
            "queue %s: stopped; during the stop %s ended, and %s %s released",
            context.spec.name,
            "1 run" if finished == 1 else f"{finished} runs",
            _jobs(released),
            "was" if released == 1 else "were",
            extra=context.log_fields("consumer_stopped", count=finished, finished=finished, released=released),
        )


def shut_down(context: ConsumerContext) -> Routine:
    """Settle finished runs, release the others, and deregister; the workers have ended, or are abandoned."""
    if context.settings.holds_transaction:
        # Their transactions end when their handlers do, or the process; these jobs must not look as if they had killed
        # it.
        context.journal.discard_all()
    else:
        release(context, context.forget_claimed())
    steps: list[Callable[[], Routine]] = [
        partial(discard_entries, context),
        partial(settle_finished, context, wait=False),
        partial(settle_postponed, context, last=True),
    ]
    if context.registered:
        steps.append(partial(_deregister, context))
    for step in steps:
        try:
            try:
                yield from step()
            except Exception as error:
                if not is_connection_lost(error):
                    raise
                # That of the pool may have been lost long before, and the next one is new.
                yield from step()
        except Exception:
            logger.exception(
                "%s: could not settle at the end; the jobs run again when their leases have expired",
                context.name,
                extra=context.log_fields("not_settled"),
            )


def not_stopped_error(context: ConsumerContext, left: Sequence[RunningExecutor]) -> HandlerNotStopped | None:
    """Return the error of a run that ends although handlers go on; None if all have ended.

    :param left: the executors whose handler runs.
    """
    calls = [(list(one.group), time.monotonic() - one.started) for one in left]
    names = [
        f"{context.handler_name(jobs[0])} (job {', '.join(key_text(run.key) for run in runs_of(jobs)[:_MOST_NAMED])}, "
        f"for {seconds:.0f} s)"
        for jobs, seconds in calls
        if jobs
    ]
    if not names:
        return None
    kind = "AsyncConsumer" if context.runner.can_interrupt else "Consumer"
    msg = (
        f"{kind}({context.spec.model.__name__}, ...): stopped, but {', '.join(names)} goes on after the grace "
        f"period of {context.settings.grace:g} s, until the process ends; its jobs are released. Give what it calls a "
        f"timeout, or {kind}(grace=...) more seconds"
    )
    return HandlerNotStopped(msg, names)


def _deregister(context: ConsumerContext) -> Routine:
    yield ExecuteInOwnSession(deregister, (context,))


# -- the log ---------------------------------------------------------------------------------------------------


def _log_shutdown(context: ConsumerContext, grace: float) -> None:
    """Log how many jobs the shutdown waits for, and how long; nothing after a completed ``drain()``."""
    running = len(context.in_flight.running())
    waiting = max(0, len(context.claimed_runs()) - running)
    if context.drained:
        return
    # Without handling signals, this run was not stopped by the one that was received.
    signal = signal_handlers.received if context.handles_signals else None
    reason = signal or ("stop requested" if context.error is None else type(context.error).__name__)
    logger.info(
        "queue %s: %s: stopping, %s to finish within %g s, %s to release%s",
        context.spec.name,
        reason,
        _running(running),
        grace,
        _jobs(waiting),
        "; a second signal aborts" if signal and signal_handlers.next_signal_aborts else "",
        extra=context.log_fields(
            "shutdown_started", signal=signal, count=running, running=running, waiting=waiting, grace=grace
        ),
    )


def _log_grace_period_over(context: ConsumerContext, grace: float) -> None:
    """Log how many jobs still run after the grace period."""
    running = len(context.in_flight.running())
    if running:
        logger.warning(
            "queue %s: the grace period of %g s has passed, releasing %s",
            context.spec.name,
            grace,
            _running(running),
            extra=context.log_fields("grace_period_over", count=running, running=running, grace=grace),
        )


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _running(number: int) -> str:
    return "1 running job" if number == 1 else f"{number} running jobs"
