"""Maintenance of jobs that get stuck in this process: behind a slow handler, beyond a timeout, or unsettled."""

from __future__ import annotations

import time
from functools import partial

from sqlaqueue.consumer.claiming.batch_sizer import BLOCKED
from sqlaqueue.consumer.claiming.job_buffer import runs_in
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.executor import Executor
from sqlaqueue.consumer.executing.leased import pass_on
from sqlaqueue.consumer.executing.report import Report, late_groups, release, release_late, report
from sqlaqueue.consumer.executing.settle_finished import settle_finished, settle_postponed
from sqlaqueue.consumer.maintenance.cancellations import take_requests
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.settling.outcomes import FinishedRun
from sqlaqueue.consumer.settling.settle import SettledEach
from sqlaqueue.exc import JobTimeout
from sqlaqueue.keys import key_text, key_value
from sqlaqueue.log import logger


def end_overdue(maintenance: Maintenance, now: float) -> Routine:
    """End the runs whose handlers have exceeded the timeout and cannot be interrupted; their results are refused."""
    context = maintenance.context
    if context.runner.can_interrupt:
        return
    timeout = context.settings.timeout
    late = context.in_flight.take_overdue(now)
    if late and not context.settings.holds_transaction:
        error = JobTimeout(f"the handler ran for longer than {timeout:g} seconds")
        finished = [FinishedRun(run, context.judge.outcome(error, run)) for run in late]
        # A row that its handler has locked is settled when the handler returns.
        settle = partial(context.settler.settle_each, wait=False)
        result: SettledEach = yield ExecuteInOwnSession(settle, (finished,))
        unsettled = [*result.stuck, *result.later]
        for one in unsettled:
            key = one.run.key
            extra = context.log_fields("timed_out", job_key=key_value(key), attempt=one.run.attempt)
            text = "%s: job %s exceeded its timeout of %g s, and cannot be settled before its handler returns"
            logger.warning(text, context.name, key_text(key), timeout, extra=extra)
        settled = [one for one in finished if one not in [*result.lease_lost, *unsettled]]
        report(context, Report(settled=settled, lease_lost=result.lease_lost))
    if context.in_flight.all_timed_out:
        # No worker is left to run these, and their leases would be extended for as long as the handlers hang.
        release(context, context.forget_waiting())


def pass_on_blocked(maintenance: Maintenance, now: float) -> Routine:
    """Give other workers the jobs that wait behind a handler which takes longer than expected."""
    context = maintenance.context
    if context.settings.concurrency > 1 and not context.settings.holds_transaction:
        for executor in context.in_flight.busy():
            if isinstance(executor, Executor) and executor.blocks(now, BLOCKED):
                yield from pass_on(context, executor)


def release_waiting(maintenance: Maintenance, now: float) -> Routine:
    """Release the jobs that would wait here for too long before they begin, for other consumers."""
    context = maintenance.context
    if context.settings.holds_transaction:
        return
    late = runs_in(late_groups(context, now))
    if late:
        # A request to cancel is meant for this run: the next consumer of the job would take it for an old one.
        requested = yield ExecuteInOwnSession(take_requests, (context, late))
        context.request_cancellation(requested, time.monotonic())
        number = release_late(context, now)
        extra = context.log_fields("jobs_released", count=number)
        logger.info("%s: released %d jobs that would have waited for its handlers", context.name, number, extra=extra)
        yield from settle_finished(context, wait=False)


def settle_overdue(maintenance: Maintenance, now: float) -> Routine:
    """Settle the finished runs that wait while every worker is busy with a long handler."""
    context = maintenance.context
    # Without waiting: a locked row must not keep the leases of all others from being extended.
    if context.completions.is_overdue(now):
        yield from settle_finished(context, wait=False)
    if context.completions.postponed.is_due(now):
        yield from settle_postponed(context)
