"""Maintenance for this process's own jobs: cancellations, timeouts, and jobs that wait while all workers are busy."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executor import Executor
from sqlaqueue.consumer.in_flight import CallGroup, groups_except, has_waited, runs_in
from sqlaqueue.consumer.leased import Report, apply, pass_on, release, settle_finished, settle_postponed
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.outcomes import RELEASED, CancellationRequested, FinishedRun
from sqlaqueue.consumer.pace import BLOCKED, LATE, LONGEST_IN_BUFFER
from sqlaqueue.consumer.settle import SettledEach
from sqlaqueue.log import logger
from sqlaqueue.mapping.runs import runs_of
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.run import Key, Run, key_text, key_value, keys_by_token
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sql.portable import seconds_between, ticking_clock


def cancel_requested(maintenance: Maintenance, now: float) -> Routine:
    context, timers = maintenance.context, maintenance.timers
    # Reset before the state is read: a request that arrives later sets it again, and the next execution queries it.
    notified, context.polls.cancellation_requested = context.polls.cancellation_requested, False
    since = context.busy_since
    if since is None:
        timers.cancel("cancellations")
        return
    timers.start("cancellations", since + context.intervals.cancellations())
    if not (notified or timers.is_due("cancellations", now)):
        return
    timers.set("cancellations", now + context.intervals.cancellations())
    runs = context.claimed_runs()
    if runs:
        yield ExecuteInOwnSession(take_requests, (context, runs))


def take_requests(session: Session, context: ConsumerContext, runs: Sequence[Run]) -> None:
    """Delete the requests to cancel ``runs``, and cancel those."""
    spec, settings = context.spec, context.settings
    if CONTROL not in spec.side_tables or not runs:
        return
    # All runs of one claim are on one shard, and a statement locks rows on one shard only.
    one_shard = settings.distribution is None
    groups = [[run.key for run in runs]] if one_shard else [*keys_by_token(runs).values()]
    bind = settings.bind_arguments
    take = _take if engine_of(session.connection(bind_arguments=bind).dialect) is None else _take_in_steps
    rows = [row for keys in groups for row in take(session, spec, keys, bind)]
    # Before the commit: a run that ended after it, and was not cancelled yet, would be tried again, and its request be
    # lost.
    context.request_cancellation(((tuple(row[:-1]), float(row[-1])) for row in rows), time.monotonic())
    session.commit()


def _take(session: Session, spec: QueueSpec, keys: Sequence[Key], bind: dict[str, Any]) -> Sequence[Any]:
    """Delete the requests to cancel jobs, and return the keys of the jobs with the ages of the requests."""
    control = spec.side_tables[CONTROL]
    mine = sa.select(*spec.keys).where(spec.key_in(spec.keys, keys)).subquery("sqlaqueue_mine")
    key = key_json([mine.c[column.key] for column in spec.keys])
    age = seconds_between(control.c.created_at, ticking_clock())
    # A request that is not committed yet must not block the leases that the same thread extends.
    asked = (
        sa.select(
            control.c.queue.label("sqlaqueue_queue"),
            control.c.key.label("sqlaqueue_key"),
            *mine.c,
            # Citus refuses a function of time in RETURNING. It has no queues that notify.
            *([] if spec.config.notify else [age.label("sqlaqueue_age")]),
        )
        .where(control.c.queue == spec.name, control.c.key == key)
        .with_for_update(of=control, skip_locked=True)
        .cte("sqlaqueue_asked")
    )
    taken: Any = (
        sa.delete(control)
        .where(control.c.queue == asked.c.sqlaqueue_queue, control.c.key == asked.c.sqlaqueue_key)
        .returning(*(asked.c[column.key] for column in spec.keys), age if spec.config.notify else asked.c.sqlaqueue_age)
    )
    return session.execute(taken, bind_arguments=bind).all()


def _take_in_steps(session: Session, spec: QueueSpec, keys: Sequence[Key], bind: dict[str, Any]) -> Sequence[Any]:
    """Do what :func:`_take` does for an engine whose RETURNING has no columns of other tables."""
    control = spec.side_tables[CONTROL]
    age = seconds_between(control.c.created_at, ticking_clock())
    asked = sa.select(*spec.keys, age).where(spec.key_in(spec.keys, keys), control.c.key == key_json(spec.keys))
    rows = session.execute(asked.where(control.c.queue == spec.name), bind_arguments=bind).all()
    if rows:
        mine = sa.select(key_json(spec.keys)).where(spec.key_in(spec.keys, [tuple(row[:-1]) for row in rows]))
        taken = sa.delete(control).where(control.c.queue == spec.name, control.c.key.in_(mine))
        session.execute(taken, bind_arguments=bind)
    return rows


# -- handler timeout ---------------------------------------------------------------------------------------------------
# A task of asyncio is cancelled by its runner. A thread cannot be interrupted, so its runs are ended under it, and
# the result of the handler is refused when it returns.


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
        settle = partial(context.settler.settle_each, otherwise=False)
        result: SettledEach = yield ExecuteInOwnSession(settle, (finished,))
        unsettled = [*result.refused, *result.later]
        for one in unsettled:
            key = one.run.key
            extra = context.log_fields("timed_out", job_key=key_value(key), attempt=one.run.attempt)
            text = "queue %s: job %s exceeded its timeout of %g s, and cannot end before its handler returns"
            logger.warning(text, context.spec.name, key_text(key), timeout, extra=extra)
        settled = [one for one in finished if one not in [*result.lease_lost, *unsettled]]
        apply(context, Report(settled=settled, lease_lost=result.lease_lost))
    all_timed_out = sum(one.timed_out for one in context.in_flight.busy()) >= context.settings.concurrency
    if all_timed_out and not context.settings.holds_transaction:
        # No worker is left to run these, and their leases would be extended for as long as the handlers hang. The jobs
        # of a held batch run or return with its transaction, which may have deleted their rows.
        release(context, context.forget_waiting())


def record_overdue(context: ConsumerContext, now: float) -> list[Run]:
    timeout = context.settings.timeout
    if timeout is None:
        return []
    with context.lock:
        late = [one for one in context.in_flight.busy() if not one.timed_out and now - one.started > timeout]
        for one in late:
            record_timeout(context, one)
        return [run for one in late for run in runs_of(one.group)]


def record_timeout(context: ConsumerContext, executor: Executor) -> None:
    """Record and log that a handler has exceeded the timeout; the second time, that it ignores its cancellation."""
    runs, timeout = runs_of(executor.group), context.settings.timeout
    if executor.timed_out:
        text = (
            "queue %s: job %s was cancelled at its timeout of %g s, and its handler still runs; it is cancelled again, "
            "and the job stays claimed until it ends"
        )
        for run in runs:
            extra = context.log_fields("cancellation_ignored", job_key=key_value(run.key), attempt=run.attempt)
            logger.warning(text, context.spec.name, key_text(run.key), timeout, extra=extra)
        return
    executor.timed_out = True
    context.quarantine.end([run.key for run in runs])
    # The outcome of a leased run is logged in a moment; that of a held one, not before its handler returns.
    level = logging.WARNING if context.settings.holds_transaction else logging.DEBUG
    text = "queue %s: job %s exceeded its timeout of %g s; the result of its handler is refused"
    for run in runs:
        extra = context.log_fields("timed_out", job_key=key_value(run.key))
        logger.log(level, text, context.spec.name, key_text(run.key), timeout, extra=extra)


def pass_on_blocked(maintenance: Maintenance, now: float) -> Routine:
    context = maintenance.context
    if context.settings.concurrency > 1 and not context.settings.holds_transaction:
        for executor in context.in_flight.busy():
            if executor.blocks(now, BLOCKED):
                yield from pass_on(context, executor)


def release_waiting(maintenance: Maintenance, now: float) -> Routine:
    context = maintenance.context
    if context.settings.holds_transaction:
        return
    late = runs_in(late_groups(context, now))
    if late:
        # Before the release: the next consumer claims the job after the request, and ignores it as one for an old run.
        yield ExecuteInOwnSession(take_requests, (context, late))
        number = release_late(context, now)
        if number and not context.stopping:
            context.sizer.record_released(now)
        extra = context.log_fields("jobs_released", count=number)
        jobs = "1 job" if number == 1 else f"{number} jobs"
        text = "queue %s: released %s that would have waited for a free handler"
        logger.info(text, context.spec.name, jobs, extra=extra)
        yield from settle_finished(context)


def settle_overdue(maintenance: Maintenance, now: float) -> Routine:
    context = maintenance.context
    # Without waiting: a locked row must not keep the leases of all others from being extended.
    if context.completions.is_overdue(now):
        yield from settle_finished(context)
    if context.completions.postponed.is_due(now):
        yield from settle_postponed(context)


def late_groups(context: ConsumerContext, now: float) -> list[CallGroup]:
    """Return the groups that would wait here for too long before they begin, while other consumers may be idle."""
    # Not those of a batch that failed: it is being tried job by job, and would be claimed as a batch again.
    busy = context.in_flight.busy()
    durations = [now - one.started for one in busy]
    # Under flow control they take the places of jobs that could begin elsewhere.
    blocked = BLOCKED if context.flow_control else LONGEST_IN_BUFFER
    all_busy = len(busy) >= context.settings.concurrency and min(durations) >= blocked
    claimed_by = now if all_busy or context.stopping else now - LATE
    with context.lock:
        groups = [
            *context.buffer,
            *(group for one in context.in_flight.executors() for group in one.waiting_groups()),
        ]
        return [group for group in groups if has_waited(group, claimed_by)]


def release_late(context: ConsumerContext, now: float) -> int:
    """Release the jobs of :func:`late_groups`, and return how many there are."""
    with context.lock:
        late = late_groups(context, now)
        context.buffer = groups_except(context.buffer, late)
        for executor in context.in_flight.executors():
            executor.remove(late)
        runs, cancelled = runs_in(late), CancellationRequested()
        # A request to cancel would be forgotten with the run.
        outcomes = [
            context.outcome_rules.outcome(cancelled, run) if run.key in context.cancelled else RELEASED for run in runs
        ]
        finished = [FinishedRun(run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]
        apply(context, Report(unsettled=finished))
        return len(runs)
