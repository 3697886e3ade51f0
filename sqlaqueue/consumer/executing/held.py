"""How a batch is claimed, run and settled in the one transaction that holds it, for both Consumers."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming import claim_jobs
from sqlaqueue.consumer.claiming.job_buffer import Crew
from sqlaqueue.consumer.claiming.quarantine import Suspect
from sqlaqueue.consumer.core.effects import Beside, Do, Handle, Report, Script, Step
from sqlaqueue.consumer.core.transient_errors import (
    is_connection_lost,
    is_savepoint_missing,
    is_transient,
    may_settle_later,
)
from sqlaqueue.consumer.executing import job_instances as ops
from sqlaqueue.consumer.executing.executor import Hand, held_run, runs_of
from sqlaqueue.consumer.notifications.notify import notify_all_claimed_and_commit
from sqlaqueue.consumer.notifications.poll_schedule import NO_CALL, Calls
from sqlaqueue.consumer.sessions.handler_misuse import RowsChanged, check_rows, transaction_ended_error
from sqlaqueue.consumer.sessions.savepoint import BatchLost, Savepoint
from sqlaqueue.consumer.sessions.session_usage import is_expired
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.consumer.settling.crash_journal import Entry
from sqlaqueue.consumer.settling.outcomes import (
    RELEASED,
    Abandoned,
    Ended,
    Outcome,
    StopRequested,
    concerns_all,
    is_disconnected,
)
from sqlaqueue.exc import HandlerMisuseError, WorkerDied
from sqlaqueue.keys import Key
from sqlaqueue.queue.run import Run

if TYPE_CHECKING:
    from sqlaqueue.consumer.claiming.claim_slot import Turn


LEDGER_PATIENCE = 2.0
"""Seconds for an entry in the ledger, which is made beside a transaction that holds jobs; see :func:`ledger.enter`."""


def held_batch(crew: Crew, turn: Turn, suspect: Suspect | None, calls: Calls) -> Script:
    """Claim a batch, or one suspect, run it and settle it in the one transaction that holds it."""
    plan = crew.plan
    if suspect is None:
        look = calls.begin_look()
        jobs, more = yield Do(claim_jobs.claim, (plan, crew.claim_size()))
        calls.looked(more=more)
    else:
        look = NO_CALL
        jobs, more = (yield Do(claim_jobs.claim_key, (plan, suspect.key))), False
    runs = runs_of(jobs)
    if jobs:
        turn.hold(runs)
    turn.claimed(found=bool(jobs), more=more)
    if not jobs:
        if look.spares_others:
            yield Beside(notify_all_claimed_and_commit, (plan, look))
        return Report(claimed=0 if suspect is None else 1)
    blamed = len(jobs) == 1 and (plan.concurrency == 1 if suspect is None else suspect.alone)
    entry = plan.entries.open([run.key for run in runs], blamed=blamed)
    try:
        yield Beside(ops.enter_ledger, (plan, entry, look.tickets), patience=LEDGER_PATIENCE)
        suspects = entry.suspected([run.key for run in runs])
        again = entry.suspected([run.key for run in runs], again=True)
        if not blamed and (again or (suspects and suspect is None)):
            plan.suspects.add(again)
            plan.suspects.add(suspects, together=True)
            yield from _give_up(plan, entry)
            return Report(claimed=len(suspects))
        for run in runs:
            run.isolated = blamed and (suspect is not None or bool(suspects))
        crew.tell_claimed(jobs)
        ended = yield from _run_held(crew, jobs, entry)
        return (yield from _settle_held(plan, ended, entry))
    except _BatchBroken as broken:
        return (yield from _settle_broken(plan, jobs, broken, entry))
    except Exception:
        yield from _give_up(plan, entry)
        raise


def _settle_broken(plan: Plan, jobs: Sequence[Any], broken: _BatchBroken, entry: Entry) -> Script:
    if broken.disconnected:
        return (yield from _settle_disconnected(plan, broken.runs, broken.cause, entry))
    yield from _give_up(plan, entry)
    put_right: list[Ended] = []
    if broken.past_session:
        before = [one for one in broken.ended if one.run not in broken.runs]
        put_right = yield Beside(ops.settle_committed, (plan, jobs, before, entry))
    report: Report = yield from _settle_alone(plan, broken.runs, broken.cause, entry)
    report.settled = [*put_right, *report.settled]
    return report


def _settle_held(plan: Plan, ended: Sequence[Ended], entry: Entry) -> Script:
    try:
        yield Do(ops.settle_held, (plan, ended, entry))
    except RowsChanged as misuse:
        # Another job's handler may have done it: by themselves it is known.
        return (yield from _settle_apart(plan, ended, misuse, misuse.keys, entry))
    except Exception as error:
        if is_connection_lost(error):
            # Whatever is left of them runs by itself. Not noted in the ledger, for most are settled if it was the
            # commit's answer that got lost.
            if not ended[0].run.isolated:
                plan.suspects.add([one.run.key for one in ended])
                raise
            return (yield from _settle_disconnected(plan, [one.run for one in ended], error, entry))
        if not isinstance(error, DBAPIError) or is_transient(error):
            raise
        if may_settle_later(error):
            # Nothing is wrong with the jobs; what is longer than a batch may be because it is one.
            yield from _give_up(plan, entry)
            if len(ended) == 1:
                raise
            plan.suspects.add([one.run.key for one in ended])
            return Report(claimed=len(ended))
        # Such as a deferred constraint, which is checked by the commit: one job must not undo the others for ever.
        return (yield from _settle_apart(plan, ended, error, [one.run.key for one in ended], entry))
    plan.entries.close(entry)
    return Report(settled=ended, claimed=len(ended))


def _settle_apart(plan: Plan, ended: Sequence[Ended], error: Exception, keys: Sequence[Key], entry: Entry) -> Script:
    """Blame an error on the only job of a batch, or have the jobs with these keys run by themselves."""
    yield from _give_up(plan, entry)
    if len(ended) == 1:
        return (yield from _settle_alone(plan, [ended[0].run], error, entry))
    plan.suspects.add(keys)
    return Report(claimed=len(ended))


def _run_held(crew: Crew, jobs: Sequence[Any], entry: Entry) -> Generator[Step, Any, list[Ended]]:
    plan, starts, ended = crew.plan, entry.deaths + 1, list[Ended]()
    if entry.deaths:
        run = held_run(jobs[0])
        run.attempt += entry.deaths
        if run.attempt > run.max_attempts:
            msg = f"the worker died {entry.deaths} times while it ran this job alone"
            died = WorkerDied(msg)
            return [Ended(run, Outcome("failed", error=f"WorkerDied: {died}", cause=died), jobs[0], entry.deaths)]
    units = plan.units(jobs)
    while units:
        hand = Hand(crew, units, ended.extend, enough=crew.pace.enough())
        units = []
        while not (hand.is_done or plan.stopping or hand.is_over):
            try:
                yield from _in_savepoint(plan, hand)
            except _BatchBroken as broken:
                broken.ended = ended
                raise
            unit, error = hand.unit, hand.error
            if error is not None and not plan.spec.strategy.keeps_rows:
                # These are no part of the session, and would be written again with what a failing handler did to them.
                yield Do(ops.reload, (plan, unit))
            if error is None or len(unit) == 1 or concerns_all(error):
                ended += [Ended(held_run(job), plan.judge(error, held_run(job)), job) for job in unit]
            else:
                # One bad job must not take its mates along: each is tried by itself.
                yield Do(ops.reload, (plan, unit))
                plan.asked.update(error.keys if isinstance(error, StopRequested) else ())
                units += [[job] for job in unit]
            hand.put_down()
            if hand.first and is_expired(hand.first[0]):
                yield Do(ops.reload, (plan, [job for unit in hand.left() for job in unit]))
        ended += [Ended(held_run(job), RELEASED, job) for unit in hand.leave_rest() for job in unit]
    for one in ended:
        one.starts = starts
    return ended


def _in_savepoint(plan: Plan, hand: Hand) -> Script:
    """Make calls of the handler in a savepoint; of what the database says to its writes, the last one has the error."""
    savepoint: Savepoint = yield Do(Savepoint, (plan,))
    hand.savepoint = savepoint
    yield Handle(hand)
    raised = hand.error
    try:
        if raised is None:
            try:
                hand.error = yield Do(check_rows, (plan, hand.unit, runs_of(hand.unit)))
                if hand.error is None:
                    yield Do(_close, (savepoint, True))
            except HandlerMisuseError:
                raise
            except Exception as failed:
                if not hand.unit or is_savepoint_missing(failed):
                    raise
                hand.error = failed  # the flush's or the savepoint's error is the job's
        if hand.error is not None:
            yield Do(_close, (savepoint, False))
    except HandlerMisuseError as misuse:
        cause = raised if isinstance(raised, Abandoned) else misuse
        raise _BatchBroken(runs_of(hand.unit), cause, past_session=True) from raised
    except Exception as broken:
        # The transaction was lost while this handler ran, by whatever it did: were nobody blamed, the batch
        # would be claimed and lost again for ever.
        if is_savepoint_missing(broken) and not isinstance(hand.error, Abandoned):
            raise _BatchBroken(runs_of(hand.unit), transaction_ended_error(), past_session=True) from broken
        its = hand.error or broken
        gone = isinstance(broken, BatchLost) or is_connection_lost(broken)
        raise _BatchBroken(runs_of(hand.unit), its, disconnected=is_disconnected(its, gone)) from broken


def _close(_: Session, savepoint: Savepoint, keep: bool) -> None:  # noqa: FBT001 - called positionally by its step
    savepoint.close(keep=keep)


class _BatchBroken(Exception):
    """The transaction of a batch was lost while a handler ran."""

    def __init__(
        self, runs: Sequence[Run], cause: BaseException, *, disconnected: bool = False, past_session: bool = False
    ) -> None:
        super().__init__(str(cause))
        self.runs, self.cause, self.disconnected, self.past_session = runs, cause, disconnected, past_session
        self.ended: Sequence[Ended] = ()
        """The runs of the batch that had ended before."""


def _give_up(plan: Plan, entry: Entry) -> Script:
    """Give a batch up whose transaction is lost; the worker lives, so nobody is a suspect.

    The row in the ledger goes first: as soon as the jobs are free, others look there for them.
    """
    plan.entries.give_up(entry)
    # Where that fails, it stays on the list of what is to be struck out.
    with contextlib.suppress(Exception):
        yield from strike(plan)
    yield Do(ops.rollback)


def strike(plan: Plan) -> Script:
    """Strike out of the ledger what this Consumer has given up."""
    while (entry := plan.entries.take_given_up()) is not None:
        try:
            yield Beside(ops.strike_ledger, (plan, entry))
        except Exception:
            plan.entries.give_up(entry)
            raise


def _settle_disconnected(plan: Plan, runs: Sequence[Run], cause: BaseException, entry: Entry) -> Script:
    """End runs whose connection was lost, and the batch with it.

    Who is to blame cannot be known, so no attempt is counted: they stay in the ledger, and run by themselves. A job
    that did so already pays for it; where that cannot be written, as the server is not there yet, the ledger says it.
    """
    keys = [run.key for run in runs]
    if not all(run.isolated for run in runs):
        entry.leave_behind(keys, starts=0)
        yield from _give_up(plan, entry)
        plan.suspects.add(keys)
        ended = [Ended(run, plan.judge_lost(cause, run, alone=False)) for run in runs]
        return Report(settled=ended, claimed=len(entry.names))
    yield Do(ops.rollback)
    try:
        report = yield from _settle_alone(plan, runs, cause, entry)
    except Exception:
        entry.leave_behind(keys, starts=1)
        plan.entries.give_up(entry)
        raise
    yield from _give_up(plan, entry)
    return report


def _settle_alone(plan: Plan, runs: Sequence[Run], cause: BaseException, entry: Entry) -> Script:
    """Count the attempt of those at whose hands a batch was lost; its other jobs are free as they were."""
    settled = []
    for run in runs:
        outcome = (
            plan.judge_lost(cause, run, alone=True)
            if run.isolated and is_connection_lost(cause)
            else plan.judge(cause, run)
        )
        if outcome is not RELEASED:
            ended = yield Beside(ops.settle_alone, (plan, Ended(run, outcome, starts=entry.deaths + 1), entry))
            settled += [] if ended is None else [ended]
    return Report(settled=settled, claimed=len(entry.names))
