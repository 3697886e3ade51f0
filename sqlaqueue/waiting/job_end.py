"""The routine that waits until a job is settled, and its operations; sync and async code carry it out."""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.database_errors import is_connection_lost, may_recover
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Wait
from sqlaqueue.exc import ConfigurationError, JobFailed, WaitTimeout
from sqlaqueue.postgresql.triggers import notification, wakes
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.results import JobResult
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.waiting.waiter import Waiter

_ENDS = (*FINISHED, "gone")


@dataclass(frozen=True, slots=True)
class Listen:
    """Subscribe the waiter's state to the queue's channel."""


WaitRoutine = Generator[ExecuteInOwnSession | Wait | Listen, Any, JobResult[Any]]


def wait_for_end(waiter: Waiter) -> WaitRoutine:
    """Poll the job, notify Consumers of the waiter, and poll when a notification arrives or a poll is due."""
    state = waiter.state
    result: JobResult[Any] | None = yield from _first_look(waiter)
    if result is None and state.notifies and not state.timed_out:
        yield Listen()
    while result is None:
        if state.timed_out:
            msg = (
                f"{waiter} has not finished within {waiter.timeout:g} s; it is not cancelled. To wait longer, give "
                f"{waiter.function}(..., timeout=...) more seconds, or None for no limit"
            )
            raise WaitTimeout(msg)
        yield Wait("poll", state.seconds_until_due())
        try:
            if state.take_notification():
                yield ExecuteInOwnSession(notify_consumers, (waiter,))
            if state.take_poll():
                result = yield ExecuteInOwnSession(poll, (waiter,))
                state.not_settled()
        except Exception as error:
            if not may_recover(error):
                raise
            state.not_settled()
    if waiter.check and result.state != "completed":
        raise _failure(waiter, result)
    return result


def _first_look(waiter: Waiter) -> Generator[ExecuteInOwnSession, Any, JobResult[Any] | None]:
    look = ExecuteInOwnSession(first_poll, (waiter,))
    try:
        found = yield look
    except Exception as error:
        if not is_connection_lost(error):
            raise
        # That of the pool may have been lost long before, and the next one is new.
        found = yield look
    return cast("JobResult[Any] | None", found)


def _failure(waiter: Waiter, result: JobResult[Any]) -> JobFailed:
    outcomes = {"failed": "has failed", "cancelled": "was cancelled", "gone": "does not exist, or is no longer a job"}
    error = f": {result.error}" if result.error else ""
    return JobFailed(f"{waiter} {outcomes[result.state]}{error}", result)


# -- operations, each in a session of its own --------------------------------------------------------------------------


def first_poll(session: Session, waiter: Waiter) -> JobResult[Any] | None:
    """Check the database, and poll.

    :raises ConfigurationError: if it is not PostgreSQL, or a replica.
    """
    engine = session.get_bind(waiter.spec.mapper).engine
    check_dialect(engine.dialect, f"{waiter.function}({waiter.model.__name__})")
    if session.scalar(sa.select(sa.func.pg_is_in_recovery()), bind_arguments=waiter.bind):
        msg = (
            f"{waiter.function}(): the sessions for {waiter.model.__name__} use a replica, which lags behind and "
            "cannot send notifications; give a sessionmaker of the primary's engine"
        )
        raise ConfigurationError(msg)
    # PostgreSQL cannot prepare a transaction that has sent a notification.
    waiter.state.notifies &= wakes(waiter.spec) and not session.twophase
    return poll(session, waiter)


def poll(session: Session, waiter: Waiter) -> JobResult[Any] | None:
    """Return the result of the job, None if it is pending or running."""
    found = read_job(session, waiter, load_in=_ENDS)
    return found if found.state in _ENDS else None


def read_job(session: Session, waiter: Waiter, *, load_in: Collection[str]) -> JobResult[Any]:
    """Return the state of the job.

    :param load_in: the states in which the job itself is loaded.
    """
    spec, job = waiter.spec, None
    state, error, has_row = read_state(session, spec, waiter.key)
    if state in load_in and has_row and spec.has("status"):
        query = sa.select(waiter.model).where(spec.key_in(spec.keys, [waiter.key]))
        job = session.execute(query.execution_options(populate_existing=True)).unique().scalar_one_or_none()
        session.expunge_all()
    session.rollback()
    return JobResult(cast("Any", state), job, error)


class JobState(NamedTuple):
    """The state of a job in the database."""

    state: str
    """The name of the state, or ``gone``."""
    error: str | None
    """The last error."""
    has_row: bool
    """Whether a row says so, be it a dead letter."""


def read_state(session: Session, spec: QueueSpec, key: Key) -> JobState:
    """Return the state of one job."""
    state = spec.strategy.job_state(spec, key)
    row: Any = session.execute(state, bind_arguments={"mapper": spec.mapper}).one_or_none()
    return JobState(_state_without_row(spec), None, False) if row is None else JobState(row[0] or "gone", row[1], True)  # noqa: FBT003 - a field


def _state_without_row(spec: QueueSpec) -> str:
    return "completed" if spec.config.on_complete == "delete" or not spec.has("status") else "gone"


def notify_consumers(session: Session, waiter: Waiter) -> None:
    """Notify the Consumers of the queue that a caller waits for this job, and commit."""
    session.execute(sa.select(notification(waiter.spec, waiter.state.notification)), bind_arguments=waiter.bind)
    session.commit()
