"""Fire the schedules of a process, again and again: its transactions, its knowledge, its checks and its log."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine, Wait
from sqlaqueue.consumer.core.errors import (
    ascii_text,
    is_conflict,
    is_database_error,
    is_lock_or_timeout,
    may_be_of_a_row,
    may_recover,
)
from sqlaqueue.consumer.notifications.listener import Subscriber
from sqlaqueue.consumer.pace import Intervals
from sqlaqueue.consumer.sessions import IsolationLevel, check_transactions
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.columns import left_to_server
from sqlaqueue.notify_payloads import Heartbeat, Payload, Signal
from sqlaqueue.postgresql.checks_of import checks_of, refuse_newer, refuse_older
from sqlaqueue.queue.strategy_protocol import RequiredPrivilege
from sqlaqueue.schedules.fire import Firing, TooSlowError, fire
from sqlaqueue.schedules.schedule import BATCH, ScheduleGroup
from sqlaqueue.schedules.store import (
    DELETED,
    Declaration,
    Look,
    Moved,
    declarations,
    delete_old_ticks,
    due_names,
    look,
    moved_ticks,
    record_failure,
    write_declarations,
)
from sqlaqueue.sessions import primary_bind
from sqlaqueue.sql.portable import set_setting

LONGEST_SLEEP, POLL_INTERVAL = 30.0, 2.0
"""Seconds between two looks at the latest: while notifications arrive, and while they do not."""

_PROOF_INTERVAL = 20.0
"""Seconds after which a process checks again that it receives notifications."""

_FIRST_RETRY, _LONGEST_RETRY = 30.0, 600.0
"""Seconds after which a schedule that could not be fired is tried again, unless a schedule is changed before."""

_AFTER_CHANGE = 2.0
"""Seconds between two tries of a failing schedule, while schedules are changed again and again."""

CLEAN_UP = 3600.0
"""Seconds between two deletions of old ticks."""

_FIRST_LOCKED, _LONGEST_LOCKED = 0.2, 2.0
"""Seconds until the next look while what is due is locked by another process."""


class _Failure:
    def __init__(self, failed_at: float, retry_at: float, times: int) -> None:
        self.failed_at, self.retry_at, self.times = failed_at, retry_at, times


class GroupState(Subscriber):
    """What a process knows about the schedules in one pair of tables; a subscriber of the channel of schedules."""

    def __init__(self, group: ScheduleGroup, wake: Callable[[], object]) -> None:
        self.group, self._wake = group, wake
        self.isolation = IsolationLevel(group.spec)
        self.id = uuid.uuid4().hex
        self.declared = False
        """Whether all schedules of the program have been written, or were kept."""
        self.started = False
        self.look_at = 0.0
        self.intervals = Intervals(POLL_INTERVAL)
        self.reported: set[str] = set()
        self.clean_up_at = time.monotonic() + CLEAN_UP * random.random()  # noqa: S311 - no secret depends on it
        self._failures: dict[str, _Failure] = {}
        self._logged: dict[str, str] = {}
        self._locked = _FIRST_LOCKED
        self._sent, self._received = 0, -1
        """The numbers of the last notification to itself that was sent, and of the last one that was received."""
        self._sent_at: float | None = None
        self._woken = False

    def receive(self, payload: Payload) -> None:
        if payload == Signal.POLL:
            self._woken = True
            self._wake()
        elif payload == Heartbeat(f"{self.id}.{self._sent}"):
            self._received = self._sent

    def listening_lost(self) -> None:
        """Look at the schedules, as a notification may have been missed."""
        self._received, self._sent_at = -1, None
        self._woken = True
        self._wake()

    def begin_look(self) -> str | None:
        """Return what to notify this process by, if it is time to check that notifications arrive."""
        now = time.monotonic()
        if self._woken:
            self._woken = False
            for failure in self._failures.values():
                failure.retry_at = min(failure.retry_at, failure.failed_at + _AFTER_CHANGE)
        if self._sent_at is not None and now - self._sent_at < (_PROOF_INTERVAL if self.hears else POLL_INTERVAL):
            return None
        self._sent, self._sent_at = self._sent + 1, now
        return f"{self.id}.{self._sent}"

    @property
    def hears(self) -> bool:
        """Whether notifications arrive: the last one that it has sent to itself was received."""
        return self._received == self._sent

    def longest_sleep(self) -> float:
        return LONGEST_SLEEP if self.hears else POLL_INTERVAL

    @property
    def failing(self) -> list[str]:
        """The schedules that could not be fired, and are left out for a while."""
        now = time.monotonic()
        return sorted(name for name, failure in self._failures.items() if failure.retry_at > now)

    def failed(self, name: str, text: str) -> bool:
        """Leave out a schedule for a while, and for longer each time; return whether the reason is a new one."""
        now, before = time.monotonic(), self._failures.get(name)
        times = 1 if before is None else before.times + 1
        pause = min(_LONGEST_RETRY, _FIRST_RETRY * 2.0 ** min(times - 1, 10))
        self._failures[name] = _Failure(now, now + pause, times)
        is_new = self._logged.get(name) != text
        self._logged[name] = text
        return is_new

    def moved(self, name: str) -> None:
        self._failures.pop(name, None)
        self._logged.pop(name, None)

    def until_retry(self) -> float:
        now = time.monotonic()
        waiting = [failure.retry_at - now for failure in self._failures.values() if failure.retry_at > now]
        return min(waiting, default=float("inf"))

    def locked_pause(self, *, progress: bool) -> float:
        """Return the seconds until the next look at schedules that are locked: more and more, without progress."""
        self._locked = _FIRST_LOCKED if progress else min(_LONGEST_LOCKED, self._locked * 2)
        return self._locked


class FiringProcess:
    """The schedules that one process fires, and what it needs from the thread or task that fires them.

    :param wake: wakes the routine while it waits.
    :param listen: begins to deliver the notifications of an engine's channel of schedules to a :class:`GroupState`.
    """

    def __init__(
        self,
        groups: Sequence[ScheduleGroup],
        wake: Callable[[], object],
        listen: Callable[[sa.Engine, GroupState], object],
        *,
        reset: bool = False,
    ) -> None:
        self.states = [GroupState(group, wake) for group in groups]
        self.listen, self.reset = listen, reset
        self.stopping = False
        self._wake = wake

    def stop(self) -> None:
        self.stopping = True
        self._wake()


_LIMITS = {"lock_timeout": "500ms", "idle_in_transaction_session_timeout": "30s"}
"""A transaction locks rows that other processes pass over, so it must not wait for long, nor stand still."""


def limited(state: GroupState, operation: Callable[..., Any], **options: Any) -> ExecuteInOwnSession:
    """Return the effect that executes ``operation(session, group, **options)``, which is one transaction."""
    return ExecuteInOwnSession(_execute, (state, partial(operation, **options)))


def _execute(session: Session, state: GroupState, operation: Callable[..., Any]) -> Any:
    state.isolation.begin(session)
    limits = [set_setting(name, value) for name, value in _LIMITS.items()]
    session.execute(sa.select(*limits), bind_arguments=state.group.bind)
    return operation(session, state.group)


_LONGEST_ERROR = 2000


def log_declared(declared: Declaration) -> None:
    if not declared.keeps:
        text = "schedule %r: written into the database"
        logger.info(text, declared.name, extra=fields("schedule_written", schedule=declared.name))
        return
    text = (
        "schedule %r: the program has changed it, but it was changed at run time as well, which is kept; "
        "`sqlaqueue schedules reset` replaces it"
    )
    logger.warning(text, declared.name, extra=fields("schedule_kept", schedule=declared.name))


def log_unknown(state: GroupState, names: Sequence[str]) -> None:
    """Log once which overdue schedules the process cannot fire."""
    for name in names:
        if name not in state.reported:
            text = (
                "schedule %r is overdue, and this process cannot fire it: it has not imported the class of its jobs, "
                "or has no schedule with the function that makes them"
            )
            logger.warning(text, name, extra=fields("schedule_unknown", schedule=name))
    state.reported = set(names)


def log_failure(name: str, error: BaseException, text: str) -> None:
    extra = fields("schedule_failed", schedule=name, error_kind=type(error).__name__)
    logger.warning("the schedule %r cannot be fired and stays due: %s", name, text, extra=extra)


def failure_text(error: BaseException) -> str:
    """Return the first line of an error as a text that the server can store, without the statement and its values."""
    shown = getattr(error, "orig", None) or error
    try:
        line = str(shown).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001 - it has to be recorded all the same
        line = "its text could not be made"
    return f"{type(shown).__name__}: {line}".replace("\0", "").encode(errors="replace").decode()[:_LONGEST_ERROR]


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
    for name, first in firing.missed:
        text = "schedule %r: ticks from %s on were missed, and are skipped"
        logger.warning(text, name, first, extra=fields("ticks_missed", schedule=name))
    for fired in firing.fired:
        text = "schedule %r fired for %s" if fired.key is not None else "schedule %r: no job for %s, as one is there"
        extra = fields("schedule_fired", schedule=fired.schedule, delay=fired.late.total_seconds())
        logger.debug(text, fired.schedule, fired.tick, extra=extra)
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


def check_tables(session: Session, group: ScheduleGroup) -> tuple[sa.Engine, str | None]:
    """Refuse a database that lacks tables or privileges; return its engine, and what is wrong with the trigger."""
    tables, connection = group.tables, session.connection(bind_arguments=group.bind)
    checks = checks_of(connection)
    try:
        engine, *others = {primary_bind(session, spec.mapper).engine for spec in group.specs}
        if others:
            names = ", ".join(spec.model.__name__ for spec in group.specs)
            msg = f"the schedules of {names} share their tables, but the sessions use several engines for them"
            raise ConfigurationError(msg)
        both, needed_by = [tables.schedules, tables.ticks], "a process that fires schedules"
        refuse_newer(connection, both, needed_by)
        checks.check_tables(connection, both, needed_by)
        refuse_older(connection, both, needed_by)
        required = list(_required_privileges(group))
        grants = checks.grants_for(connection, required) or checks.policies_for(connection, required)
        if grants:
            msg = (
                "the role of this process lacks privileges that it needs to fire schedules; let the owner of the "
                f"tables execute: {'; '.join(grants)}"
            )
            raise DatabaseNotReadyError(msg)
        return engine, checks.outdated_triggers_of(connection, tables.schedules, "Schedule")
    finally:
        session.rollback()


def _required_privileges(group: ScheduleGroup) -> Sequence[RequiredPrivilege]:
    schedules, ticks = group.tables.schedules, group.tables.ticks
    jobs: list[Any] = [table for spec in group.specs for table in spec.mapper.tables]
    # A schedule sets the time of its jobs, and perhaps other columns of the queue, which the INSERT finds out.
    left_out = {each for spec in group.specs for each in left_to_server(spec) if each is not spec.columns.get("run_at")}
    return [
        *(RequiredPrivilege(each, schedules, list(schedules.c)) for each in ("SELECT", "INSERT", "UPDATE")),
        *(RequiredPrivilege(each, ticks) for each in ("SELECT", "INSERT", "DELETE")),
        *(RequiredPrivilege("SELECT", table, _read(group, table)) for table in dict.fromkeys(jobs)),
        *(
            RequiredPrivilege(
                "INSERT",
                table,
                [column for column in table.c if column not in left_out and column is not table.autoincrement_column],
                generated=[column for column in table.c if column is table.autoincrement_column],
            )
            for table in dict.fromkeys(jobs)
        ),
    ]


def _read(group: ScheduleGroup, table: sa.Table) -> list[sa.Column[Any]]:
    """Return the columns that an INSERT returns to the ORM, and those that say whether a job is finished."""
    states = {spec.columns["status"] for spec in group.specs if spec.has("status")}
    return [column for column in table.c if column.primary_key or column.server_default is not None or column in states]


# -- fire schedules ----------------------------------------------------------------------------------------------------
# It sleeps until the next schedule is due. A notification wakes it when a schedule is changed. From time to time it
# sends itself one; while it does not receive that, it looks every two seconds.


_SPREAD = 0.02
"""Seconds over which the processes that wait for one tick wake up."""

_MOST_LOCKED = 10
"""How many definitions may be locked before the others are fired, and these are tried again."""


def fire_schedules(process: FiringProcess) -> Routine:
    """Write the schedules of the program, and fire all that are due, until the process stops."""
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
        is_refused = isinstance(error, DatabaseNotReadyError)
        if is_refused or not (state.started or (is_database_error(error) and may_recover(error))):
            raise
        extra = fields("schedules_error", error_kind=type(error).__name__)
        logger.warning("schedules: %s", failure_text(error), extra=extra)
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
    text = (
        "schedule %r: its next tick, %s, was computed by %s; by %s of this process it would be %s. The stored one is "
        "fired, and the ticks after it follow the new rules"
    )
    found: Sequence[Moved] = yield limited(state, moved_ticks)
    for each in found:
        extra = fields("schedule_moved", schedule=each.schedule)
        logger.warning(text, each.schedule, each.next_tick, each.before, each.rules, each.computed, extra=extra)


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
