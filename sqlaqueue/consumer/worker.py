"""The worker loop: claim and run jobs until the consumer stops. Each thread or task runs one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from sqlaqueue.consumer import startup
from sqlaqueue.consumer.claim import ClaimFailed
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import Effect, Routine, Wait, WithSession
from sqlaqueue.consumer.errors import is_program_error
from sqlaqueue.consumer.executor import Executor
from sqlaqueue.consumer.held import discard_entries, run_held_batch
from sqlaqueue.consumer.leased import (
    Report,
    WorkerTurn,
    claim_leased_batch,
    report,
    run_leased,
    run_to_the_end,
    settle_finished,
)
from sqlaqueue.consumer.unclaimable import search_unclaimable
from sqlaqueue.log import logger
from sqlaqueue.postgresql.checks_of import checks_of_error

_PAUSE, _LONGEST_PAUSE, _PAUSE_DRAINING = 0.5, 5.0, 0.1
"""Seconds after which a waiting worker looks again without being woken: while there is work, without any, and if it may
be the last."""

MOST_FAILURES = 8
"""How many tries in a row may fail before a run that drains its queue ends, if none has succeeded: about ten seconds.
A run without end waits for its database; the end of this one is waited for."""

TakeTurn = Callable[[ConsumerContext, WorkerTurn], Routine]
Reconcile = Callable[[ConsumerContext], Routine]


def work(context: ConsumerContext, reconcile: Reconcile) -> Routine:
    """Claim and run jobs until the consumer stops.

    :param reconcile: looks, before a run that drains its queue ends, for jobs that its claims have missed; returns how
        many it has found.
    """
    if context.settings.holds_transaction:
        yield from _take_turns(context, _held_turn, reconcile)
        return
    while not context.stopping:
        try:
            yield WithSession(_take_turns(context, _leased_turn, reconcile))
        except Exception as error:  # noqa: BLE001 - as below
            yield from _try_again_later(context, error)


def _take_turns(context: ConsumerContext, take_turn: TakeTurn, reconcile: Reconcile) -> Routine:
    """Take one turn after the other, until a turn has used the routine's session."""
    clean = True
    while clean and not context.stopping:
        turn = WorkerTurn(context)
        try:
            busy = yield from take_turn(context, turn)
            clean = turn.clean
        except Exception as error:  # noqa: BLE001 - whatever the error, the worker goes on
            turn.end()
            yield from _try_again_later(context, error)
            continue
        if busy:
            turn.end()
        elif context.draining:
            turn.end()
            is_over = turn.takes_the_last() and not (yield from _reconciled(context, reconcile))
            turn.end()
            # Read after turn.end(): the change that end() reports must not wake this worker at once.
            seen = context.version
            if is_over:
                # Unless it has been stopped before.
                context.drained |= not context.stopping
                context.stop()
            else:
                yield Wait("change", _PAUSE_DRAINING, seen)
        else:
            # The turn to claim is kept meanwhile: one poll of an empty queue is enough for all workers.
            yield Wait("poll", context.until_poll())
            turn.end()


def _try_again_later(context: ConsumerContext, error: Exception) -> Routine:
    """Wait before the next try, or end when the error is the program's."""
    is_vain = context.draining and context.intervals.failures >= MOST_FAILURES
    if not context.has_claimed and (is_vain or is_program_error(error)):
        context.fail(error)
    if context.error is not None:
        return
    # The jobs that this poll should have claimed are still pending.
    context.polls.poll_at_once()
    wait = context.intervals.failed()
    text = checks_of_error(error).undefined_object_advice(error, context.spec) or f"{type(error).__name__}: {error}"
    extra = context.log_fields("consumer_error", delay=wait, error_kind=type(error).__name__)
    logger.warning("%s: %s; next try in %.1f s", context.name, text, wait, extra=extra)
    context.report_start()
    yield Wait("stop", wait)


def _wait_for_change(context: ConsumerContext, turn: WorkerTurn) -> Wait:
    return Wait("change", _LONGEST_PAUSE if context.is_idle else _PAUSE, turn.version)


def _held_turn(context: ConsumerContext, turn: WorkerTurn) -> Routine:
    if not turn.may_claim():
        yield _wait_for_change(context, turn)
        return True
    if not context.wants_poll():
        return False
    yield from startup.check(context)
    yield from discard_entries(context)
    quarantined, unclaimable = context.quarantine.take(), context.claimer.unclaimable
    suspects = unclaimable.take() if unclaimable and quarantined is None else None
    try:
        done: Report = yield WithSession(run_held_batch(context, turn, quarantined, suspects))
    except ClaimFailed as failed:
        return (yield from search_unclaimable(context, failed))
    finally:
        unclaimable.end(suspects)
        if quarantined is not None:
            context.quarantine.end([quarantined.key])
    context.intervals.succeeded()
    report(context, done)
    if context.quarantine.waiting():
        context.polls.poll_at_once()
    return bool(done.claimed)


def _leased_turn(context: ConsumerContext, turn: WorkerTurn) -> Routine:
    if context.runs_low and context.wants_poll() and turn.may_claim():
        return bool((yield from _claim(context, turn))) or bool(context.buffer)
    executor = turn.take_jobs()
    if executor is not None:
        turn.clean = yield from _run(context, executor)
    elif turn.may_claim():
        if context.wants_poll():
            return bool((yield from _claim(context, turn))) or bool(context.buffer)
        if not context.wants_settling(time.monotonic()):
            return False
    elif not context.wants_settling(time.monotonic()):
        yield _wait_for_change(context, turn)
    if context.wants_settling(time.monotonic()):
        yield from settle_finished(context)
    return True


def _claim(context: ConsumerContext, turn: WorkerTurn) -> Routine:
    """Claim, and settle with the same commit the runs that have ended."""
    yield from startup.check(context)
    if context.polls.quarantined:
        context.quarantine.may_wait, context.polls.quarantined = True, False
    unclaimable = context.claimer.unclaimable
    if unclaimable.settles_apart:
        yield from settle_finished(context)
    finished = [] if unclaimable.settles_apart else context.completions.take()
    alone = turn.claims_alone and not context.quarantine.is_running
    suspects = unclaimable.take(quarantined=alone) if unclaimable else None
    try:
        return (yield WithSession(claim_leased_batch(context, turn, finished, suspects)))
    except Exception as error:
        if context.completions.put_back(finished):
            # It is unknown which of the two failed, and they must not block each other.
            yield from settle_finished(context)
            if context.settler.has_met_twin(error):
                return True
        if isinstance(error, ClaimFailed):
            return (yield from search_unclaimable(context, error))
        raise
    finally:
        unclaimable.end(suspects)


def _run(context: ConsumerContext, executor: Executor) -> Generator[Effect, object, bool]:
    """Run one job after the other, or one batch; return whether the session is unused and can be used again.

    Whatever the error, the runs end.
    """
    try:
        return bool((yield from run_to_the_end(context, executor, run_leased(context, executor))))
    except Exception as error:  # noqa: BLE001 - such as a database that does not answer
        kind = type(error).__name__
        extra = context.log_fields("run_error", error_kind=kind)
        logger.warning("%s: %s: %s", context.name, kind, error, extra=extra)
        return False


def _reconciled(context: ConsumerContext, reconcile: Reconcile) -> Generator[Effect, object, bool]:
    """Return whether jobs were found that claims have missed, so that another one may find more than the last."""
    try:
        return bool((yield from reconcile(context)))
    except Exception as error:  # noqa: BLE001 - the queue has been drained all the same
        kind = type(error).__name__
        extra = context.log_fields("maintenance_error", error_kind=kind)
        logger.warning("%s: maintenance: %s: %s", context.name, kind, error, extra=extra)
        return False
