"""How jobs under leases are claimed, run and settled, for both Consumers."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming import claim_jobs
from sqlaqueue.consumer.claiming.job_buffer import Crew
from sqlaqueue.consumer.core.effects import Beside, Do, Handle, Report, Script, Step
from sqlaqueue.consumer.core.transient_errors import is_connection_lost, is_transient
from sqlaqueue.consumer.executing import job_instances as ops
from sqlaqueue.consumer.executing.executor import Hand, held_run, runs_of
from sqlaqueue.consumer.notifications.poll_schedule import Calls
from sqlaqueue.consumer.sessions.session_usage import has_lost_connection
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.consumer.settling import settle
from sqlaqueue.consumer.settling.outcomes import (
    COMPLETED,
    RELEASED,
    Ended,
    StopRequested,
    concerns_all,
    is_disconnected,
)

if TYPE_CHECKING:
    from sqlaqueue.consumer.claiming.claim_slot import Turn


def leased_batch(crew: Crew, turn: Turn, calls: Calls, finished: Sequence[Ended]) -> Script:
    """Settle what has ended and claim, in one transaction; run at once what is over in a moment.

    :return: how many jobs were claimed.
    """
    plan, limit, look = crew.plan, crew.claim_size(), calls.begin_look()
    began = time.monotonic()
    try:
        claimed: claim_jobs.Claimed = yield Do(
            claim_jobs.settle_and_claim, (plan, finished, limit, look, turn.claims_alone)
        )
    except claim_jobs.AnswerLost as lost:
        # If the server has committed them, they are this Consumer's: nobody has run them, and no attempt is counted.
        with crew.lock:
            crew.finish([Ended(run, RELEASED, begun=False) for run in lost.runs])
        raise (lost.__cause__ or lost) from None
    jobs = claimed.jobs
    crew.pace.succeeded()
    crew.pace.claimed(time.monotonic() - began)
    if finished:
        crew.settled(finished, claimed.lost)
    calls.looked(more=claimed.more)
    crew.tell_claimed(jobs)
    units = plan.units(jobs)
    enough = crew.pace.at_one_go(len(units)) if jobs else None
    if enough is None:
        yield Do(_expunge)
        crew.fill(units)
        turn.claimed(found=bool(jobs), more=claimed.more)
        return len(jobs)
    hand = turn.take(units, enough)
    turn.claimed(found=bool(jobs), more=claimed.more)
    yield from run_to_the_end(crew, hand, run_leased(crew, hand))
    return len(jobs)


def run_to_the_end(crew: Crew, hand: Hand, script: Script) -> Script:
    """Carry out what is to be done with a hand; whatever goes wrong on the way, its runs end."""
    try:
        return (yield from script)
    except Exception:
        # Else nobody would know of them, and they would wait for the end of their lease.
        crew.report(Report(unsettled=[Ended(run, RELEASED) for run in hand.held()]))
        raise


def run_leased(crew: Crew, hand: Hand) -> Script:
    """Run the jobs in a hand, whose claim is committed, in the script's session.

    :return: whether that has left the session as good as new.
    """
    plan, clean = crew.plan, True
    begun = {run.key for run in hand.held()} if plan.suspects.one_runs else set()
    while clean:
        yield Handle(hand)
        if not hand.unit:
            break
        report, clean = yield from _conclude(plan, hand.unit, hand.error)
        crew.report(report)
        hand.put_down()
    # Those that are left are still the ones that run, whichever thread or task does it.
    if begun and plan.suspects.end(begun.difference(run.key for run in crew.held())):
        crew.calls.look_at_once()
    if not hand.is_done:
        if clean:
            # In time for whoever takes them: they belong to one session at most.
            yield Do(_expunge)
            crew.fill(hand.leave_rest())
            hand.rest_has_left()
        else:
            yield from pass_on(crew, hand)
    return clean


def pass_on(crew: Crew, hand: Hand) -> Script:
    """Give others the jobs that a hand does not come to, while their instances are in a session that is in use."""
    left = runs_of(job for unit in hand.leave_rest() for job in unit)
    if left:
        try:
            jobs = yield Beside(ops.load_again, (crew.plan, left))
        except Exception:
            crew.report(Report(unsettled=[Ended(run, RELEASED) for run in left]))
            hand.rest_has_left()
            raise
        there = {run.key for run in runs_of(jobs)}
        crew.fill(crew.plan.units(jobs))
        # Somebody else holds these by now, or has deleted them: to settle them says so.
        crew.report(Report(unsettled=[Ended(run, RELEASED) for run in left if run.key not in there]))
        hand.rest_has_left()


def _conclude(
    plan: Plan, jobs: Sequence[Any], error: BaseException | None
) -> Generator[Step, Any, tuple[Report, bool]]:
    """End the runs of jobs whose handler has raised, or has left a trace in the session.

    :return: what has been done, and whether the session is as clean as before.
    """
    if error is None:
        finished = yield from _finish(plan, jobs)
        if isinstance(finished, Report):
            return finished, False
        error = finished
    used, disconnected = yield Do(_undo)
    clean = not used
    if is_disconnected(error, disconnected):
        return _disconnected(plan, [Ended(held_run(job), RELEASED) for job in jobs], error), False
    if len(jobs) == 1 or concerns_all(error):
        return Report(unsettled=[Ended(held_run(job), plan.judge(error, held_run(job))) for job in jobs]), clean
    if isinstance(error, StopRequested):
        plan.asked.update(error.keys)
    yield Do(ops.reload, (plan, jobs))
    yield Do(_expunge)
    return Report(apart=jobs), False


def _disconnected(plan: Plan, ended: Sequence[Ended], error: BaseException) -> Report:
    """End runs whose connection was lost."""
    plan.look_for_suspects = True
    for one in ended:
        one.outcome = plan.judge_lost(error, one.run, alone=plan.ran_alone(one.run))
    return Report(unsettled=ended)


def _undo(session: Session) -> tuple[bool, bool]:
    """Undo what a handler did, and return whether there was something, and whether its connection is gone."""
    used, disconnected = session.in_transaction(), has_lost_connection(session)
    session.rollback()
    return used, disconnected


def _expunge(session: Session) -> None:
    session.expunge_all()


def _finish(plan: Plan, jobs: Sequence[Any]) -> Generator[Step, Any, Report | BaseException]:
    """Commit a handler's writes with the completion of its jobs.

    :return: a report, or what the database said of what the handler wrote.
    """
    ended = [Ended(held_run(job), COMPLETED, job) for job in jobs]
    try:
        lost = yield Do(settle.complete_and_commit, (plan, ended))
    except Exception as failed:  # noqa: BLE001 - whatever the flush or the commit raises is the job's error
        if not is_transient(failed):
            return failed
        yield Do(ops.rollback)
        if not is_connection_lost(failed):
            return Report(unsettled=[Ended(one.run, plan.judge(failed, one.run)) for one in ended])
        # If it got as far as the commit: was it committed, or not? Whoever settles it looks again.
        return _disconnected(plan, [Ended(one.run, RELEASED, uncertain=one.uncertain) for one in ended], failed)
    if not lost:
        return Report(settled=ended)
    # A batch is one transaction: the mates of a lost job are rolled back with it, and run again uncounted.
    return Report(unsettled=[Ended(one.run, RELEASED) for one in ended if one not in lost], lost=lost)
