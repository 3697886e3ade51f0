"""Operations on a held batch: its entry in the crash journal, and how its runs are settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import may_be_of_a_run
from sqlaqueue.consumer.executing.job_instances import reload
from sqlaqueue.consumer.executing.reserve_rates import reserve_rates
from sqlaqueue.consumer.notifications.notify import notify_released
from sqlaqueue.consumer.sessions.handler_misuse import RowsChanged, refuse_missing_rows
from sqlaqueue.consumer.settling import crash_journal
from sqlaqueue.consumer.settling.crash_journal import JournalEntry
from sqlaqueue.consumer.settling.outcomes import RELEASED, FinishedRun, Outcome
from sqlaqueue.consumer.settling.settle import without_expiring
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.run import Key, Run, key_text, keys_by_token, keys_from
from sqlaqueue.statements.selection import returning_keys
from sqlaqueue.strategies import ClaimedJobs


def begin_batch(
    session: Session,
    context: ConsumerContext,
    entry: JournalEntry,
    keys: Sequence[Key],
    announcements: Sequence[str] = (),
) -> set[Key]:
    """Write the journal entry of a batch that is about to run, reserve its beginnings, and commit.

    :param keys: the keys of the jobs of the batch.
    :param announcements: the announcements that the claim answered; the others are notified of it with this commit.
    :return: the keys of the jobs that may begin.
    """
    admitted = reserve_rates(session, context, keys)
    if admitted:
        crash_journal.write_entry(session, context.spec, entry, context.settings.worker(), announcements)
        session.commit()
    return admitted


def discard_entry(session: Session, context: ConsumerContext, entry: JournalEntry) -> None:
    """Discard the journal entry of a batch whose transaction was rolled back while its worker lives, and commit."""
    crash_journal.discard_entry(session, context.spec, entry)
    session.commit()


def settle_held(
    session: Session, context: ConsumerContext, finished: Sequence[FinishedRun], entry: JournalEntry
) -> None:
    """Settle a held batch, close its journal entry and commit: with its handlers' writes, in one transaction."""
    lost = context.settler.settle(session, finished)
    refuse_missing_rows(context.spec, [(one.run, one.job) for one in lost])
    _close(session, context, finished, entry)
    if context.settings.notifies and any(one.outcome is RELEASED for one in finished):
        notify_released(session, context.spec)
    with without_expiring(session):
        context.settler.commit(session)


def is_refusal(error: Exception) -> bool:
    """Return whether the database refuses to settle a run, be it by an error or silently."""
    return isinstance(error, RowsChanged) or may_be_of_a_run(error)


class EndRefused(Exception):
    """The database refuses to settle a run, in whatever way; the cause is its error."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"the database refuses to settle the run of job {key_text(run.key)}")
        self.run = run


def settle_alone(
    session: Session, context: ConsumerContext, finished: FinishedRun, entry: JournalEntry
) -> FinishedRun | None:
    """Claim one job of a held batch that was rolled back, and settle its run, all in one transaction.

    If the database refuses the outcome of the run, another one is written.

    :return: the settled run; None when another worker has claimed the job by now.
    :raises EndRefused: if the database refuses each outcome.
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
            again = _settle_anew(session, context, one)
            if again is not None:
                _close(session, context, [again], entry)
                context.settler.commit(session)
        except Exception as failed:
            session.rollback()
            if not is_refusal(failed):
                raise
            refused = failed
        else:
            return again
    raise EndRefused(finished.run) from refused


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
    found = session.execute(
        returning_keys(context.spec, verb), bind_arguments=context.settings.bind_arguments
    ).scalars()
    back = set(keys_from(found, len(context.spec.keys)))
    again = [_settle_anew(session, context, one) for one in finished if one.run.key in back]
    crash_journal.delete_entry(session, context.spec, entry)
    context.settler.commit(session)
    return [one for one in again if one is not None]


def _settle_anew(session: Session, context: ConsumerContext, finished: FinishedRun) -> FinishedRun | None:
    for job in context.claimer.claim_to_settle(session, finished.run.key):
        # With the token of this claim: a settlement inserts only rows that the claim with its token has deleted.
        claimed = run_of(job)
        again = replace(finished, run=replace(finished.run, token=claimed.token if claimed else None), job=job)
        lost = context.settler.settle(session, [again])
        if lost:
            # A trigger has returned NULL: the row would stay as it is, and its handler run again and again.
            refuse_missing_rows(context.spec, [(again.run, None)])
        return again
    return None


def _close(session: Session, context: ConsumerContext, finished: Sequence[FinishedRun], entry: JournalEntry) -> None:
    # A released run counts no attempt, so entries that other batches left behind for its job must stay.
    if any(one.outcome.event == "released" or one.outcome.quarantine for one in finished):
        crash_journal.delete_entry(session, context.spec, entry)
    else:
        crash_journal.close_entry(session, context.spec, entry)
