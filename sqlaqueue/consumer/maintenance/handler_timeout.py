"""Handlers that exceed the Consumer's timeout: they are noticed, logged, and their runs ended if possible.

A task of asyncio is cancelled by its runner. A thread cannot be interrupted, so its runs are ended under it, and the
result of the handler is refused when it returns.
"""

from __future__ import annotations

import logging
from functools import partial

from sqlaqueue.consumer.claiming.job_buffer import runs_of
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.report import Report, release, report
from sqlaqueue.consumer.in_flight import RunningExecutor
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.settling.outcomes import FinishedRun
from sqlaqueue.consumer.settling.settle import SettledEach
from sqlaqueue.log import logger
from sqlaqueue.queue.run import Run, key_text, key_value


def end_overdue(maintenance: Maintenance, now: float) -> Routine:
    """End the runs whose handlers have exceeded the timeout and cannot be interrupted; their results are refused."""
    context = maintenance.context
    if context.runner.can_interrupt:
        return
    timeout = context.settings.timeout
    late = record_overdue(context, now)
    if late and not context.settings.holds_transaction:
        error = context.settings.timeout_error()
        finished = [FinishedRun(run, context.outcome_rules.outcome(error, run)) for run in late]
        # A row that its handler has locked is settled when the handler returns.
        settle = partial(context.settler.settle_each, wait=False)
        result: SettledEach = yield ExecuteInOwnSession(settle, (finished,))
        unsettled = [*result.refused, *result.later]
        for one in unsettled:
            key = one.run.key
            extra = context.log_fields("timed_out", job_key=key_value(key), attempt=one.run.attempt)
            text = "%s: job %s exceeded its timeout of %g s, and cannot be settled before its handler returns"
            logger.warning(text, context.name, key_text(key), timeout, extra=extra)
        settled = [one for one in finished if one not in [*result.lease_lost, *unsettled]]
        report(context, Report(settled=settled, lease_lost=result.lease_lost))
    if _all_timed_out(context) and not context.settings.holds_transaction:
        # No worker is left to run these, and their leases would be extended for as long as the handlers hang. The jobs
        # of a held batch run or return with its transaction, which may have deleted their rows.
        release(context, context.forget_waiting())


def record_overdue(context: ConsumerContext, now: float) -> list[Run]:
    """Record which handlers have just exceeded the timeout, and return their runs."""
    timeout = context.settings.timeout
    if timeout is None:
        return []
    with context.lock:
        late = [one for one in context.in_flight.busy() if not one.timed_out and now - one.started > timeout]
        for one in late:
            record_timeout(context, one)
        return [run for one in late for run in runs_of(one.group)]


def record_timeout(context: ConsumerContext, executor: RunningExecutor) -> None:
    """Record and log that a handler has exceeded the timeout; the second time, that it ignores its cancellation."""
    if executor.timed_out:
        _log_ignored(context, executor)
        return
    executor.timed_out = True
    keys = [run.key for run in runs_of(executor.group)]
    context.quarantine.end(keys)
    # The outcome of a leased run is logged in a moment; that of a held one, not before its handler returns.
    level = logging.WARNING if context.settings.holds_transaction else logging.DEBUG
    for key in keys:
        text = "job %s of queue %s exceeded its timeout of %g s; the result of its handler is refused"
        extra = context.log_fields("timed_out", job_key=key_value(key))
        logger.log(level, text, key_text(key), context.spec.name, context.settings.timeout, extra=extra)


def _log_ignored(context: ConsumerContext, executor: RunningExecutor) -> None:
    for run in runs_of(executor.group):
        text = (
            "job %s of queue %s was cancelled at its timeout of %g s, and its handler goes on; it is cancelled again, "
            "and the job stays claimed until it ends"
        )
        extra = context.log_fields("cancellation_ignored", job_key=key_value(run.key), attempt=run.attempt)
        logger.warning(text, key_text(run.key), context.spec.name, context.settings.timeout, extra=extra)


def _all_timed_out(context: ConsumerContext) -> bool:
    """Return whether every handler that may run at once has exceeded the timeout, and goes on."""
    return sum(one.timed_out for one in context.in_flight.busy()) >= context.settings.concurrency
