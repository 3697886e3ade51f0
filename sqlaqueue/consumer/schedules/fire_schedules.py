"""The routine that fires schedules, again and again.

It sleeps until the next schedule is due. A notification wakes it when a schedule is changed. From time to time it sends
itself one; while it does not receive that, it looks every two seconds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.database_errors import (
    is_database_error,
    is_lock_or_timeout,
    may_recover,
    may_settle_later,
)
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine, Wait
from sqlaqueue.consumer.schedules.firing_process import CLEAN_UP, FiringProcess, GroupState
from sqlaqueue.consumer.schedules.log_records import (
    failure_text,
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
from sqlaqueue.schedules.declare import Declared, declare
from sqlaqueue.schedules.fire import BATCH, Firing, fire
from sqlaqueue.schedules.look import Look, due_names, look
from sqlaqueue.schedules.upkeep import DELETED, delete_old_ticks, moved_ticks, record_failure

_SPREAD = 0.02
"""Seconds over which the processes that wait for one tick wake up."""

_LIMITS = {"lock_timeout": "500ms", "idle_in_transaction_session_timeout": "30s"}
"""A transaction locks rows that other processes pass over, so it must not wait for long, nor stand still."""


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
    for state in process.states:
        yield ExecuteInOwnSession(check_transactions, (state.group.spec, state.isolation))
        engine, warning = yield _limited(state, check_tables)
        if process.stopping:
            return
        process.listen(engine, state)
        if warning is not None:
            logger.warning("%s", warning, extra=fields("triggers_outdated"))
        yield from _declare(process, state)
        for moved in (yield _limited(state, moved_ticks)):
            log_moved(moved)


def _declare(process: FiringProcess, state: GroupState) -> Routine:
    """Write the schedules of the program; those that another transaction has locked are written later."""
    declared: Declared = yield _limited(state, declare, reset=process.reset)
    log_declared(declared)
    state.declared = not declared.failed


def _turn(process: FiringProcess) -> Routine:
    """Fire what is due, and return the seconds until the next look."""
    pause = min(state.longest_sleep() for state in process.states)
    for state in process.states:
        if process.stopping:
            break
        if not state.declared:
            yield from _declare(process, state)
        found: Look = yield _limited(state, look, notify=state.begin_look(), failing=state.failing)
        if found.is_due:
            progress = yield from _fire_all(process, state)
            found = yield _limited(state, look, failing=state.failing)
            if found.is_due:
                pause = min(pause, state.locked_pause(progress=progress))
        log_unknown(state, found.unknown)
        if found.due_in is not None and not found.is_due:
            pause = min(pause, found.due_in + _SPREAD * random.random())  # noqa: S311 - no secret depends on it
        now = time.monotonic()
        if now >= state.clean_up_at:
            deleted = yield _limited(state, delete_old_ticks)
            state.clean_up_at = now + (1.0 if deleted >= DELETED else CLEAN_UP)
        pause = min(pause, state.until_retry(), state.longest_sleep(), max(0.0, state.clean_up_at - now))
    return max(0.01, pause)


def _fire_all(process: FiringProcess, state: GroupState) -> Routine:
    """Fire all that is due; return whether anything was fired."""
    progress = False
    while not process.stopping:
        left_out = sorted({*state.failing, *state.slow})
        try:
            firing: Firing = yield _limited(state, fire, failing=left_out)
        except Exception as error:
            if _is_outage(error):
                raise
            before = len(state.failing)
            yield from _fire_apart(process, state, left_out)
            progress |= len(state.failing) > before
            if not progress:
                return progress
            continue
        yield from _record(state, firing)
        progress |= bool(firing.schedules)
        if firing.schedules < BATCH and not (firing.failed or firing.slow):
            break
    for name in sorted(state.slow - set(state.failing)):
        if not process.stopping:
            progress |= yield from _fire_some(state, [name], alone=True)
    return progress


def _fire_apart(process: FiringProcess, state: GroupState, left_out: Sequence[str]) -> Routine:
    """Fire what is due in smaller and smaller parts, since the server refuses something among it."""
    found = yield _limited(state, due_names, failing=left_out)
    by_queue: dict[str, list[str]] = {}
    for name, queue in found:
        by_queue.setdefault(queue, []).append(name)
    parts = list(by_queue.values())
    while parts and not process.stopping:
        names = parts.pop()
        halves = len(names) // 2
        if not (yield from _fire_some(state, names)):
            parts += [names[halves:], names[:halves]]


def _fire_some(state: GroupState, names: Sequence[str], *, alone: bool = False) -> Routine:
    """Fire some schedules of one queue in one transaction; return False if they have to be fired in smaller parts."""
    try:
        firing = yield _limited(state, fire, only=names, alone=alone)
    except Exception as error:
        if _is_outage(error) and not alone:
            raise
        # A lock on the table of the jobs concerns all of them.
        if len(names) > 1 and not is_lock_or_timeout(error):
            return False
        for name in names:
            yield from _fail(state, name, error)
    else:
        yield from _record(state, firing)
    return True


def _record(state: GroupState, firing: Firing) -> Routine:
    """Record what a transaction has done."""
    log_firing(firing)
    for fired in firing.fired:
        state.fired(fired.schedule)
    state.slow |= firing.slow
    for name, error in firing.failed:
        yield from _fail(state, name, error)


def _fail(state: GroupState, name: str, error: BaseException) -> Routine:
    text = failure_text(error)
    if state.failed(name, text):
        log_failure(name, error, text)
    yield _limited(state, record_failure, name=name, error=text)


def _limited(state: GroupState, operation: Callable[..., Any], **options: Any) -> ExecuteInOwnSession:
    """Return the effect that executes ``operation(session, group, **options)`` in a transaction with limits."""
    return ExecuteInOwnSession(_execute_limited, (state, partial(operation, **options)))


def _execute_limited(session: Session, state: GroupState, operation: Callable[..., Any]) -> Any:
    state.isolation.begin(session)
    limits = [sa.func.set_config(name, value, sa.true()) for name, value in _LIMITS.items()]
    session.execute(sa.select(*limits), bind_arguments=state.group.bind)
    return operation(session, state.group)


def _is_outage(error: Exception) -> bool:
    """Return whether an error says something about the database, and nothing about a schedule."""
    if isinstance(error, DBAPIError):
        return may_settle_later(error) and not is_lock_or_timeout(error)
    return is_database_error(error)
