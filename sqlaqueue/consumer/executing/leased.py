"""Routines that claim and run jobs under leases."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming.job_buffer import run_of_claimed, runs_in, runs_of
from sqlaqueue.consumer.claiming.unclaimable import Suspects
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import is_connection_lost, is_transient
from sqlaqueue.consumer.core.effects import CallHandler, Effect, Execute, ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.executor import Executor
from sqlaqueue.consumer.executing.job_instances import expunge, load_again, reload
from sqlaqueue.consumer.executing.report import Report, emit_claimed, emit_polled, release, report, report_settled
from sqlaqueue.consumer.executing.settle_and_claim import ReplyLost, SettleAndClaimResult, settle_and_claim
from sqlaqueue.consumer.executing.worker_turn import WorkerTurn
from sqlaqueue.consumer.sessions.session_usage import has_lost_connection
from sqlaqueue.consumer.settling.outcomes import (
    COMPLETED,
    RELEASED,
    CancellationRequested,
    FinishedRun,
    Outcome,
    applies_to_batch,
    is_disconnected,
)
from sqlaqueue.queue.run import Key

_LATE_AGAIN = 5.0
"""Seconds after which a job is claimed again whose thread has exceeded its timeout and goes on here."""

# -- to claim --------------------------------------------------------------------------------------------------


def claim_leased_batch(
    context: ConsumerContext, turn: WorkerTurn, finished: Sequence[FinishedRun], suspects: Suspects | None = None
) -> Routine:
    """Settle finished runs and claim, in one transaction; run jobs at once whose handlers end in a moment.

    :param suspects: the jobs to claim; None for those that are due.
    :return: how many jobs were claimed.
    """
    limit, poll, ended_before = context.claim_size(), context.polls.begin_poll(), context.runs_ended
    began = time.monotonic()
    try:
        claimed: SettleAndClaimResult = yield Execute(
            settle_and_claim, (context, finished, limit, poll, turn.claims_alone, suspects)
        )
    except ReplyLost as lost:
        # If the server has committed them, they are this consumer's: they have not run, and no attempt is counted.
        with context.lock:
            context.completions.add([FinishedRun(run, RELEASED, claim_committed=False) for run in lost.runs])
        raise (lost.__cause__ or lost) from None
    jobs = claimed.jobs
    if context.settings.timeout is not None and (late := context.left_running()):
        jobs = _release_late(context, jobs, late)
    context.intervals.succeeded()
    took = time.monotonic() - began
    context.sizer.record_claim(took)
    context.polls.polled(more=claimed.more)
    context.poll_when_admitted(ended_before)
    if finished:
        report_settled(context, finished, claimed.lease_lost)
    emit_polled(context, jobs, took, settled=len(finished))
    emit_claimed(context, jobs)
    groups = context.settings.call_groups(jobs)
    time_limit = context.sizer.time_in_row(len(groups)) if jobs else None
    if time_limit is None:
        yield Execute(expunge)
        context.add_jobs(groups)
        turn.claimed(found=bool(jobs), more=claimed.more)
        return len(jobs)
    executor = turn.keep_jobs(groups, time_limit)
    turn.claimed(found=bool(jobs), more=claimed.more)
    yield from run_to_the_end(context, executor, run_leased(context, executor))
    return len(jobs)


def _release_late(context: ConsumerContext, jobs: Sequence[Any], late: Collection[Key]) -> list[Any]:
    """Release the jobs whose earlier run has not ended in this process, and return the others.

    A thread that has exceeded its timeout goes on, and another one must not run its job beside it.
    """
    again = [run for run in runs_of(jobs) if run.key in late]
    delay = _LATE_AGAIN if context.spec.has("run_at") else None
    if delay is None:
        # Otherwise it would be claimed and released in a loop.
        for run in again:
            context.claimer.unclaimable.add(run.key, "its handler goes on here after its timeout")
    report(context, Report(unsettled=[FinishedRun(run, Outcome("released", delay)) for run in again]))
    return [job for job in jobs if run_of_claimed(job).key not in late]


# -- to run ----------------------------------------------------------------------------------------------------


def run_to_the_end(context: ConsumerContext, executor: Executor, routine: Routine) -> Routine:
    """Run a routine that works on an executor's jobs; whatever the error, their runs end."""
    try:
        return (yield from routine)
    except Exception:
        # Else they would stay claimed until their leases expire.
        release(context, executor.runs())
        raise


def run_leased(context: ConsumerContext, executor: Executor) -> Routine:
    """Run the jobs of an executor, whose claim is committed, in the routine's session.

    :return: whether the session can be reused for other jobs.
    """
    quarantine, clean = context.quarantine, True
    begun = {run.key for run in executor.runs()} if quarantine.is_running else set()
    while clean:
        yield CallHandler(executor)
        if not executor.group:
            break
        done, clean = yield from _end_runs(context, executor)
        report(context, done)
        executor.end_group()
    # Jobs that are left still count as running, whichever worker runs them.
    if begun and quarantine.end(begun.difference(run.key for run in context.claimed_runs())):
        context.polls.poll_at_once()
    if not executor.is_done:
        if clean:
            # Before another worker takes them: an instance belongs to one session at most.
            yield Execute(expunge)
            context.add_jobs(executor.take_waiting())
            executor.waiting_taken()
        else:
            yield from pass_on(context, executor)
    return clean


def pass_on(context: ConsumerContext, executor: Executor) -> Routine:
    """Give other workers the jobs that wait in an executor, whose instances are in a session that is in use."""
    left = runs_in(executor.take_waiting())
    if left:
        try:
            jobs = yield ExecuteInOwnSession(load_again, (context, left))
        except Exception:
            release(context, left)
            executor.waiting_taken()
            raise
        there = {run.key for run in runs_of(jobs)}
        context.add_jobs(context.settings.call_groups(jobs))
        # The leases of these are lost, or their rows deleted: settling them finds out.
        release(context, [run for run in left if run.key not in there])
        executor.waiting_taken()


def _end_runs(context: ConsumerContext, executor: Executor) -> Generator[Effect, Any, tuple[Report, bool]]:
    """End the runs of jobs whose handler has raised, or has used its session.

    :return: what has been done, and whether the session is unused and can be used again.
    """
    rules, jobs, error = context.outcome_rules, executor.group, executor.error
    if error is None:
        done = yield from _commit(context, executor)
        if isinstance(done, Report):
            return done, False
        error = done
    used, disconnected = yield Execute(_undo)
    if is_disconnected(error, disconnected):
        return _disconnected(context, [FinishedRun(run, RELEASED) for run in runs_of(jobs)], error), False
    if len(jobs) == 1 or applies_to_batch(error):
        finished = [FinishedRun(run, rules.outcome(error, run)) for run in runs_of(jobs)]
        return Report(unsettled=finished), not used
    if isinstance(error, CancellationRequested):
        context.cancelled.update(error.keys)
    yield Execute(reload, (context, jobs))
    yield Execute(expunge)
    return Report(retry_alone=jobs), False


def _disconnected(context: ConsumerContext, finished: Sequence[FinishedRun], error: BaseException) -> Report:
    """End runs whose connection was lost."""
    context.quarantine.may_wait = True
    for one in finished:
        one.outcome = context.outcome_rules.disconnected(error, one.run, alone=context.outcome_rules.ran_alone(one.run))
    return Report(unsettled=finished)


def _undo(session: Session) -> tuple[bool, bool]:
    """Undo a handler's writes; return whether it used the session, and whether its connection is gone."""
    used, disconnected = session.in_transaction(), has_lost_connection(session)
    session.rollback()
    return used, disconnected


def _commit(context: ConsumerContext, executor: Executor) -> Generator[Effect, Any, Report | BaseException]:
    """Commit a handler's writes with the completion of its jobs.

    :return: a report, or the database's error about the handler's writes.
    """
    finished = [FinishedRun(run_of_claimed(job), COMPLETED, job) for job in executor.group]
    try:
        lost = yield Execute(context.settler.complete_and_commit, (finished,), executor.variables)
    except Exception as failed:  # noqa: BLE001 - an error of the flush or the commit is the job's error
        if not is_transient(failed):
            return failed
        yield Execute(rollback)
        if not is_connection_lost(failed):
            return Report(
                unsettled=[FinishedRun(one.run, context.outcome_rules.outcome(failed, one.run)) for one in finished]
            )
        # If the connection dropped before the reply to the commit, the outcome is unknown: settling checks it.
        uncertain = [FinishedRun(one.run, RELEASED, uncertain=one.uncertain) for one in finished]
        return _disconnected(context, uncertain, failed)
    if not lost:
        return Report(settled=finished)
    # A batch is one transaction: the other jobs of it are rolled back as well, and run again without an attempt.
    return Report(unsettled=[FinishedRun(one.run, RELEASED) for one in finished if one not in lost], lease_lost=lost)


def rollback(session: Session) -> None:
    """Undo what the session's transaction has written."""
    session.rollback()
