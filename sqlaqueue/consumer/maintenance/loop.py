"""What the keeper does beside the lanes: each duty when it is due."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

from sqlalchemy.exc import DBAPIError

from sqlaqueue.consumer.claiming import batch_size
from sqlaqueue.consumer.context import Shift
from sqlaqueue.consumer.core.effects import Beside, Doze, Report, Script, Step
from sqlaqueue.consumer.core.transient_errors import is_transient, may_recover
from sqlaqueue.consumer.executing.executor import runs_of
from sqlaqueue.consumer.executing.leased import pass_on
from sqlaqueue.consumer.maintenance import leases
from sqlaqueue.consumer.maintenance.retention import Walk
from sqlaqueue.consumer.settling import settle
from sqlaqueue.consumer.settling.completions import settle_finished, settle_postponed
from sqlaqueue.consumer.settling.outcomes import RELEASED, Ended
from sqlaqueue.exc import JobTimeout
from sqlaqueue.keys import Key, key_text, key_value
from sqlaqueue.log import logger
from sqlaqueue.queue.backend import CONSUMERS

TENDERS = 3
"""How many of the consumers that hear each other do what one has to do for all; more than one, for one may be dead."""

_MOST_TOLD = 20
_AFTER_TROUBLE = 0.25
_AHEAD = 50


def keep(shift: Shift) -> Script:
    """Tend the queue beside the lanes until the shift is over."""
    while not shift.over:
        now, pause = time.monotonic(), 0.0
        for duty in _DUTIES:
            try:
                yield from duty(shift, now)
            except Exception as error:  # noqa: BLE001 - the database may be gone; the other duties are due all the same
                # Until a first claim has worked, a lane says what is wrong with the program; it would be said twice.
                if error is not shift.error and (shift.proven or may_recover(error)):
                    kind = type(error).__name__
                    extra = shift.fields("maintenance_trouble", error_kind=kind)
                    logger.warning("%s: tending the queue: %s: %s", shift.name, kind, error, extra=extra)
                pause = _AFTER_TROUBLE
        yield Doze(max(shift.until_next_duty(), pause))


def _look_at_timeouts(shift: Shift, now: float) -> Script:
    """End the runs of handlers that cannot be interrupted: what they still come to is refused."""
    if shift.interrupts:
        return
    crew = shift.crew
    late = crew.overdue(now)
    if late and not shift.plan.holds_transaction:
        timeout = JobTimeout(f"the handler ran for longer than {shift.plan.timeout:g} seconds")
        ended = [Ended(run, shift.plan.judge(timeout, run)) for run in late]
        # A row that its handler has locked is settled when it returns.
        lost, stuck, held_up = yield Beside(partial(settle.settle_each, wait=False), (shift.plan, ended))
        stuck += held_up
        for one in stuck:
            key = one.run.key
            extra = shift.fields("timed_out", job_key=key_value(key), attempt=one.run.attempt)
            text = "%s: job %s ran into its timeout of %g s, and cannot be settled before its handler returns"
            logger.warning(text, shift.name, key_text(key), shift.plan.timeout, extra=extra)
        crew.report(Report(settled=[one for one in ended if one not in [*lost, *stuck]], lost=lost))
    if crew.is_stuck:
        # Nobody is left to run these, and their leases would be extended for as long as the handlers hang.
        crew.report(Report(unsettled=[Ended(run, RELEASED) for run in crew.forget_waiting()]))


def _pass_on_blocked(shift: Shift, now: float) -> Script:
    """Give other lanes the jobs behind a handler that takes longer than was expected when its lane kept them."""
    if shift.plan.concurrency > 1 and not shift.plan.holds_transaction:
        for hand in shift.crew.at_work():
            if hand.is_blocked(now, batch_size.BLOCKED):
                yield from pass_on(shift.crew, hand)


def _give_back_late(shift: Shift, now: float) -> Script:
    """Give other Consumers the jobs that would wait here for too long before they begin."""
    crew = shift.crew
    if shift.plan.holds_transaction:
        return
    late = runs_of(job for unit in crew.late_units(now) for job in unit)
    if late:
        # Such a request is meant for this run: whoever has the job next would take it for an old one.
        crew.asked_to_stop((yield Beside(leases.requests_to_stop, (shift.plan, late))), time.monotonic())
        number = crew.give_back_late(now)
        extra = shift.fields("jobs_given_back", count=number)
        logger.info("%s: gives %d jobs back that would wait for its handlers", shift.name, number, extra=extra)
        yield from settle_finished(shift, wait=False)


def _extend_leases(shift: Shift, now: float) -> Script:
    if not shift.plan.has_leases:
        return
    since = shift.crew.busy_since
    if since is None:
        shift.agenda.drop("heartbeat")
        return
    shift.agenda.begin("heartbeat", since + shift.heartbeat)
    if shift.agenda.due("heartbeat", now):
        # Set first, as in every duty: after a failure the next try must not be now.
        shift.agenda.set("heartbeat", now + min(shift.heartbeat, 1.0))
        alive = shift.crew.alive()
        if alive:
            yield Beside(leases.extend_leases, (shift.plan, alive))
        shift.agenda.set("heartbeat", now + shift.heartbeat)


def _settle_overlooked(shift: Shift, now: float) -> Script:
    """Settle what the lanes leave behind when each of them has begun with something long."""
    # Without waiting: whoever holds a row must not keep the leases of all others from being extended.
    if shift.crew.overlooks(now):
        yield from settle_finished(shift, wait=False)
    if shift.crew.postponed.is_due(now):
        yield from settle_postponed(shift)


def _check_in(shift: Shift, now: float) -> Script:
    """Tell the others, and oneself, that this Consumer is there: hearing it proves that calls arrive."""
    calls, plan = shift.calls, shift.plan
    if not shift.proven or CONSUMERS not in plan.spec.side_tables:
        return
    if calls.until_proof() <= 0:
        shift.hears_nothing()
    elif calls.hears:
        shift.hears_again()
    if not (shift.agenda.due("check-in", now) or calls.wants_check_in or calls.hears != shift.said_to_hear):
        return
    pause = shift.crew.pace.check_in(calls.crowd)
    shift.agenda.set("check-in", now + pause)
    aloud = calls.checks_in(news=calls.hears != shift.said_to_hear)
    shift.said_to_hear = calls.hears
    running, held = shift.crew.running(), shift.crew.held()
    claimed = max(0, len(held) - len(running))
    sign = leases.SignOfLife(shift.id, calls.hears, running, claimed, patience=3 * pause, aloud=aloud)
    others, moment = yield Beside(leases.check_in, (plan, sign))
    calls.checked_in(others, moment - time.monotonic())


def _look_ahead(shift: Shift, now: float) -> Script:  # noqa: ARG001 - as all duties
    """Ask when jobs will be due of which nobody has called out the time, such as those from before the start."""
    if shift.calls.wants_outlook():
        times = yield Beside(leases.times_ahead, (shift.plan, _AHEAD))
        shift.calls.see_ahead(times, all_of_them=len(times) < _AHEAD)


def _stop(shift: Shift, now: float) -> Script:
    """Look which running jobs somebody has asked to stop."""
    # In this order: whoever is asked to stop after that has been seen to be busy, or is asked again.
    asked_now, shift.calls.asked_to_stop = shift.calls.asked_to_stop, False
    since = shift.crew.busy_since
    if since is None:
        shift.agenda.drop("requests")
        return
    shift.agenda.begin("requests", since + shift.crew.pace.requests())
    if not (asked_now or shift.agenda.due("requests", now)):
        return
    shift.agenda.set("requests", now + shift.crew.pace.requests())
    held = shift.crew.held()
    if held:
        asked = yield Beside(leases.requests_to_stop, (shift.plan, held))
        shift.crew.asked_to_stop(asked, time.monotonic())


def _sweep(shift: Shift, now: float) -> Script:  # noqa: ARG001 - as all duties
    """Rescue the jobs of workers that died."""
    calls = shift.calls
    if not calls.sweeps.is_due:
        return
    # First, as in every duty.
    calls.sweeps.begin(calls.rank)
    rescued = yield Beside(leases.rescue_expired, (shift.plan,))
    shift.crew.tell_rescued(rescued)
    shift.plan.look_for_suspects |= bool(rescued) or not calls.hears


def _mend(shift: Shift, now: float) -> Script:
    if shift.agenda.due("reconcile", now):
        shift.agenda.set("reconcile", now + shift.crew.pace.reconcile(0))
        if shift.compared_upto is None:
            # The word that there are some may have got lost.
            shift.plan.look_for_suspects = True
        if shift.calls.rank >= TENDERS:
            # It only learns here that it is one of the first by now: a crowd should not be woken for that.
            shift.agenda.set("reconcile", now + 3 * shift.crew.pace.reconcile(0))
            return
        keys, shift.compared_upto = yield Beside(leases.reconcile_range, (shift.plan, shift.compared_upto))
        _tell_mended(shift, keys)
        done = time.monotonic()
        shift.comparing_took += done - now
        if shift.compared_upto is not None:
            shift.agenda.set("reconcile", done + shift.crew.pace.between_parts(done - now, found=bool(keys)))
            return
        shift.agenda.set("reconcile", done + shift.crew.pace.reconcile(shift.comparing_took))
        shift.comparing_took = 0.0


def mend_messages(shift: Shift) -> Generator[Step, Any, int]:
    """Compare messages with jobs, tell what was wrong, and return how much."""
    keys: Sequence[Key] = yield Beside(leases.reconcile_messages, (shift.plan,))
    _tell_mended(shift, keys)
    return len(keys)


def _tell_mended(shift: Shift, keys: Sequence[Key]) -> None:
    if keys:
        some = ", ".join(map(key_text, keys[:_MOST_TOLD]))
        more = f" and {len(keys) - _MOST_TOLD} more" if len(keys) > _MOST_TOLD else ""
        logger.warning(
            "%s: jobs that waited without a message, or messages whose job is missing or not waiting: %s%s",
            shift.name,
            some,
            more,
            extra=shift.fields("messages_mended", count=len(keys)),
        )


def _delete_old(shift: Shift, now: float) -> Script:
    """Delete finished jobs whose time is over: a batch each time, with pauses while there are more."""
    retention = shift.retention
    if not (retention.walks and shift.proven and shift.agenda.due("retention", now)):
        return
    shift.agenda.set("retention", now + shift.crew.pace.look_for_old())
    if shift.calls.rank >= TENDERS:
        return
    more, began = False, time.monotonic()
    for walk in retention.walks:
        if walk.begins_at <= now:
            if not (yield Beside(retention.look_around, (shift.plan,))):
                return
            walk.begin(now)
        more |= yield from _delete_batch(shift, walk)
    if more:
        done = time.monotonic()
        shift.agenda.set("retention", done + shift.crew.pace.between_batches(done - began))


def _delete_batch(shift: Shift, walk: Walk) -> Generator[Step, Any, bool]:
    retention, began = shift.retention, time.monotonic()
    try:
        deleted, newest, bound = yield Beside(retention.delete_some, (shift.plan, walk))
    except DBAPIError as error:
        if is_transient(error):
            raise
        return not (walk.failed() and (yield Beside(retention.leave_first, (shift.plan, walk, error))))
    more = walk.went(deleted, newest, bound, time.monotonic() - began)
    if not more and walk.ends():
        yield Beside(retention.tell_what_stays, (shift.plan, walk))
    return more


_DUTIES = (
    _look_at_timeouts,
    _pass_on_blocked,
    _give_back_late,
    _extend_leases,
    _settle_overlooked,
    _check_in,
    _look_ahead,
    _stop,
    _sweep,
    _mend,
    _delete_old,
)
