"""What the threads or tasks of a Consumer do, written once for both: the lanes, and the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from sqlaqueue.consumer import lifecycle, startup
from sqlaqueue.consumer.claiming.claim_slot import Turn
from sqlaqueue.consumer.context import Shift
from sqlaqueue.consumer.core.effects import Beside, Do, InSession, Pause, Report, Rest, Script, Step, Watch
from sqlaqueue.consumer.core.transient_errors import is_database_error, is_program_error
from sqlaqueue.consumer.executing.executor import Hand
from sqlaqueue.consumer.executing.held import held_batch, strike
from sqlaqueue.consumer.executing.leased import leased_batch, run_leased, run_to_the_end
from sqlaqueue.consumer.maintenance import leases
from sqlaqueue.consumer.maintenance.loop import mend_messages
from sqlaqueue.consumer.sessions.connection_checks import driver_connection, shared_connection_error
from sqlaqueue.consumer.settling.completions import settle_finished, settle_postponed
from sqlaqueue.consumer.settling.outcomes import RELEASED, Ended
from sqlaqueue.log import logger
from sqlaqueue.queue.backend import backend

_REST, _LONGEST_REST, _REST_DRAINING = 0.5, 5.0, 0.1
"""Seconds after which a lane looks again although nobody has woken it: while there is work, without any, and if it may
be the last."""
_MOST_TOLD = 20


def lane(shift: Shift) -> Script:
    """Claim and work until the shift stops: each thread or task does so, one for each handler that may be at work."""
    if shift.plan.holds_transaction:
        yield from _take_turns(shift, _held_turn)
        return
    while not shift.plan.stopping:
        try:
            yield InSession(_take_turns(shift, _leased_turn))
        except Exception as error:  # noqa: BLE001 - as below
            yield from _trouble(shift, error)


def _take_turns(shift: Shift, take_turn: Callable[[Shift, Turn], Script]) -> Script:
    """Take one turn after the other, as long as that leaves the script's session as good as new."""
    clean = True
    while clean and not shift.plan.stopping:
        turn = Turn(shift.crew)
        try:
            busy = yield from take_turn(shift, turn)
            clean = turn.clean
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the queue must be served on
            turn.end()
            yield from _trouble(shift, error)
            continue
        if busy:
            turn.end()
        elif shift.draining:
            turn.end()
            # After the end of this turn, which is no reason to look again itself.
            seen = shift.crew.version
            if turn.nothing_left() and not (yield from _mended(shift)):
                # Unless somebody has stopped it before.
                shift.drained = not shift.plan.stopping
                shift.stop()
            else:
                yield Rest(seen, _REST_DRAINING)
        else:
            # The turn to claim is kept meanwhile: one look at an empty queue is enough for all lanes.
            yield Watch(shift.until_look())
            turn.end()


def _trouble(shift: Shift, error: Exception) -> Script:
    """Wait before the next try, or end when it is the program that is wrong."""
    if not shift.proven and is_program_error(error):
        shift.fail(error)
    if shift.error is not None:
        return
    # Whatever this look was to answer is still waiting.
    shift.calls.look_at_once()
    wait = shift.crew.pace.failed()
    said = backend().checks.undefined_object_advice(error, shift.plan.spec) or f"{type(error).__name__}: {error}"
    extra = shift.fields("consumer_trouble", delay=wait, error_kind=type(error).__name__)
    logger.warning("%s: %s; next try in %.1f s", shift.name, said, wait, extra=extra)
    shift.tell_start()
    yield Pause(wait)


def _held_turn(shift: Shift, turn: Turn) -> Script:
    if not turn.to_claim():
        yield Rest(turn.version, _LONGEST_REST if shift.crew.at_rest else _REST)
        return True
    if not shift.wants_look():
        return False
    yield from _check(shift)
    yield from strike(shift.plan)
    suspect = shift.plan.suspects.take()
    try:
        report: Report = yield InSession(held_batch(shift.crew, turn, suspect, shift.calls))
    finally:
        if suspect is not None:
            shift.plan.suspects.end([suspect.key])
    shift.works()
    shift.crew.report(report)
    if shift.plan.suspects.remembered():
        shift.calls.look_at_once()
    return bool(report.claimed)


def _leased_turn(shift: Shift, turn: Turn) -> Script:
    crew = shift.crew
    if crew.runs_low and shift.wants_look() and turn.to_claim():
        return bool((yield from _claim(shift, turn))) or crew.has_work
    hand = turn.to_work()
    if hand is not None:
        turn.clean = yield from _work(shift, hand)
    elif turn.to_claim():
        if shift.wants_look():
            return bool((yield from _claim(shift, turn)))
        if not crew.wants_settling(time.monotonic()):
            return False
    elif not crew.wants_settling(time.monotonic()):
        yield Rest(turn.version, _LONGEST_REST if shift.crew.at_rest else _REST)
    if crew.wants_settling(time.monotonic()):
        yield from settle_finished(shift)
    return True


def _claim(shift: Shift, turn: Turn) -> Script:
    """Claim, and settle with the same commit what has ended."""
    crew, plan = shift.crew, shift.plan
    yield from _check(shift)
    if shift.calls.suspects:
        plan.look_for_suspects, shift.calls.suspects = True, False
    finished = crew.take_finished()
    try:
        return (yield InSession(leased_batch(crew, turn, shift.calls, finished)))
    except Exception:
        if crew.give_back(finished):
            # Which of the two it was that failed is not known; they must not hold each other up.
            yield from settle_finished(shift)
        raise


def _work(shift: Shift, hand: Hand) -> Generator[Step, Any, bool]:
    """Run one job after the other, or one batch, and return whether that has left the session as good as new.

    Whatever goes wrong on the way, the runs end.
    """
    try:
        return bool((yield from run_to_the_end(shift.crew, hand, run_leased(shift.crew, hand))))
    except Exception as error:  # noqa: BLE001 - such as a database that does not answer
        kind = type(error).__name__
        extra = shift.fields("run_trouble", error_kind=kind)
        logger.warning("%s: %s: %s", shift.name, kind, error, extra=extra)
        return False


def _check(shift: Shift) -> Script:
    if not shift.proven:
        try:
            yield InSession(_two_sessions(shift))
            yield Beside(startup.check_transactions, (shift.plan,))
        except Exception as error:
            if not is_database_error(error):
                # No session has worked yet, and it is not the database that says no.
                shift.fail(error)
            raise
        told = yield Beside(startup.check_database, (shift.plan,))
        lifecycle.log_started(shift, told=told)
        if told and not shift.draining:
            shift.listen()


def _two_sessions(shift: Shift) -> Script:
    """Refuse sessions that share a connection, whatever the engine's pool is called."""
    bind = shift.plan.bind
    mine, other = (yield Do(driver_connection, (bind,))), (yield Beside(driver_connection, (bind,)))
    if mine is other:
        raise shared_connection_error(shift.name, "the engine")


def _mended(shift: Shift) -> Generator[Step, Any, bool]:
    """Return whether something was wrong with the messages, so that a claim may find more than the last one did."""
    try:
        return bool((yield from mend_messages(shift)))
    except Exception as error:  # noqa: BLE001 - the queue has been served to its end all the same
        kind = type(error).__name__
        extra = shift.fields("maintenance_trouble", error_kind=kind)
        logger.warning("%s: tending the queue: %s: %s", shift.name, kind, error, extra=extra)
        return False


# -- the end -------------------------------------------------------------------------------------------------------


def _check_out(shift: Shift) -> Script:
    yield Beside(leases.check_out, (shift.plan, shift.id))


def wind_up(shift: Shift) -> Script:
    """Settle what has ended, and give back what was claimed and has not; the lanes are over, or given up."""
    crew, plan = shift.crew, shift.plan
    if plan.holds_transaction:
        # Their transactions end when their handlers do, or the process; they must not look as if they had killed it.
        plan.entries.give_up_all()
    else:
        crew.report(Report(unsettled=[Ended(run, RELEASED) for run in crew.forget_held()]))
    last_steps = [strike(plan), settle_finished(shift, wait=False), settle_postponed(shift, last=True)]
    if shift.checked_in:
        last_steps.append(_check_out(shift))
    for last in last_steps:
        try:
            yield from last
        except Exception:
            logger.exception(
                "%s: could not settle at the end; the jobs run again when their leases have expired",
                shift.name,
                extra=shift.fields("not_settled"),
            )
