"""The routine that fires schedules, again and again.

It sleeps until the next schedule is due. A notification wakes it when a schedule is changed. Every look at the
schedules sends one that the process has to receive itself; while it does not, it looks every two seconds.
"""

from __future__ import annotations

import random
import time
from functools import partial

from sqlalchemy.exc import DBAPIError

from sqlaqueue.consumer.core.database_errors import (
    is_database_error,
    is_lock_or_timeout,
    may_recover,
    may_settle_later,
)
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine, Wait
from sqlaqueue.consumer.schedules.firing_process import CLEAN_UP, LONGEST_SLEEP, POLL_INTERVAL, FiringProcess
from sqlaqueue.consumer.schedules.log_records import (
    log_declared,
    log_error,
    log_failure,
    log_firing,
    log_moved,
    log_unknown,
)
from sqlaqueue.consumer.schedules.startup_checks import check_tables
from sqlaqueue.consumer.sessions.connection_checks import check_transactions
from sqlaqueue.log import fields, logger
from sqlaqueue.schedules.declare import declare
from sqlaqueue.schedules.fire import BATCH, fire
from sqlaqueue.schedules.group import ScheduleGroup
from sqlaqueue.schedules.look import Look, due_names, look
from sqlaqueue.schedules.upkeep import delete_old_ticks, moved_ticks, record_failure

_SPREAD = 0.02
"""Seconds over which the processes that wait for one tick wake up."""

_LOCKED = 0.2
"""Seconds until the next look while another process fires what is due."""


def fire_schedules(process: FiringProcess) -> Routine:
    """Write the schedules of the program, and fire all that are due, until the process stops.

    :raises ConfigurationError: if the database lacks what schedules need.
    """
    started = False
    while not process.stopping:
        try:
            if not started:
                yield from _start(process)
                started = True
            pause = yield from _turn(process)
            process.intervals.succeeded()
        except Exception as error:
            if not (started or (is_database_error(error) and may_recover(error))):
                raise
            log_error(error)
            pause = process.intervals.failed()
        if not process.stopping:
            yield Wait("schedules", pause)


def _start(process: FiringProcess) -> Routine:
    for group in process.groups:
        yield ExecuteInOwnSession(check_transactions, (group.spec, process.isolation))
        engine, warning = yield ExecuteInOwnSession(check_tables, (group,))
        process.listen(engine)
        if warning is not None:
            logger.warning("%s", warning, extra=fields("triggers_outdated"))
        declared = yield ExecuteInOwnSession(partial(declare, reset=process.reset), (group,))
        log_declared(declared)
        for moved in (yield ExecuteInOwnSession(moved_ticks, (group,))):
            log_moved(moved)


def _turn(process: FiringProcess) -> Routine:
    """Fire what is due, and return the seconds until the next look."""
    proven = process.begin_look()
    pause = LONGEST_SLEEP if proven else POLL_INTERVAL
    for group in process.groups:
        found: Look = yield ExecuteInOwnSession(look, (group, process.id, process.failing))
        if found.due_in is not None and found.due_in <= 0:
            yield from _fire_all(process, group)
            found = yield ExecuteInOwnSession(look, (group, process.id, process.failing))
        log_unknown(process, found.unknown)
        if found.due_in is not None:
            # What is still due is locked by another process.
            soonest = found.due_in if found.due_in > 0 else _LOCKED
            pause = min(pause, soonest + _SPREAD * random.random())  # noqa: S311 - no secret depends on it
        now = time.monotonic()
        if now >= process.clean_up_at:
            process.clean_up_at = now + CLEAN_UP
            yield ExecuteInOwnSession(delete_old_ticks, (group,))
    retries = [at - time.monotonic() for at in process.failing.values()]
    return max(0.01, min([pause, *retries]))


def _fire_all(process: FiringProcess, group: ScheduleGroup) -> Routine:
    while not process.stopping:
        try:
            firing = yield ExecuteInOwnSession(partial(fire, failing=[*process.failing]), (group,))
        except Exception as error:
            if _is_outage(error):
                raise
            yield from _fire_one_by_one(process, group)
            return
        log_firing(firing)
        if firing.schedules < BATCH:
            return


def _fire_one_by_one(process: FiringProcess, group: ScheduleGroup) -> Routine:
    """Fire each schedule in a transaction of its own, since one of them cannot be fired."""
    names = yield ExecuteInOwnSession(due_names, (group, process.failing))
    for name in names:
        if process.stopping:
            return
        try:
            firing = yield ExecuteInOwnSession(partial(fire, only=name), (group,))
        except Exception as error:
            if _is_outage(error):
                raise
            process.failed(name)
            text = log_failure(name, error)
            yield ExecuteInOwnSession(record_failure, (group, name, text))
        else:
            log_firing(firing)


def _is_outage(error: Exception) -> bool:
    """Return whether an error says something about the database, and nothing about a schedule."""
    if isinstance(error, DBAPIError):
        return may_settle_later(error) and not is_lock_or_timeout(error)
    return is_database_error(error)
