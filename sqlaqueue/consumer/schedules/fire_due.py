"""Fires the schedules of a group that are due, and finds those that cannot be fired."""

from __future__ import annotations

from sqlaqueue.consumer.core.database_errors import is_lock_or_timeout, may_be_of_a_row
from sqlaqueue.consumer.core.effects import Routine
from sqlaqueue.consumer.core.error_text import ascii_text
from sqlaqueue.consumer.schedules.firing_process import FiringProcess, GroupState
from sqlaqueue.consumer.schedules.limited_transaction import limited
from sqlaqueue.consumer.schedules.log_records import failure_text, log_failure, log_firing
from sqlaqueue.schedules.fire import Firing, TooSlowError, fire
from sqlaqueue.schedules.store import due_names, look, record_failure

_MOST_ROUNDS = 20
"""How many transactions fire the schedules of one group before those of the next one."""


def fire_due(process: FiringProcess, state: GroupState) -> Routine:
    """Fire what is due; return whether anything was fired or has failed."""
    progress = False
    for _ in range(_MOST_ROUNDS):
        if process.stopping:
            break
        try:
            firing: Firing = yield limited(state, fire, failing=state.failing)
        except TooSlowError as error:
            yield from _fail(state, error.schedule, error)
            progress = True
            continue
        except Exception:  # noqa: BLE001 - if this is no outage, the cause is one of the schedules
            # If the database does not answer, this raises.
            yield limited(state, look)
            if not (yield from _fire_apart(process, state)):
                break
            progress = True
            continue
        yield from _record(state, firing)
        progress |= firing.locked > 0
        if not (firing.more or firing.failed):
            break
    return progress


def _fire_apart(process: FiringProcess, state: GroupState) -> Routine:
    """Fire what is due in smaller and smaller parts; return whether anything was fired or has failed."""
    found = yield limited(state, due_names, failing=state.failing)
    by_queue: dict[str, list[str]] = {}
    for name, queue in found:
        by_queue.setdefault(queue, []).append(name)
    parts, progress = list(by_queue.values()), False
    while parts and not process.stopping:
        names = parts.pop()
        halves = len(names) // 2
        try:
            firing = yield limited(state, fire, only=names)
        except TooSlowError as error:
            yield from _fail(state, error.schedule, error)
        except Exception as error:  # noqa: BLE001 - the database has answered
            # A lock on the table of the jobs concerns all of them.
            if len(names) > 1 and not is_lock_or_timeout(error):
                parts += [names[halves:], names[:halves]]
                continue
            for name in names:
                yield from _fail(state, name, error)
        else:
            yield from _record(state, firing)
            if not firing.locked:
                continue
        progress = True
    return progress


def _record(state: GroupState, firing: Firing) -> Routine:
    """Record what a transaction has done."""
    log_firing(firing)
    for name in firing.moved:
        state.moved(name)
    for name, error in firing.failed:
        yield from _fail(state, name, error)


def _fail(state: GroupState, name: str, error: Exception) -> Routine:
    text = failure_text(error)
    if state.failed(name, text):
        log_failure(name, error, text)
    # The encoding of the database may not have its characters. The log has it, whatever the database refuses.
    for each in (text, ascii_text(text)):
        try:
            yield limited(state, record_failure, name=name, error=each)
        except Exception as refused:
            if not may_be_of_a_row(refused):
                raise
        else:
            return
