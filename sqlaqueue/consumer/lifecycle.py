"""The log records of a Consumer's start, its shutdown and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.log import database_text, logger

if TYPE_CHECKING:
    from sqlaqueue.consumer.context import Shift


def log_started(shift: Shift, *, told: bool) -> None:
    """Log once which queue is served, its database, the concurrency, and how new jobs are found.

    :param told: whether the table in the database sends notifications.
    """
    if shift.said_start:
        return
    shift.said_start = True
    plan, where, worker_kind = shift.plan, database_text(shift.engine), "task" if shift.interrupts else "thread"
    poll = f"polling every {shift.crew.pace.poll_interval:g} s"
    mode = "draining" if shift.draining else "listening" if told else "polling"
    how = {"draining": "until no job is due", "listening": f"listening for notifications, {poll}", "polling": poll}
    strategy = plan.spec.strategy.name
    logger.info(
        "queue %s: started, %s, serves %s with %d worker %s%s, %s",
        plan.spec.name,
        strategy,
        where,
        plan.concurrency,
        worker_kind,
        "" if plan.concurrency == 1 else "s",
        how[mode],
        extra=shift.fields(
            "consumer_started",
            strategy=strategy,
            database=where,
            concurrency=plan.concurrency,
            mode=mode,
        ),
    )


def log_shutdown(shift: Shift, grace: float) -> None:
    """Log once how many jobs the shutdown waits for, and how long; nothing after a completed ``drain()``."""
    crew = shift.crew
    if shift.before_shutdown is not None:
        return
    running = sum(len(hand.unit) for hand in crew.at_work())
    waiting = max(0, len(crew.held()) - running)
    shift.before_shutdown = crew.jobs_ended, crew.jobs_released
    if shift.drained:
        return
    # Without handling signals, this run was not stopped by the one that was received.
    signal = signal_handlers.received if shift.handles_signals else None
    reason = signal or ("stop requested" if shift.error is None else type(shift.error).__name__)
    logger.info(
        "queue %s: %s: stopping, %s to finish within %g s, %s to release%s",
        shift.plan.spec.name,
        reason,
        _running(running),
        grace,
        _jobs(waiting),
        "; a second signal aborts" if signal and signal_handlers.next_signal_aborts else "",
        extra=shift.fields(
            "shutdown_started", signal=signal, count=running, running=running, waiting=waiting, grace=grace
        ),
    )


def log_grace_period_over(shift: Shift, grace: float) -> None:
    """Log how many jobs still run after the grace period."""
    running = sum(len(hand.unit) for hand in shift.crew.at_work())
    if running:
        logger.warning(
            "queue %s: the grace period of %g s has passed, releasing %s",
            shift.plan.spec.name,
            grace,
            _running(running),
            extra=shift.fields("grace_period_over", count=running, running=running, grace=grace),
        )


def log_stopped(shift: Shift) -> None:
    """Log how many runs were settled during the shutdown, and how many jobs were released."""
    crew = shift.crew
    if shift.drained:
        return
    ended_before, released_before = shift.before_shutdown or (0, 0)
    finished = crew.jobs_ended - ended_before
    # A transaction that a handler keeps open releases its jobs when it ends, at the latest with the process.
    held = len(crew.held()) if shift.plan.holds_transaction else 0
    released = crew.jobs_released - released_before + held
    logger.info(
        "queue %s: stopped, %s finished and %s released",
        shift.plan.spec.name,
        _jobs(finished),
        _jobs(released),
        extra=shift.fields("consumer_stopped", count=finished, finished=finished, released=released),
    )


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _running(number: int) -> str:
    return "1 running job" if number == 1 else f"{number} running jobs"
