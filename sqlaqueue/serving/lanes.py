"""What the threads or tasks of a Consumer do, written once for both: the lanes, the keeper beside them, and the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

from sqlalchemy import exc

from sqlaqueue.exc import JobTimeout, SqlaqueueError
from sqlaqueue.serving import operations as ops
from sqlaqueue.serving import tending
from sqlaqueue.serving.crew import runs_of
from sqlaqueue.serving.operations import Ended
from sqlaqueue.serving.outcomes import RELEASED
from sqlaqueue.serving.runs import held_batch, leased_unit, strike
from sqlaqueue.serving.shift import Shift
from sqlaqueue.serving.steps import Beside, InSession, Pause, Report, Rest, Script, Step
from sqlaqueue.serving.turns import Turn
from sqlaqueue.spec import Key
from sqlaqueue.versions import why_undefined

logger = logging.getLogger("sqlaqueue")

_LONGEST_REST = 0.5
_MOST_TOLD = 20


def lane(shift: Shift) -> Script:
    """Claim and work until the shift stops: each thread or task does so, one for each handler that may be at work."""
    take_turn = _held_turn if shift.plan.holds_transaction else _leased_turn
    while not shift.plan.stopping:
        turn = Turn(shift.crew)
        try:
            busy = yield from take_turn(shift, turn)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the queue must be served on
            turn.end()
            yield from _trouble(shift, error)
            continue
        if busy:
            turn.end()
        elif shift.draining:
            turn.end()
            if turn.nothing_left() and not (yield from _mended(shift)):
                shift.stop()
            else:
                yield Rest(turn.version, 0.1)
        else:
            # The turn to claim is kept meanwhile: one look at an empty queue is enough for all lanes.
            yield Pause(shift.crew.pace.poll())
            turn.end()


def _trouble(shift: Shift, error: Exception) -> Script:
    """Wait before the next try, or end when it is the program that is wrong."""
    if not shift.proven and is_programs_fault(error):
        shift.fail(error)
        return
    wait = shift.crew.pace.failed()
    said = why_undefined(error, shift.plan.spec) or f"{type(error).__name__}: {error}"
    logger.warning("%s: %s; next try in %.1f s", shift.name, said, wait)
    yield Pause(wait)


def _held_turn(shift: Shift, turn: Turn) -> Script:
    if not turn.to_claim():
        yield Rest(turn.version, _LONGEST_REST)
        return True
    yield from _check(shift)
    yield from strike(shift.plan)
    suspect = shift.plan.suspects.take()
    try:
        report: Report = yield InSession(held_batch(shift.plan, turn, suspect))
    finally:
        if suspect is not None:
            shift.plan.suspects.end([suspect])
    shift.works()
    shift.crew.report(report)
    return bool(report.claimed)


def _leased_turn(shift: Shift, turn: Turn) -> Script:
    crew, plan = shift.crew, shift.plan
    unit = turn.to_work()
    if unit:
        crew.report((yield from _work(shift, unit)))
        plan.suspects.end([run.key for run in runs_of(unit)])
    if crew.wants_settling(time.monotonic()):
        yield from settle_finished(shift)
        return True
    if unit:
        return True
    if not turn.to_claim():
        yield Rest(turn.version, _LONGEST_REST)
        return True
    yield from _check(shift)
    jobs = yield Beside(ops.claim_and_commit, (plan, crew.pace.claim_size()))
    shift.works()
    runs = runs_of(jobs)
    crew.tell_claimed(runs)
    crew.fill(jobs)
    turn.claimed(runs)
    return bool(jobs)


def _work(shift: Shift, unit: Sequence[Any]) -> Script:
    """Run one job, or one batch; whatever goes wrong on the way, its runs end."""
    try:
        return (yield InSession(leased_unit(shift.plan, unit)))
    except Exception as error:  # noqa: BLE001 - such as a session that cannot be made
        logger.warning("%s: %s: %s", shift.name, type(error).__name__, error)
        return Report(unsettled=[Ended(run, RELEASED) for run in runs_of(unit)])


def _check(shift: Shift) -> Script:
    if not shift.proven:
        yield Beside(ops.check_transactions, (shift.plan,))
        yield Beside(ops.check_database, (shift.plan,))


def is_programs_fault(error: Exception) -> bool:
    """Return whether ``error`` tells of a mistake in the program, such as a missing table, and not of the database."""
    if isinstance(error, exc.DBAPIError):
        return isinstance(error, exc.ProgrammingError)
    own = (SqlaqueueError, exc.SQLAlchemyError, TypeError, AttributeError, LookupError, ValueError)
    return isinstance(error, own) and not isinstance(error, exc.TimeoutError)


# -- settling ------------------------------------------------------------------------------------------------------


def settle_finished(shift: Shift, *, wait: bool = True) -> Script:
    """Settle what has ended, together; if that cannot be done, one by one, and give up what cannot be settled at all.

    :param wait: whether to wait for rows that somebody has locked.
    """
    crew = shift.crew
    finished = crew.take_finished()
    if not finished:
        return
    stuck: list[Ended] = []
    try:
        try:
            lost = yield Beside(partial(ops.settle_and_commit, wait=wait), (shift.plan, finished))
        except exc.DBAPIError as error:
            if ops.will_pass(error):
                raise
            lost, stuck = yield Beside(partial(ops.settle_each, wait=wait), (shift.plan, finished))
    except Exception:
        crew.give_back(finished)
        raise
    for one in stuck:
        logger.error("%s: job %s stays as it is until its lease expires", shift.name, one.run.key)
    crew.settled(finished, lost, stuck)


# -- the keeper ----------------------------------------------------------------------------------------------------


def keep(shift: Shift) -> Script:
    """Tend the queue beside the lanes: extend leases, rescue, look for requests, until the shift is over."""
    while not shift.over:
        now = time.monotonic()
        for duty in (_look_at_timeouts, _extend_leases, _settle_overlooked, _sweep, _reconcile):
            try:
                yield from duty(shift, now)
            except Exception as error:  # noqa: BLE001 - the database may be gone; the other duties are due all the same
                logger.warning("%s: tending the queue: %s: %s", shift.name, type(error).__name__, error)
        yield Pause(shift.until_next_duty(), past_stop=True)


def _look_at_timeouts(shift: Shift, now: float) -> Script:
    """End the runs of handlers that cannot be interrupted: what they still come to is refused."""
    if shift.interrupts:
        return
    crew = shift.crew
    late = [run for one in crew.overdue(now) for run in one.runs]
    if late and not shift.plan.holds_transaction:
        timeout = JobTimeout(f"the handler ran for longer than {shift.plan.timeout:g} seconds")
        ended = [Ended(run, shift.plan.judge(timeout, run)) for run in late]
        # A row that its handler has locked is settled when it returns.
        lost, stuck = yield Beside(partial(ops.settle_each, wait=False), (shift.plan, ended))
        crew.report(Report(settled=[one for one in ended if one not in [*lost, *stuck]], lost=lost))
    if crew.is_stuck:
        # Nobody is left to run these, and their leases would be extended for as long as the handlers hang.
        crew.report(Report(unsettled=[Ended(run, RELEASED) for run in crew.empty_inbox()]))


def _extend_leases(shift: Shift, now: float) -> Script:
    if shift.plan.has_leases and shift.agenda.due("heartbeat", now):
        # Set first, as in every duty: after a failure the next try must not be now.
        shift.agenda.set("heartbeat", now + min(shift.heartbeat, 1.0))
        alive = shift.crew.alive()
        if alive:
            yield Beside(tending.extend_leases, (shift.plan, alive))
        shift.agenda.set("heartbeat", now + shift.heartbeat)


def _settle_overlooked(shift: Shift, now: float) -> Script:
    """Settle what the lanes leave behind when each of them has begun with something long."""
    if shift.crew.overlooks(now):
        # Without waiting: whoever holds a row must not keep the leases of all others from being extended.
        yield from settle_finished(shift, wait=False)


def _sweep(shift: Shift, now: float) -> Script:
    if not shift.agenda.due("sweep", now):
        return
    plan, crew = shift.plan, shift.crew
    shift.agenda.set("sweep", now + crew.pace.sweep())
    if plan.has_leases:
        crew.tell_rescued((yield Beside(tending.rescue_expired, (plan,))))
        plan.look_for_suspects = True
    held = crew.held()
    if held:
        asked = yield Beside(tending.requests_to_stop, (plan, held))
        crew.asked_to_stop(asked, time.monotonic())


def _reconcile(shift: Shift, now: float) -> Script:
    if shift.agenda.due("reconcile", now):
        shift.agenda.set("reconcile", now + shift.crew.pace.reconcile(0))
        yield from _mend_messages(shift)
        done = time.monotonic()
        shift.agenda.set("reconcile", done + shift.crew.pace.reconcile(done - now))


def _mend_messages(shift: Shift) -> Generator[Step, Any, int]:
    """Compare messages with jobs, tell what was wrong, and return how much."""
    keys: Sequence[Key] = yield Beside(tending.reconcile_messages, (shift.plan,))
    if keys:
        some = ", ".join(str(key[0]) if len(key) == 1 else str(key) for key in keys[:_MOST_TOLD])
        more = f" and {len(keys) - _MOST_TOLD} more" if len(keys) > _MOST_TOLD else ""
        logger.warning(
            "%s: jobs that waited without a message, or messages whose job is missing or not waiting: %s%s",
            shift.name,
            some,
            more,
        )
    return len(keys)


def _mended(shift: Shift) -> Generator[Step, Any, bool]:
    """Return whether something was wrong with the messages, so that a claim may find more than the last one did."""
    try:
        return bool((yield from _mend_messages(shift)))
    except Exception as error:  # noqa: BLE001 - the queue has been served to its end all the same
        logger.warning("%s: tending the queue: %s: %s", shift.name, type(error).__name__, error)
        return False


# -- the end -------------------------------------------------------------------------------------------------------


def wind_up(shift: Shift) -> Script:
    """Settle what has ended, and give back what was claimed and has not; the lanes are over, or given up."""
    crew, plan = shift.crew, shift.plan
    if plan.holds_transaction:
        # Their transactions end when their handlers do, or the process; they must not look as if they had killed it.
        plan.entries.give_up_all()
    else:
        crew.report(Report(unsettled=[Ended(run, RELEASED) for run in crew.forget_held()]))
    for last in (strike(plan), settle_finished(shift, wait=False)):
        try:
            yield from last
        except Exception:
            logger.exception(
                "%s: could not settle at the end; the jobs run again when their leases have expired", shift.name
            )
