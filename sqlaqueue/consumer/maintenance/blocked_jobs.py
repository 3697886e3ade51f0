"""Maintenance tasks for jobs that wait in this process while every worker is busy: pass on, release or settle them."""

from __future__ import annotations

import time

from sqlaqueue.consumer.claiming.batch_sizer import BLOCKED
from sqlaqueue.consumer.claiming.job_buffer import runs_in
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.executor import Executor
from sqlaqueue.consumer.executing.leased import pass_on
from sqlaqueue.consumer.executing.report import late_groups, release_late
from sqlaqueue.consumer.executing.settle_finished import settle_finished, settle_postponed
from sqlaqueue.consumer.maintenance.cancellations import take_requests
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.log import logger


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
