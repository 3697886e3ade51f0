"""The routine that fires schedules, again and again.

It sleeps until the next schedule is due. A notification wakes it when a schedule is changed. From time to time it sends
itself one; while it does not receive that, it looks every two seconds.
"""

from __future__ import annotations

import random
import time

from sqlaqueue.consumer.core.database_errors import (
    is_conflict,
    is_database_error,
    is_lock_or_timeout,
    may_be_of_a_row,
    may_recover,
)
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine, Wait
from sqlaqueue.consumer.schedules.fire_due import fire_due
from sqlaqueue.consumer.schedules.firing_process import CLEAN_UP, FiringProcess, GroupState
from sqlaqueue.consumer.schedules.limited_transaction import limited
from sqlaqueue.consumer.schedules.log_records import (
    failure_text,
    log_declared,
    log_error,
    log_failure,
    log_moved,
    log_unknown,
)
from sqlaqueue.consumer.schedules.startup_checks import check_tables
from sqlaqueue.consumer.sessions.connection_checks import check_transactions
from sqlaqueue.log import fields, logger
from sqlaqueue.schedules.schedule import BATCH
from sqlaqueue.schedules.store import (
    DELETED,
    Declaration,
    Look,
    declarations,
    delete_old_ticks,
    look,
    moved_ticks,
    write_declarations,
)

_SPREAD = 0.02
"""Seconds over which the processes that wait for one tick wake up."""

_MOST_LOCKED = 10
"""How many definitions may be locked before the others are fired, and these are tried again."""


def fire_schedules(process: FiringProcess) -> Routine:
    """Write the schedules of the program, and fire all that are due, until the process stops.

    :raises ConfigurationError: if the database lacks what schedules need.
    """
    while not process.stopping:
        for state in process.states:
            if not process.stopping:
                yield from _turn(process, state)
        if not process.stopping:
            until = min(state.look_at for state in process.states) - time.monotonic()
            yield Wait("schedules", max(0.01, until))


def _turn(process: FiringProcess, state: GroupState) -> Routine:
    """Look at the schedules of a group, fire what is due, and decide when the next look is."""
    try:
        if not state.started:
            yield from _start(process, state)
            state.started = True
        pause = yield from _look_and_fire(process, state)
        state.intervals.succeeded()
    except Exception as error:
        if not (state.started or (is_database_error(error) and may_recover(error))):
            raise
        log_error(error)
        pause = state.intervals.failed()
    state.look_at = time.monotonic() + pause


def _start(process: FiringProcess, state: GroupState) -> Routine:
    yield ExecuteInOwnSession(check_transactions, (state.group.spec, state.isolation))
    engine, warning = yield limited(state, check_tables)
    if process.stopping:
        return
    process.listen(engine, state)
    if warning is not None:
        logger.warning("%s", warning, extra=fields("triggers_outdated"))
    yield from _declare(process, state)
    for moved in (yield limited(state, moved_ticks)):
        log_moved(moved)


def _declare(process: FiringProcess, state: GroupState) -> Routine:
    """Write the schedules of the program; one that another transaction has locked or changed is written later."""
    found: list[Declaration] = yield limited(state, declarations, reset=process.reset)
    parts = [found[first : first + BATCH] for first in range(0, len(found), BATCH)]
    later = 0
    while parts and not process.stopping and later < _MOST_LOCKED:
        some = parts.pop(0)
        try:
            written: list[bool] = yield limited(state, write_declarations, some=some)
        except Exception as error:
            is_refused = may_be_of_a_row(error)
            if not (is_refused or is_lock_or_timeout(error) or is_conflict(error)):
                raise
            if len(some) > 1:
                parts = [[each] for each in some] + parts
                continue
            if is_refused:
                # Another try would fail as well, and the others are fired.
                log_failure(some[0].name, error, failure_text(error))
                continue
            written = [False]
        for each, done in zip(some, written, strict=True):
            if done:
                log_declared(each)
        later += written.count(False)
    state.declared = not (later or parts)


def _look_and_fire(process: FiringProcess, state: GroupState) -> Routine:
    """Fire what is due, and return the seconds until the next look."""
    if not state.declared:
        yield from _declare(process, state)
    found: Look = yield limited(state, look, notify=state.begin_look(), failing=state.failing)
    pause = state.longest_sleep()
    if found.is_due:
        progress = yield from fire_due(process, state)
        found = yield limited(state, look, failing=state.failing)
        if found.is_due:
            pause = state.locked_pause(progress=progress)
    log_unknown(state, found.unknown)
    if found.due_in is not None and not found.is_due:
        pause = min(pause, found.due_in + _SPREAD * random.random())  # noqa: S311 - no secret depends on it
    now = time.monotonic()
    if now >= state.clean_up_at:
        deleted = yield limited(state, delete_old_ticks)
        state.clean_up_at = now + (1.0 if deleted >= DELETED else CLEAN_UP)
    return min(pause, state.until_retry(), max(0.0, state.clean_up_at - now))
