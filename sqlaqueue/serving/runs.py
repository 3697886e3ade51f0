"""How a batch is claimed, run and settled: one script a strategy's kind, for both Consumers."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.exc import HandlerMisuseError, WorkerDied
from sqlaqueue.mapping import run_of
from sqlaqueue.serving import operations as ops
from sqlaqueue.serving.calls import NO_CALL, Calls
from sqlaqueue.serving.ledger import Entry
from sqlaqueue.serving.operations import Ended
from sqlaqueue.serving.outcomes import COMPLETED, RELEASED, Abandoned, Outcome, StopRequested, concerns_all
from sqlaqueue.serving.plan import Plan
from sqlaqueue.serving.savepoint import Savepoint
from sqlaqueue.serving.steps import Beside, Do, Handle, Report, Script, Step
from sqlaqueue.serving.telling import spare_others_and_commit
from sqlaqueue.spec import Key, Run

if TYPE_CHECKING:
    from sqlaqueue.serving.turns import Turn


def _rollback(session: Session) -> None:
    session.rollback()


def _run(job: Any) -> Run:
    run = run_of(job)
    if run is None:  # pragma: no cover - the claim's load event sets it
        raise RuntimeError(job)
    return run


def _withdraw_asked(plan: Plan, jobs: Sequence[Any]) -> tuple[list[Any], list[Ended]]:
    """Return the jobs that are to be run, and the ends of those that somebody has cancelled since their claim."""
    wanted = [job for job in jobs if _run(job).key not in plan.asked]
    asked = [job for job in jobs if _run(job).key in plan.asked]
    return wanted, [Ended(_run(job), plan.judge(StopRequested(), _run(job)), job) for job in asked]


# -- a transaction holds the batch ---------------------------------------------------------------------------


def held_batch(plan: Plan, turn: Turn, suspect: Key | None, calls: Calls) -> Script:
    """Claim a batch, or one suspect, run it and settle it in the one transaction that holds it."""
    if suspect is None:
        look = calls.begin_look()
        jobs = yield Do(ops.claim, (plan, plan.batch_size))
        calls.looked(len(jobs), plan.batch_size)
    else:
        look = NO_CALL
        jobs = yield Do(ops.claim_key, (plan, suspect))
    runs = [_run(job) for job in jobs]
    turn.claimed(runs)
    if not jobs:
        if look.spares_others:
            yield Beside(spare_others_and_commit, (plan, look))
        return Report(claimed=0 if suspect is None else 1)
    blamed = len(jobs) == 1 and (suspect is not None or plan.concurrency == 1)
    entry = plan.entries.open([run.key for run in runs], blamed=blamed)
    try:
        yield Beside(ops.enter_ledger, (plan, entry, look.tickets))
        suspects = entry.suspected([run.key for run in runs])
        if suspects and not blamed:
            plan.suspects.add(suspects)
            yield from _give_up(plan, entry)
            return Report(claimed=len(suspects))
        turn.tell_claimed(runs)
        ended = yield from _run_held(plan, jobs, runs, entry)
        return (yield from _settle_held(plan, ended, entry))
    except _BatchBroken as broken:
        yield from _give_up(plan, entry)
        return (yield from _settle_alone(plan, broken.runs, broken.cause, entry))
    except Exception:
        yield from _give_up(plan, entry)
        raise


def _settle_held(plan: Plan, ended: Sequence[Ended], entry: Entry) -> Script:
    try:
        yield Do(ops.settle_held, (plan, ended, entry))
    except DBAPIError as error:
        if ops.will_pass(error):
            raise
        # Such as a deferred constraint, which is checked by the commit: one job must not undo the others for ever.
        yield from _give_up(plan, entry)
        if len(ended) == 1:
            return (yield from _settle_alone(plan, [ended[0].run], error, entry))
        plan.suspects.add([one.run.key for one in ended])
        return Report(claimed=len(ended))
    plan.entries.close(entry)
    return Report(settled=ended, claimed=len(ended))


def _run_held(plan: Plan, jobs: Sequence[Any], runs: Sequence[Run], entry: Entry) -> Generator[Step, Any, list[Ended]]:
    if entry.deaths:
        runs[0].attempt += entry.deaths
        if runs[0].attempt > runs[0].max_attempts:
            msg = f"the worker died {entry.deaths} times while it ran this job alone"
            died = WorkerDied(msg)
            return [Ended(runs[0], Outcome("failed", error=f"WorkerDied: {died}", cause=died), jobs[0], entry.deaths)]
    starts = entry.deaths + 1
    ended: list[Ended] = []
    units = plan.units(jobs)
    while units:
        unit = units.pop(0)
        if plan.stopping:
            ended += [Ended(_run(job), RELEASED, job) for job in unit]
            continue
        unit, withdrawn = _withdraw_asked(plan, unit)
        ended += withdrawn
        if not unit:
            continue
        error = yield from _in_savepoint(plan, unit)
        if error is not None and not plan.spec.strategy.hands_out_rows:
            # These are no part of the session, and would be written again with what a failing handler did to them.
            yield Do(ops.reload, (plan, unit))
        if error is None or len(unit) == 1 or concerns_all(error):
            ended += [Ended(_run(job), plan.judge(error, _run(job)), job, starts) for job in unit]
            continue
        # One bad job must not take its mates along: each is tried by itself.
        yield Do(ops.reload, (plan, unit))
        asked = error.keys if isinstance(error, StopRequested) else ()
        plan.asked.update(asked)
        units = [[job] for job in unit] + units
    return ended


def _in_savepoint(plan: Plan, unit: Sequence[Any]) -> Generator[Step, Any, BaseException | None]:
    """Run the handler in a savepoint, and return what it raised, or what the database said of what it wrote."""
    savepoint: Savepoint = yield Do(Savepoint, (plan,))
    raised: BaseException | None = yield Handle(unit)
    error = raised
    try:
        if error is None:
            try:
                yield Do(_close, (savepoint, True))
            except HandlerMisuseError:
                raise
            except Exception as failed:  # noqa: BLE001 - the flush's or the savepoint's error is the job's
                error = failed
        if error is not None:
            yield Do(_close, (savepoint, False))
    except HandlerMisuseError as misuse:
        cause = raised if isinstance(raised, Abandoned) else misuse
        raise _BatchBroken([_run(job) for job in unit], cause) from raised
    except Exception as broken:
        # The transaction was lost while this handler ran, by whatever it did: were nobody blamed, the batch
        # would be claimed and lost again for ever.
        raise _BatchBroken([_run(job) for job in unit], error or broken) from broken
    return error


def _close(_: Session, savepoint: Savepoint, keep: bool) -> None:  # noqa: FBT001 - called positionally by its step
    savepoint.close(keep=keep)


class _BatchBroken(Exception):
    """The transaction of a batch was lost while a handler ran."""

    def __init__(self, runs: Sequence[Run], cause: BaseException) -> None:
        super().__init__(str(cause))
        self.runs, self.cause = runs, cause


def _give_up(plan: Plan, entry: Entry) -> Script:
    """Give a batch up whose transaction is lost; the worker lives, so nobody is a suspect.

    The row in the ledger goes first: as soon as the jobs are free, others look there for them.
    """
    plan.entries.give_up(entry)
    # Where that fails, it stays on the list of what is to be struck out.
    with contextlib.suppress(Exception):
        yield from strike(plan)
    yield Do(_rollback)


def strike(plan: Plan) -> Script:
    """Strike out of the ledger what this Consumer has given up."""
    while (entry := plan.entries.take_given_up()) is not None:
        try:
            yield Beside(ops.strike_ledger, (plan, entry))
        except Exception:
            plan.entries.give_up(entry)
            raise


def _settle_alone(plan: Plan, runs: Sequence[Run], cause: BaseException, entry: Entry) -> Script:
    """Count the attempt of those at whose hands a batch was lost; its other jobs are free as they were."""
    settled = []
    for run in runs:
        outcome = plan.judge(cause, run)
        if outcome is not RELEASED:
            ended = yield Beside(ops.settle_alone, (plan, Ended(run, outcome, starts=entry.deaths + 1), entry))
            settled += [] if ended is None else [ended]
    return Report(settled=settled, claimed=len(entry.names))


# -- leases hold the jobs --------------------------------------------------------------------------------------


def leased_unit(plan: Plan, jobs: Sequence[Any]) -> Script:
    """Run one job, or one batch, whose claim is committed."""
    jobs, withdrawn = _withdraw_asked(plan, jobs)
    if not jobs:
        return Report(unsettled=withdrawn)
    adopted: list[Any] = yield Do(ops.adopt, (jobs,))
    error: BaseException | None = yield Handle(adopted)
    if error is None:
        report, error = yield from _finish(plan, adopted)
        if report is not None:
            report.unsettled = [*report.unsettled, *withdrawn]
            return report
    yield Do(_rollback)
    if error is None or len(adopted) == 1 or concerns_all(error):
        ended = [Ended(_run(job), plan.judge(error, _run(job))) for job in adopted]
        return Report(unsettled=ended + withdrawn)
    if isinstance(error, StopRequested):
        plan.asked.update(error.keys)
    yield Do(ops.reload, (plan, adopted))
    yield Do(_expunge)
    return Report(unsettled=withdrawn, apart=adopted)


def _expunge(session: Session) -> None:
    session.expunge_all()


def _finish(plan: Plan, jobs: Sequence[Any]) -> Generator[Step, Any, tuple[Report | None, BaseException | None]]:
    """Commit a handler's writes with the completion of its jobs; leave jobs without writes to be settled in bulk.

    :return: a report when all is said with it, or what the database said of what the handler wrote.
    """
    if not (yield Do(ops.touched)):
        return None, None
    ended = [Ended(_run(job), COMPLETED, job) for job in jobs]
    try:
        lost = yield Do(ops.complete_and_commit, (plan, ended))
    except Exception as failed:  # noqa: BLE001 - whatever the flush or the commit raises is the job's error
        if not ops.will_pass(failed):
            return None, failed
        yield Do(_rollback)
        if not (isinstance(failed, DBAPIError) and failed.connection_invalidated):
            return Report(unsettled=[Ended(one.run, RELEASED) for one in ended]), None
        # If it got as far as the commit: was it committed, or not? Whoever settles it looks again.
        doubtful = [Ended(one.run, plan.judge(failed, one.run), uncertain=one.uncertain) for one in ended]
        return Report(unsettled=doubtful), None
    if not lost:
        return Report(settled=ended), None
    # A batch is one transaction: the mates of a lost job are rolled back with it, and run again uncounted.
    mates = [Ended(one.run, RELEASED) for one in ended if one not in lost]
    return Report(unsettled=mates, lost=lost), None
