"""What follows from the end of runs: events, counters, polls and the quarantine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlaqueue.consumer.claiming.job_buffer import runs_of
from sqlaqueue.consumer.claiming.unclaimable import TRY_AGAIN_AFTER, UnclaimableJob
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.error_text import kind_of
from sqlaqueue.consumer.core.events import EventName, JobEvent, PollEvent, make_event
from sqlaqueue.consumer.settling.outcomes import COMPLETED, RELEASED, FinishedRun
from sqlaqueue.exc import LeaseLost, WorkerDied
from sqlaqueue.log import logger
from sqlaqueue.queue.run import Key, Run, key_text, key_value
from sqlaqueue.strategies.update_status import LEASE_EXPIRED


class RescuedJob(NamedTuple):
    """A job whose lease had expired, and that is pending or failed by now."""

    key: Key
    failed: int | None = None
    """Its last attempt, if it has failed since none was left."""
    max_attempts: int = 0


@dataclass(slots=True)
class Report:
    """What a routine has done with some jobs."""

    settled: Sequence[FinishedRun] = ()
    """Runs whose settlement is committed."""
    unsettled: Sequence[FinishedRun] = ()
    """Runs that ended without a commit of their own, to be settled together with others."""
    lease_lost: Sequence[FinishedRun] = ()
    """Runs whose result was refused."""
    retry_alone: Sequence[Any] = ()
    """Jobs of a batch that failed as a whole, detached, each to be tried by itself."""
    claimed: int = 0


def report(context: ConsumerContext, done: Report) -> None:
    """Process what a routine has done."""
    _count_and_emit(context, done.settled)
    _emit_lease_lost(context, done.lease_lost)
    with context.lock:
        context.completions.add(done.unsettled)
    # Whatever the outcome: a job that seems to run for ever would keep all other quarantined jobs from running.
    if context.quarantine.end([one.run.key for one in (*done.settled, *done.lease_lost, *done.unsettled)]):
        context.polls.poll_at_once()
    context.add_jobs([[job] for job in done.retry_alone])


def release(context: ConsumerContext, runs: Sequence[Run]) -> None:
    """End runs without counting an attempt; they are settled together with others."""
    report(context, Report(unsettled=[FinishedRun(run, RELEASED) for run in runs]))


def report_settled(
    context: ConsumerContext,
    finished: Sequence[FinishedRun],
    lost: Sequence[FinishedRun],
    refused: Sequence[FinishedRun] = (),
) -> None:
    """Process runs that were settled together, except those whose lease was lost or that could not be settled."""
    with context.lock:
        context.completions.settled(finished)
        context.finished_turns += 1
    silent = [one for one in finished if not one.claim_committed]
    without = {*lost, *refused, *silent}
    _count_and_emit(context, [one for one in finished if one not in without] if without else finished)
    _emit_lease_lost(context, [one for one in lost if one.claim_committed])
    if silent:
        # No trigger announces a row that is released.
        context.polls.poll_at_once()
    context.changed()


def _count_and_emit(context: ConsumerContext, finished: Sequence[FinishedRun]) -> None:
    events = context.events
    quiet = not events.wants("completed")
    with context.lock:
        ended = sum(one.ended_as.event != "released" for one in finished)
        context.runs_ended += ended
        context.runs_released += len(finished) - ended
        context.conflicts.clear(one.run.key for one in finished if one.outcome.event != "released")
        if context.cancelled:
            context.cancelled.difference_update([one.run.key for one in finished])
    if finished and context.claimer.held_back.due:
        # The end of a run may let another job begin.
        context.polls.poll_at_once()
    for one in finished:
        outcome = one.ended_as
        if outcome is COMPLETED and quiet:
            continue
        if outcome.state == "pending" and not outcome.delay:
            # No trigger announces a row that has read as pending all the time.
            context.polls.poll_at_once()
        if events.wants(outcome.event):
            _emit(context, outcome.event, one.run, outcome.delay, outcome.cause)


def emit_claimed(context: ConsumerContext, jobs: Sequence[Any]) -> None:
    """Emit an event for each claimed job."""
    for run in runs_of(jobs) if context.events.wants("claimed") else ():
        _emit(context, "claimed", run)


def emit_polled(context: ConsumerContext, jobs: Sequence[Any], duration: float, *, settled: int = 0) -> None:
    """Emit an event for a poll.

    :param duration: the seconds that its statements took.
    :param settled: the number of runs that were settled with it.
    """
    if context.events.wants_polls:
        traces = tuple(run.traceparent for run in runs_of(jobs) if run.traceparent is not None)
        context.events.emit_poll(PollEvent(context.spec.name, len(jobs), duration, settled, traces))


def report_rescued(context: ConsumerContext, rescued: Sequence[RescuedJob]) -> None:
    """Emit an event for each rescued job; a job that has failed by that is reported as any that has failed."""
    queue = context.spec.name
    for job in rescued:
        if job.failed is None:
            context.events.emit(JobEvent("rescued", queue, job.key))
        else:
            died = WorkerDied(LEASE_EXPIRED)
            event = JobEvent("failed", queue, job.key, job.failed, error=died, max_attempts=job.max_attempts)
            context.events.emit(event)


def report_unclaimable(context: ConsumerContext, job: UnclaimableJob | None, error: BaseException, what: str) -> None:
    """Log a job that the heartbeat names as long as it is unclaimable; None is a job that was known.

    :param what: what the job cannot be: ``claimed``, ``rescued`` or ``settled``.
    """
    if job is not None:
        text = "%s: job %s cannot be %s here: %s; other jobs run, and this one is tried again after %.0f s"
        extra = context.log_fields("job_unclaimable", job_key=key_value(job.key), error_kind=kind_of(error))
        cause = error if error.__traceback__ is not None else None
        values = (context.name, key_text(job.key), what, job.error, TRY_AGAIN_AFTER)
        logger.error(text, *values, exc_info=cause, extra=extra)


def _emit_lease_lost(context: ConsumerContext, lost: Sequence[FinishedRun]) -> None:
    for run in (one.run for one in lost):
        error = LeaseLost(f"the result of job {key_text(run.key)} came after its lease had passed to another run")
        _emit(context, "lease_lost", run, error=error)


def _emit(
    context: ConsumerContext, name: EventName, run: Run, delay: float | None = None, error: BaseException | None = None
) -> None:
    context.events.emit(make_event(name, context.spec.name, run, delay, error))
