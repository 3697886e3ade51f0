"""Maintenance tasks for jobs that wait in this process while every worker is busy: pass on, release or settle them."""

from __future__ import annotations

import time

from sqlaqueue.consumer.claiming.batch_sizer import BLOCKED, LATE, LONGEST_WAIT
from sqlaqueue.consumer.claiming.job_buffer import CallGroup, has_waited, runs_in
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.executor import Executor
from sqlaqueue.consumer.executing.leased import pass_on
from sqlaqueue.consumer.executing.report import Report, report
from sqlaqueue.consumer.executing.settle_finished import settle_finished, settle_postponed
from sqlaqueue.consumer.maintenance.cancellations import take_requests
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.settling.outcomes import RELEASED, CancellationRequested, FinishedRun
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
        # Before the release: the next consumer claims the job after the request, and ignores it as one for an old run.
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


def late_groups(context: ConsumerContext, now: float) -> list[CallGroup]:
    """Return the groups that would wait here for too long before they begin, while other consumers may be idle."""
    # Not those of a batch that failed: it is being tried job by job, and would be claimed as a batch again.
    busy = context.in_flight.busy()
    durations = [now - one.started for one in busy]
    # Under flow control they take the places of jobs that could begin elsewhere.
    blocked = BLOCKED if context.flow_control else LONGEST_WAIT
    all_busy = len(busy) >= context.settings.concurrency and min(durations) >= blocked
    claimed_by = now if all_busy or context.stopping else now - LATE
    with context.lock:
        groups = [
            *context.buffer.groups(),
            *(group for one in context.in_flight.executors() for group in one.waiting_groups()),
        ]
        return [group for group in groups if has_waited(group, claimed_by)]


def release_late(context: ConsumerContext, now: float) -> int:
    """Release the jobs of :func:`late_groups`, and return how many there are."""
    with context.lock:
        late = late_groups(context, now)
        context.buffer.remove(late)
        for executor in context.in_flight.executors():
            executor.remove(late)
        runs, cancelled = runs_in(late), CancellationRequested()
        # A request to cancel would be forgotten with the run.
        outcomes = [
            context.outcome_rules.outcome(cancelled, run) if run.key in context.cancelled else RELEASED for run in runs
        ]
        finished = [FinishedRun(run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]
        report(context, Report(unsettled=finished))
        return len(runs)
