"""Routines that claim, run and settle a batch in the one transaction that holds it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from typing import Any

from sqlalchemy.exc import DBAPIError, PendingRollbackError, ResourceClosedError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming.held_back import contended
from sqlaqueue.consumer.claiming.job_buffer import run_of_claimed, runs_of
from sqlaqueue.consumer.claiming.quarantine import QuarantinedJob
from sqlaqueue.consumer.claiming.unclaimable import Suspects
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import (
    is_connection_lost,
    is_savepoint_missing,
    is_transient,
    may_be_of_a_row,
    may_be_of_a_run,
    may_recover,
    may_settle_later,
)
from sqlaqueue.consumer.core.effects import CallHandler, Effect, Execute, ExecuteInOwnSession, Routine, Wait
from sqlaqueue.consumer.core.error_text import error_line
from sqlaqueue.consumer.executing import held_operations as operations
from sqlaqueue.consumer.executing.executor import Executor
from sqlaqueue.consumer.executing.job_instances import reload
from sqlaqueue.consumer.executing.leased import rollback
from sqlaqueue.consumer.executing.report import Report, emit_claimed, emit_polled, report_unclaimable
from sqlaqueue.consumer.executing.worker_turn import WorkerTurn
from sqlaqueue.consumer.notifications.notify import notify_all_claimed_and_commit
from sqlaqueue.consumer.notifications.poll_schedule import NO_ANNOUNCEMENT
from sqlaqueue.consumer.sessions.handler_misuse import RowsChanged, check_rows, transaction_ended_error
from sqlaqueue.consumer.sessions.savepoint import BatchLost, Savepoint
from sqlaqueue.consumer.sessions.session_usage import is_expired
from sqlaqueue.consumer.settling.crash_journal import JournalEntry
from sqlaqueue.consumer.settling.outcomes import (
    COMPLETED,
    RELEASED,
    CancellationRequested,
    FinishedRun,
    HandlerAbandoned,
    Outcome,
    applies_to_batch,
    is_disconnected,
)
from sqlaqueue.exc import HandlerMisuseError, WorkerDied
from sqlaqueue.log import logger
from sqlaqueue.queue.run import Key, Run

JOURNAL_DEADLINE = 2.0
"""Seconds for a journal entry, which is written while another transaction holds jobs; see
:func:`~sqlaqueue.consumer.settling.crash_journal.write_entry`."""


def run_held_batch(
    context: ConsumerContext, turn: WorkerTurn, quarantined: QuarantinedJob | None, suspects: Suspects | None = None
) -> Routine:
    """Claim a batch, run it and settle it in the one transaction that holds it.

    :param quarantined: the one job to claim.
    :param suspects: the jobs to claim; None, without a quarantined job, for those that are due.
    """
    claimer, quarantine, ended_before = context.claimer, context.quarantine, context.runs_ended
    began = time.monotonic()
    poll = context.polls.begin_poll() if quarantined is None else NO_ANNOUNCEMENT
    jobs, more = yield from _claim(context, quarantined, suspects)
    emit_polled(context, jobs, time.monotonic() - began)
    runs = runs_of(jobs)
    if jobs:
        turn.hold(runs)
    turn.claimed(found=bool(jobs), more=more)
    context.poll_when_admitted(ended_before)
    if not jobs:
        if poll.spares_others and claimer.held_back.retry_in is None and not claimer.unclaimable:
            yield ExecuteInOwnSession(notify_all_claimed_and_commit, (context.settings, poll))
        return Report(claimed=0 if quarantined is None else 1)
    sole = len(jobs) == 1 and (context.settings.concurrency == 1 if quarantined is None else quarantined.alone)
    entry = context.journal.open([run.key for run in runs], solely_responsible=sole)
    try:
        arguments = (context, entry, [run.key for run in runs], poll.announcements)
        admitted = yield ExecuteInOwnSession(operations.begin_batch, arguments, deadline=JOURNAL_DEADLINE)
        if not admitted:
            # Another claim has taken the room of the rates; the next one finds out when there is some.
            yield from _discard(context, entry)
            context.polls.poll_within(contended())
            return Report()
        found = entry.quarantined_among([run.key for run in runs])
        died_again = entry.quarantined_among([run.key for run in runs], died_again=True)
        if not sole and (died_again or (found and quarantined is None)):
            quarantine.add(died_again)
            quarantine.add(found, together=True)
            yield from _discard(context, entry)
            return Report(claimed=len(found))
        for run in runs:
            run.isolated = sole and (quarantined is not None or bool(found))
        emit_claimed(context, jobs)
        pairs = zip(runs, jobs, strict=True)
        finished = [FinishedRun(run, RELEASED, job) for run, job in pairs if run.key not in admitted]
        finished += yield from _run(context, [job for job in jobs if run_of_claimed(job).key in admitted], entry)
        return (yield from _settle(context, finished, entry))
    except _BatchBroken as broken:
        return (yield from _settle_broken(context, jobs, broken, entry))
    except Exception:
        yield from _discard(context, entry)
        raise


def _claim(context: ConsumerContext, quarantined: QuarantinedJob | None, suspects: Suspects | None) -> Routine:
    """Claim jobs; return them, and whether there may be more."""
    claimer = context.claimer
    if quarantined is not None:
        return (yield Execute(claimer.claim_key, (quarantined.key,))), False
    if suspects is None:
        jobs, more = yield Execute(claimer.claim, (context.claim_size(),))
    else:
        jobs, more = (yield Execute(claimer.claim_suspects, (suspects,))), True
    claimer.unclaimable.succeeded(suspects, found=bool(jobs))
    context.polls.polled(more=more)
    return jobs, more


# -- to run ----------------------------------------------------------------------------------------------------


def _run(
    context: ConsumerContext, jobs: Sequence[Any], entry: JournalEntry
) -> Generator[Effect, Any, list[FinishedRun]]:
    rules, starts, finished = context.outcome_rules, entry.deaths + 1, list[FinishedRun]()
    if entry.deaths:
        run = run_of_claimed(jobs[0])
        run.attempt += entry.deaths
        if run.attempt > run.max_attempts:
            died = WorkerDied(
                f"the worker died {entry.deaths} times while it ran this job alone, or the database refused its end"
            )
            outcome = Outcome("failed", error=f"WorkerDied: {died}", cause=died)
            return [FinishedRun(run, outcome, jobs[0], entry.deaths)]
    groups = context.settings.call_groups(jobs)
    while groups:
        executor = Executor(context, groups, finished.extend, time_limit=context.sizer.time_in_transaction())
        groups = []
        while not (executor.is_done or context.stopping or executor.is_over):
            try:
                yield from _call_in_savepoint(context, executor)
            except _BatchBroken as broken:
                broken.finished = finished
                raise
            group, error = executor.group, executor.error
            if error is not None and not context.spec.strategy.keeps_rows:
                # These are no part of the session, and would be inserted again with a failing handler's changes.
                yield Execute(reload, (context, group))
            if error is None or len(group) == 1 or applies_to_batch(error):
                finished += [
                    FinishedRun(run_of_claimed(job), rules.outcome(error, run_of_claimed(job)), job) for job in group
                ]
            else:
                # One bad job must not fail the other ones: each is tried by itself.
                yield Execute(reload, (context, group))
                context.cancelled.update(error.keys if isinstance(error, CancellationRequested) else ())
                groups += [[job] for job in group]
            executor.end_group()
            if executor.next_jobs and is_expired(executor.next_jobs[0]):
                yield Execute(reload, (context, [job for group in executor.waiting_groups() for job in group]))
        left = [job for group in executor.take_waiting() for job in group]
        finished += [FinishedRun(run_of_claimed(job), RELEASED, job) for job in left]
    for one in finished:
        one.starts = starts
    return finished


def _call_in_savepoint(context: ConsumerContext, executor: Executor) -> Routine:
    """Call the handler in a savepoint; a database error about its writes becomes the result of the last call."""
    savepoint: Savepoint = yield Execute(Savepoint, (context.settings.bind_arguments,))
    executor.savepoint = savepoint
    yield CallHandler(executor)
    raised = executor.error
    try:
        if raised is None:
            try:
                arguments = (context.spec, executor.group, runs_of(executor.group))
                executor.error = yield Execute(check_rows, arguments, executor.variables)
                if executor.error is None:
                    yield Execute(_close, (savepoint, True))
            except HandlerMisuseError:
                raise
            except Exception as failed:
                if not executor.group or is_savepoint_missing(failed):
                    raise
                executor.error = failed  # an error of the flush or the savepoint is the job's
        if executor.error is not None:
            yield Execute(_close, (savepoint, False))
    except HandlerMisuseError as misuse:
        cause = raised if isinstance(raised, HandlerAbandoned) else misuse
        raise _BatchBroken(runs_of(executor.group), cause, past_session=True) from raised
    except Exception as broken:
        # The transaction was lost while this handler ran. If no run were responsible, the batch would be claimed and
        # lost again for ever.
        if is_savepoint_missing(broken) and not isinstance(executor.error, HandlerAbandoned):
            raise _BatchBroken(runs_of(executor.group), transaction_ended_error(), past_session=True) from broken
        its = executor.error or broken
        gone = isinstance(broken, BatchLost) or is_connection_lost(broken)
        raise _BatchBroken(runs_of(executor.group), its, disconnected=is_disconnected(its, gone)) from broken


def _close(_: Session, savepoint: Savepoint, keep: bool) -> None:  # noqa: FBT001 - an effect passes arguments by position
    savepoint.close(keep=keep)


class _BatchBroken(Exception):
    """The transaction of a batch was lost while a handler ran."""

    def __init__(
        self, runs: Sequence[Run], cause: BaseException, *, disconnected: bool = False, past_session: bool = False
    ) -> None:
        super().__init__(str(cause))
        self.runs, self.cause, self.disconnected, self.past_session = runs, cause, disconnected, past_session
        self.finished: Sequence[FinishedRun] = ()
        """The runs of the batch that had ended before."""


# -- to settle -------------------------------------------------------------------------------------------------


def _settle(context: ConsumerContext, finished: Sequence[FinishedRun], entry: JournalEntry) -> Routine:
    try:
        yield Execute(operations.settle_held, (context, finished, entry))
    except RowsChanged as misuse:
        # Another job's handler may have done it: when each job runs by itself, that is known.
        return (yield from _run_each_alone(context, finished, misuse, misuse.keys, entry))
    except Exception as error:
        if is_connection_lost(error):
            # Jobs whose runs were not settled run by themselves. The journal entry is discarded without keeping them:
            # if only the reply to the commit was lost, most runs are settled.
            if not finished[0].run.isolated:
                context.quarantine.add([one.run.key for one in finished])
                raise
            return (yield from _settle_disconnected(context, [one.run for one in finished], error, entry))
        if is_transient(error):
            raise
        if isinstance(error, ResourceClosedError | PendingRollbackError):
            # One of the handlers has closed the connection without a statement, which is noticed only now.
            keys = [one.run.key for one in finished]
            return (yield from _run_each_alone(context, finished, transaction_ended_error(), keys, entry))
        if isinstance(error, DBAPIError) and may_settle_later(error):
            # The jobs are not the cause. Settling them may take too long because they are many, so each runs by itself.
            yield from _discard(context, entry)
            if len(finished) == 1:
                raise
            context.quarantine.add([one.run.key for one in finished])
            return Report(claimed=len(finished))
        if not may_be_of_a_run(error):
            raise
        # Such as a deferred constraint, which the commit checks: one job must not undo the others for ever.
        return (yield from _run_each_alone(context, finished, error, [one.run.key for one in finished], entry))
    context.journal.close(entry)
    return Report(settled=finished, claimed=len(finished))


def _settle_broken(context: ConsumerContext, jobs: Sequence[Any], broken: _BatchBroken, entry: JournalEntry) -> Routine:
    if broken.disconnected:
        return (yield from _settle_disconnected(context, broken.runs, broken.cause, entry))
    yield from _discard(context, entry)
    repaired: list[FinishedRun] = []
    if broken.past_session:
        before = [one for one in broken.finished if one.run not in broken.runs]
        repaired = yield from _bring_back(context, jobs, before, entry)
    done: Report = yield from _settle_alone(context, broken.runs, broken.cause, entry)
    done.settled = [*repaired, *done.settled]
    return done


def _bring_back(
    context: ConsumerContext, jobs: Sequence[Any], finished: Sequence[FinishedRun], entry: JournalEntry
) -> Routine:
    """Repair a batch that a handler has committed. No other process knows what the claim has deleted by that."""
    while True:
        try:
            return (yield ExecuteInOwnSession(operations.settle_committed, (context, jobs, finished, entry)))
        except Exception as error:
            if finished and operations.is_refusal(error):
                # The job whose end is refused must not keep the others from coming back, which run again instead.
                finished = ()
                continue
            if context.stopping or not may_recover(error):
                raise
            logger.warning(
                "%s: %s: %s", context.name, type(error).__name__, error, extra=context.log_fields("run_error")
            )
        yield Wait("stop", context.intervals.failed())


def _run_each_alone(
    context: ConsumerContext,
    finished: Sequence[FinishedRun],
    error: Exception,
    keys: Sequence[Key],
    entry: JournalEntry,
) -> Routine:
    """Settle the only run of a batch with an error, or have the jobs with these keys run by themselves."""
    if len(finished) > 1:
        # Before the jobs are free: another worker would claim them together with others.
        context.quarantine.add(keys)
    yield from _discard(context, entry)
    if len(finished) > 1:
        # Once more: a worker that has looked for one of them meanwhile has not found it, as it was locked.
        context.quarantine.add(keys)
    else:
        # What the handler has raised says more than that the database refuses its text.
        ended = COMPLETED if isinstance(error, RowsChanged) else finished[0].outcome
        return (yield from _settle_alone(context, [finished[0].run], error, entry, ended))
    return Report(claimed=len(finished))


def _settle_disconnected(
    context: ConsumerContext, runs: Sequence[Run], cause: BaseException, entry: JournalEntry
) -> Routine:
    """End runs whose connection was lost, and the batch with it.

    It is unknown which job is responsible, so no attempt counts: the jobs stay in the journal, and each runs by itself.
    If a job was running by itself already, the attempt counts. If the server is not back, so that this cannot be
    written, the journal keeps the job with one start.
    """
    keys = [run.key for run in runs]
    if not all(run.isolated for run in runs):
        entry.keep(keys, starts=0)
        yield from _discard(context, entry)
        context.quarantine.add(keys)
        finished = [FinishedRun(run, context.outcome_rules.disconnected(cause, run, alone=False)) for run in runs]
        return Report(settled=finished, claimed=len(entry.names))
    yield Execute(rollback)
    try:
        done = yield from _settle_alone(context, runs, cause, entry)
    except Exception:
        entry.keep(keys, starts=1)
        context.journal.discard(entry)
        raise
    yield from _discard(context, entry)
    return done


def _settle_alone(
    context: ConsumerContext,
    runs: Sequence[Run],
    cause: BaseException,
    entry: JournalEntry,
    ended: Outcome = COMPLETED,
) -> Routine:
    """Count the attempt of the runs responsible for the loss of a batch; its other jobs are free as they were.

    :param ended: the outcome of the only run, if it was no success, and only settling it has failed.
    """
    rules, settled, counted, is_refused = context.outcome_rules, list[FinishedRun](), list[Key](), False
    for run in runs:
        lost_alone = run.isolated and is_connection_lost(cause)
        outcome = rules.disconnected(cause, run, alone=True) if lost_alone else rules.outcome(cause, run)
        outcome = outcome if ended is COMPLETED else ended
        if outcome is RELEASED:
            continue
        finished = FinishedRun(run, outcome, starts=entry.deaths + 1)
        try:
            again = yield ExecuteInOwnSession(operations.settle_alone, (context, finished, entry))
        except operations.EndRefused as refused:
            reason = refused.__cause__ or refused
            found = context.claimer.unclaimable.add(run.key, error_line(reason))
            report_unclaimable(context, found, reason, "settled")
            is_refused = True
            is_its_own = isinstance(reason, RowsChanged) or may_be_of_a_row(reason)
            if is_its_own and run.attempt <= run.max_attempts:
                counted.append(run.key)
            continue
        settled += [] if again is None else [again]
    if is_refused:
        # The journal counts the attempts, which the rows cannot: else the handlers would run again and again.
        entry.keep(counted, starts=1)
        yield from _discard(context, entry)
    return Report(settled=settled, claimed=len(entry.names))


def _discard(context: ConsumerContext, entry: JournalEntry) -> Routine:
    """Give up a batch whose transaction is lost; the worker lives, so no job is quarantined.

    The journal entry goes first: as soon as the jobs are free, other workers look for them in the journal.
    """
    context.journal.discard(entry)
    # If that fails, the entry stays on the list of those that are to be discarded.
    with contextlib.suppress(Exception):
        yield from discard_entries(context)
    yield Execute(rollback)


def discard_entries(context: ConsumerContext) -> Routine:
    """Delete the journal entries of batches that were given up."""
    while (entry := context.journal.take_discarded()) is not None:
        try:
            yield ExecuteInOwnSession(operations.discard_entry, (context, entry))
        except Exception:
            context.journal.discard(entry)
            raise
