"""The log records of a Consumer's start, its shutdown and its end."""

from __future__ import annotations

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.log import database_text, logger


def log_started(context: ConsumerContext, *, told: bool) -> None:
    """Log once which queue is served, its database, the concurrency, and how new jobs are found.

    :param told: whether the table in the database sends notifications.
    """
    if context.start_logged:
        return
    context.start_logged = True
    settings, where = context.settings, database_text(context.engine)
    worker_kind = "task" if context.runner.can_interrupt else "thread"
    poll = f"polling every {settings.poll_interval:g} s"
    mode = "draining" if context.draining else "listening" if told else "polling"
    how = {"draining": "until no job is due", "listening": f"listening for notifications, {poll}", "polling": poll}
    strategy = context.spec.strategy.name
    logger.info(
        "queue %s: started, %s, serves %s with %d worker %s%s, %s",
        context.spec.name,
        strategy,
        where,
        settings.concurrency,
        worker_kind,
        "" if settings.concurrency == 1 else "s",
        how[mode],
        extra=context.log_fields(
            "consumer_started",
            strategy=strategy,
            database=where,
            concurrency=settings.concurrency,
            mode=mode,
        ),
    )


def log_shutdown(context: ConsumerContext, grace: float) -> None:
    """Log once how many jobs the shutdown waits for, and how long; nothing after a completed ``drain()``."""
    if context.before_shutdown is not None:
        return
    running = len(context.in_flight.running())
    waiting = max(0, len(context.claimed_runs()) - running)
    context.before_shutdown = context.runs_ended, context.runs_released
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


def log_grace_period_over(context: ConsumerContext, grace: float) -> None:
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


def log_stopped(context: ConsumerContext) -> None:
    """Log how many runs were settled during the shutdown, and how many jobs were released."""
    if context.drained:
        return
    ended_before, released_before = context.before_shutdown or (0, 0)
    finished = context.runs_ended - ended_before
    # A transaction that a handler keeps open releases its jobs when it ends, at the latest with the process.
    held = len(context.claimed_runs()) if context.settings.holds_transaction else 0
    released = context.runs_released - released_before + held
    logger.info(
        "queue %s: stopped, %s finished and %s released",
        context.spec.name,
        _jobs(finished),
        _jobs(released),
        extra=context.log_fields("consumer_stopped", count=finished, finished=finished, released=released),
    )


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _running(number: int) -> str:
    return "1 running job" if number == 1 else f"{number} running jobs"
