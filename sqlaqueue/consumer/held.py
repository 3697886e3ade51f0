"""Routines that claim, run and settle a batch in the one transaction that holds it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.exc import DBAPIError, PendingRollbackError, ResourceClosedError
from sqlalchemy.orm import Session

from sqlaqueue.consumer import quarantine
from sqlaqueue.consumer.claim import Suspects, contended
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import CallHandler, Effect, Execute, ExecuteInOwnSession, Routine, Wait
from sqlaqueue.consumer.core.errors import (
    error_line,
    is_connection_lost,
    is_savepoint_missing,
    is_transient,
    may_be_of_a_row,
    may_be_of_a_run,
    may_recover,
    may_settle_later,
)
from sqlaqueue.consumer.executor import Executor, reload
from sqlaqueue.consumer.in_flight import LeftBehind, run_of_claimed
from sqlaqueue.consumer.leased import Report, WorkerTurn, apply, emit_claimed, emit_polled, report_unclaimable, rollback
from sqlaqueue.consumer.notifications.polls import NO_ANNOUNCEMENT, Poll, notify_all_claimed, notify_released
from sqlaqueue.consumer.outcomes import (
    COMPLETED,
    RELEASED,
    CancellationRequested,
    FinishedRun,
    HandlerAbandoned,
    Outcome,
    applies_to_batch,
    is_disconnected,
)
from sqlaqueue.consumer.quarantine import JournalEntry, QuarantinedJob
from sqlaqueue.consumer.sessions import (
    BatchLost,
    RowsChanged,
    Savepoint,
    check_rows,
    is_expired,
    refuse_missing_rows,
    transaction_ended_error,
)
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.consumer.settle import without_expiring
from sqlaqueue.consumer.statements import KEYS
from sqlaqueue.exc import HandlerMisuseError, WorkerDied
from sqlaqueue.mapping.runs import run_of, runs_of
from sqlaqueue.queue.names import BEGUN
from sqlaqueue.queue.run import Key, Run, key_text, keys_by_token, keys_from
from sqlaqueue.statements.selection import returning_keys
from sqlaqueue.strategies import ClaimedJobs


def reserve_rates(session: Session, context: ConsumerContext, keys: Sequence[Key]) -> set[Key]:
    """Reserve the beginnings of claimed jobs in a transaction of its own, and leave the commit to the caller.

    Two claims may have seen the same room, so fewer jobs may begin than were claimed. If the worker dies before they
    begin, the beginnings are lost: their keys then begin later than their rates allow, never earlier.

    :return: the keys of the jobs that may begin.
    """
    spec, statements = context.spec, context.statements.reserve
    if statements is None:
        return set(keys)
    context.isolation.begin(session)
    select, records = statements
    bind = context.settings.bind_arguments
    found = session.execute(select, {KEYS: spec.bind_keys(keys)}, bind_arguments=bind).all()
    rates = {tuple(row[: len(spec.keys)]): list(_pairs(row[len(spec.keys) :])) for row in found}
    begun: list[list[int]] = [[] for _ in records]
    taken: Counter[tuple[int, int]] = Counter()
    admitted: set[Key] = set()
    for key in keys:
        # A job that is missing was deleted by plain SQL; its settlement finds out.
        pairs = enumerate(rates.get(key, ()))
        concerned = [(number, hashed, room) for number, (hashed, room) in pairs if room is not None]
        if all(room > taken[number, hashed] for number, hashed, room in concerned):
            admitted.add(key)
            for number, hashed, _ in concerned:
                taken[number, hashed] += 1
                begun[number].append(hashed)
    for hashes, record in zip(begun, records, strict=True):
        if hashes:
            session.execute(record, {BEGUN: hashes}, bind_arguments=bind)
    return admitted


def _pairs(values: Sequence[Any]) -> zip[tuple[Any, Any]]:
    return zip(values[::2], values[1::2], strict=True)


def begin_batch(
    session: Session,
    context: ConsumerContext,
    entry: JournalEntry,
    keys: Sequence[Key],
    announcements: Sequence[str] = (),
) -> set[Key]:
    """Write a batch's journal entry, reserve its beginnings, and commit; return the keys of the jobs that may begin."""
    admitted = reserve_rates(session, context, keys)
    if admitted:
        quarantine.write_entry(session, context.spec, entry, context.settings.worker(), announcements)
        session.commit()
    return admitted


def settle_held(
    session: Session, context: ConsumerContext, finished: Sequence[FinishedRun], entry: JournalEntry
) -> None:
    """Settle a held batch, close its journal entry and commit: with its handlers' writes, in one transaction."""
    lost = context.settler.settle(session, finished)
    refuse_missing_rows(context.spec, [(one.run, one.job) for one in lost])
    _close_journal_entry(session, context, finished, entry)
    if context.settings.notifies and any(one.outcome is RELEASED for one in finished):
        notify_released(session, context.spec)
    with without_expiring(session):
        context.settler.commit(session)


def is_refusal(error: Exception) -> bool:
    """Return whether the database refuses to settle a run, be it by an error or silently."""
    return isinstance(error, RowsChanged) or may_be_of_a_run(error)


class EndRefused(Exception):
    """The database refuses to settle a run, in whatever way; the cause is its error."""


def settle_alone(
    session: Session, context: ConsumerContext, finished: FinishedRun, entry: JournalEntry, *, fenced: bool = False
) -> FinishedRun | None:
    """Claim one job of a batch that was rolled back, and settle its run, all in one transaction.

    If the database refuses the outcome of the run, another one is written.

    :param fenced: whether the run counts only if its journal entry is there, and if it is the last one of the job:
        otherwise it has ended already, or another worker has run the job since, and has counted this death.
    :return: the settled run; None when another worker has claimed the job by now.
    """
    refused: Exception | None = None
    outcomes = [finished.outcome, *context.settler.other_outcomes(finished, finished.outcome.cause)]
    tries = [replace(finished, outcome=outcome) for outcome in outcomes]
    most = context.spec.most_attempts
    if most is not None and finished.run.attempt > most:
        # The count of attempts is out of range: whatever the run's end was, the job has no further one.
        cause = finished.outcome.cause
        tries.append(replace(finished, outcome=Outcome("failed", error=finished.outcome.error, cause=cause), starts=0))
    for one in tries:
        try:
            again = _settle_anew(session, context, one, deaths=entry.deaths if fenced else None)
            if again is not None:
                was_open = _close_journal_entry(session, context, [again], entry)
                if fenced and not was_open:
                    session.rollback()
                    return None
                context.settler.commit(session)
        except Exception as failed:
            session.rollback()
            if not is_refusal(failed):
                raise
            refused = failed
        else:
            return again
    msg = f"the database refuses to end the run of job {key_text(finished.run.key)}"
    raise EndRefused(msg) from refused


def settle_left(session: Session, context: ConsumerContext, left: LeftBehind) -> FinishedRun | None:
    """Settle the run of a process that has died, in a transaction of its own.

    :return: the settled run; None if it has ended after all, or another worker has the job by now. Then the journal
        counts the death.
    """
    run = left.run
    entry = quarantine.left_entry(session, context.spec, run.worker or "", run.key)
    if entry is None:
        return None
    outcome = RELEASED if left.error is None else context.outcome_rules.outcome(left.error, run)
    return settle_alone(session, context, FinishedRun(run, outcome, starts=entry.deaths + 1), entry, fenced=True)


def settle_left_behind(context: ConsumerContext, left: LeftBehind) -> Routine:
    try:
        settled = yield ExecuteInOwnSession(settle_left, (context, left))
    except EndRefused as refused:
        # The journal has counted the death.
        context.log_error("run_error", "queue %s: %s: %s", refused)
        return
    apply(context, Report(settled=[] if settled is None else [settled]))


def settle_committed(
    session: Session,
    context: ConsumerContext,
    jobs: Sequence[Any],
    finished: Sequence[FinishedRun],
    entry: JournalEntry,
) -> list[FinishedRun]:
    """Repair a held batch whose transaction a handler has committed, if the claim has deleted messages or rows.

    These are inserted again, so that the jobs can be claimed. Then the jobs that had ended are settled, as their
    handlers' writes are committed. If a claim writes nothing, a commit cannot be distinguished from a rollback: nothing
    is repaired, and all jobs are free.

    :return: the settled runs.
    """
    claims = keys_by_token(run for job in jobs if (run := run_of(job)) is not None)
    if not context.spec.strategy.keeps_rows:
        reload(session, context, jobs)
    verb = context.spec.strategy.restore(context.spec, ClaimedJobs(list(claims.items()), jobs))
    if verb is None:
        return []
    found = session.execute(returning_keys(context.spec, verb), bind_arguments=context.settings.bind_arguments)
    back = set(keys_from(found.scalars(), len(context.spec.keys)))
    again = [_settle_anew(session, context, one) for one in finished if one.run.key in back]
    quarantine.delete_entry(session, context.spec, entry)
    context.settler.commit(session)
    return [one for one in again if one is not None]


def _settle_anew(
    session: Session, context: ConsumerContext, finished: FinishedRun, *, deaths: int | None = None
) -> FinishedRun | None:
    """Claim the job of a run, and settle the run; return None if the job cannot be claimed.

    :param deaths: those of the job that other entries of the journal count; then it is settled only if no other run of
        it has begun since.
    """
    for job in context.claimer.claim_to_settle(session, finished.run.key):
        # With the token of this claim: a settlement inserts only rows that the claim with its token has deleted.
        claimed = run_of(job)
        if deaths is not None and claimed is not None and finished.run.attempt != claimed.attempt + deaths:
            session.rollback()
            return None
        again = replace(finished, run=replace(finished.run, token=claimed.token if claimed else None), job=job)
        lost = context.settler.settle(session, [again])
        if lost:
            # A trigger has returned NULL: the row would stay as it is, and its handler run again and again.
            refuse_missing_rows(context.spec, [(again.run, None)])
        return again
    return None


def _close_journal_entry(
    session: Session, context: ConsumerContext, finished: Sequence[FinishedRun], entry: JournalEntry
) -> bool:
    """Delete the entry, and return whether it was there."""
    # A released run counts no attempt, so entries that other batches left behind for its job must stay.
    if any(one.outcome.event == "released" or one.outcome.quarantine for one in finished):
        return quarantine.delete_entry(session, context.spec, entry)
    return quarantine.close_entry(session, context.spec, entry)


JOURNAL_DEADLINE = 2.0
"""Seconds for a journal entry, which is written while another transaction holds jobs; see
:func:`~sqlaqueue.consumer.quarantine.write_entry`."""


def run_held_batch(
    context: ConsumerContext, turn: WorkerTurn, quarantined: QuarantinedJob | None, suspects: Suspects | None = None
) -> Routine:
    """Claim, run and settle a batch in one transaction: one quarantined job, the suspects, or jobs that are due."""
    claimer, ended_before = context.claimer, context.runs_ended
    began = time.monotonic()
    poll = context.polls.begin_poll() if quarantined is None else NO_ANNOUNCEMENT
    jobs, more = yield from _claim(context, poll, quarantined, suspects)
    took = time.monotonic() - began
    context.record_weight(jobs, took)
    emit_polled(context, jobs, took)
    runs = runs_of(jobs)
    if jobs:
        context.assign(turn, lambda: runs)
    turn.claimed(found=bool(jobs), more=more)
    context.poll_when_admitted(ended_before)
    if not jobs:
        if poll.spares_others and claimer.held_back.retry_in is None and not claimer.unclaimable:
            yield ExecuteInOwnSession(_notify_all_claimed, (context.settings, poll))
        return Report(claimed=0 if quarantined is None else 1)
    sole = len(jobs) == 1 and (context.settings.concurrency == 1 if quarantined is None else quarantined.alone)
    entry = context.journal.open([run.key for run in runs], solely_responsible=sole)
    try:
        arguments = (context, entry, [run.key for run in runs], poll.announcements)
        admitted = yield ExecuteInOwnSession(begin_batch, arguments, deadline=JOURNAL_DEADLINE)
        if not admitted:
            # Another claim has taken the room of the rates; the next one finds out when there is some.
            yield from _discard(context, entry)
            context.polls.poll_within(contended())
            return Report()
        found = entry.quarantined_among([run.key for run in runs])
        died_again = entry.quarantined_among([run.key for run in runs], died_again=True)
        if not sole and (died_again or (found and quarantined is None)):
            context.quarantine.add(died_again)
            context.quarantine.add(found, together=True)
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


def _notify_all_claimed(session: Session, settings: ConsumerSettings, poll: Poll) -> None:
    notify_all_claimed(session, settings, poll)
    session.commit()


def _claim(
    context: ConsumerContext, poll: Poll, quarantined: QuarantinedJob | None, suspects: Suspects | None
) -> Routine:
    """Claim jobs; return them, and whether there may be more."""
    claimer = context.claimer
    if quarantined is not None:
        return (yield Execute(claimer.claim_key, (quarantined.key,))), False
    if suspects is None:
        jobs, more = yield Execute(claimer.claim, (context.claim_size(),))
    else:
        jobs, more = (yield Execute(claimer.claim_suspects, (suspects,))), True
    claimer.unclaimable.succeeded(suspects, found=bool(jobs))
    # The transaction that has claimed jobs may be rolled back.
    context.polls.polled(poll, found=bool(jobs), more=more, drained=not (jobs or more) and context.claims_all)
    return jobs, more


def _count_deaths(context: ConsumerContext, job: Any, entry: JournalEntry) -> FinishedRun | None:
    """Count the starts of a job that ended in the death of its worker; return its last run if no other one may begin.

    That is so if no attempt is left, or if it is known why the worker died: then its run is settled as any other, with
    the delay of the retry policy.
    """
    run, deaths = run_of_claimed(job), entry.deaths
    known = context.deaths.take(entry.names[0])
    # Otherwise it is an earlier death, whose run another process has settled.
    if known is not None and known.attempt == run.attempt + deaths - 1:
        run.attempt, run.worker, run.duration = run.attempt + deaths - 1, known.worker, known.seconds
        run.handler_started_at = time.monotonic() - known.seconds
        return FinishedRun(run, context.outcome_rules.outcome(known.error, run), job, deaths)
    run.attempt += deaths
    if run.attempt <= run.max_attempts:
        return None
    # This claim is no run: the last death was the last attempt.
    run.attempt -= 1
    times = "once" if deaths == 1 else f"{deaths} times"
    died = WorkerDied(f"the worker died {times} while it ran this job alone, or the database refused its end")
    return FinishedRun(run, Outcome("failed", error=f"WorkerDied: {died}", cause=died), job, deaths)


def _run(
    context: ConsumerContext, jobs: Sequence[Any], entry: JournalEntry
) -> Generator[Effect, Any, list[FinishedRun]]:
    rules, starts, finished = context.outcome_rules, entry.deaths + 1, list[FinishedRun]()
    died = _count_deaths(context, jobs[0], entry) if entry.deaths else None
    if died is not None:
        return [died]
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


def _settle(context: ConsumerContext, finished: Sequence[FinishedRun], entry: JournalEntry) -> Routine:
    try:
        yield Execute(settle_held, (context, finished, entry))
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
    return done._replace(settled=[*repaired, *done.settled])


def _bring_back(
    context: ConsumerContext, jobs: Sequence[Any], finished: Sequence[FinishedRun], entry: JournalEntry
) -> Routine:
    """Repair a batch that a handler has committed. No other process knows what the claim has deleted by that."""
    while True:
        try:
            return (yield ExecuteInOwnSession(settle_committed, (context, jobs, finished, entry)))
        except Exception as error:
            if finished and is_refusal(error):
                # The job whose end is refused must not keep the others from coming back, which run again instead.
                finished = ()
                continue
            if context.stopping or not may_recover(error):
                raise
            context.log_error("run_error", "queue %s: %s: %s", error)
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
    context: ConsumerContext, runs: Sequence[Run], cause: BaseException, entry: JournalEntry, ended: Outcome = COMPLETED
) -> Routine:
    """Count the attempt of those responsible for a lost batch. ``ended``: only settling this outcome has failed."""
    rules, settled, counted, is_refused = context.outcome_rules, list[FinishedRun](), list[Key](), False
    for run in runs:
        lost_alone = run.isolated and is_connection_lost(cause)
        outcome = rules.disconnected(cause, run, alone=True) if lost_alone else rules.outcome(cause, run)
        outcome = outcome if ended is COMPLETED else ended
        if outcome is RELEASED:
            continue
        finished = FinishedRun(run, outcome, starts=entry.deaths + 1)
        try:
            again = yield ExecuteInOwnSession(settle_alone, (context, finished, entry))
        except EndRefused as refused:
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
            yield ExecuteInOwnSession(quarantine.discard_entry, (context.spec, entry))
        except Exception:
            context.journal.discard(entry)
            raise
