"""Waiting for the end of a job: the operations and the one script that sync and async code carry out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session, SessionTransaction, object_session

from sqlaqueue.consumer.core.effects import Beside, Pause
from sqlaqueue.consumer.core.transient_errors import may_recover
from sqlaqueue.exc import ConfigurationError, JobFailed, StatementError, WaitTimeout
from sqlaqueue.keys import Key, key_text
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.config import FINISHED
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.results import JobResult
from sqlaqueue.waiting.wait_state import WaitState

DEFAULT_TIMEOUT = 10.0
"""Seconds for which ``wait()`` waits unless it is told otherwise: a job that no Consumer runs must not block its caller
for ever."""


@dataclass(frozen=True, slots=True)
class Listen:
    """Begin to listen for what is said to those who wait."""


Wait = Generator[Beside | Pause | Listen, Any, JobResult[Any]]


@dataclass(eq=False)
class Waiter:
    """One call of ``wait()``."""

    verb: str
    model: type[Any]
    spec: QueueSpec
    key: Key
    waiting: WaitState
    check: bool
    timeout: float | None

    @property
    def bind(self) -> dict[str, Any]:
        """Which engine statements go to, in a session that has several."""
        return {"mapper": self.spec.mapper}

    def __str__(self) -> str:
        return f"{self.model.__name__} {key_text(self.key)}"


def make_waiter(
    verb: str, job: Any, key: Any, timeout: Delay | None, called: Callable[[], object], *, check: bool
) -> Waiter:
    """Return what waits for one job.

    :param job: an instance, its class, or a pair of its class and its key.
    :param key: the job's key if ``job`` is a class, None otherwise.
    :raises NotAQueueError: when there is no queue behind it.
    :raises StatementError: for a job that nobody else can see yet, and for a key that is none.
    """
    patience = None if timeout is None else seconds(timeout, f"{verb}(timeout=...)")
    if isinstance(job, QueueMixin):
        if key is not None:
            msg = (
                f"{verb}(..., <{type(job).__name__}>, {key!r}): an instance has its key, so there is nothing to give "
                f"after it; the time to wait is {verb}(..., timeout={key!r})"
            )
            raise StatementError(msg)
        model: type[Any] = type(job)
        spec = spec_of(model)
        key = _committed_key(job, verb)
    else:
        model, given = _class_and_key(verb, job, key)
        spec = spec_of(model)
        key = given if isinstance(given, tuple) else (given,)
        if len(key) != len(spec.keys) or any(part is None for part in key):
            columns = ", ".join(column.key for column in spec.keys)
            msg = f"{verb}(..., {model.__name__}, {given!r}): that is not its key, which is ({columns})"
            raise StatementError(msg)
    return Waiter(verb, model, spec, key, WaitState(key_text(key), called, patience), check, patience)


def _class_and_key(verb: str, job: Any, key: Any) -> tuple[type[Any], Any]:
    if isinstance(job, type):
        return job, key
    if key is None and isinstance(job, tuple) and len(job) == 2 and isinstance(job[0], type):  # noqa: PLR2004 - a class and a key
        return job[0], job[1]
    msg = (
        f"{verb}(..., {job!r}): give an instance of a queue class, or the class and a key, as in {verb}(..., Email, 5)"
    )
    raise StatementError(msg)


def _committed_key(job: Any, verb: str) -> Key:
    """Return the key of an instance that others can see as it is."""
    state, session, name = sa.inspect(job), object_session(job), type(job).__name__
    key: Key | None = state.identity
    if key is None:
        msg = f"{verb}(): this {name} is not in the database; add it to a session and commit, then wait for it"
        raise StatementError(msg)
    name = f"{name} {key_text(key)}"
    transaction = None if session is None else session.get_nested_transaction() or session.get_transaction()
    uncommitted = session is not None and (job in session.deleted or session.is_modified(job))
    while transaction is not None and not uncommitted:
        uncommitted = state in _written(transaction)
        transaction = transaction.parent
    run = run_of(job)
    if run is not None and run.transaction is not None and run.transaction.is_active:
        msg = f"{verb}(): {name} is held by a transaction of this program, which has to settle it and to commit"
        raise StatementError(msg)
    if uncommitted:
        msg = (
            f"{verb}(): {name} has been written in a transaction that is still open, so nobody else can see it, "
            "and it would be waited for in vain; commit its session first"
        )
        raise StatementError(msg)
    return key


def _written(transaction: SessionTransaction) -> set[Any]:
    # There is no public way to ask what a transaction has flushed.
    return {*transaction._new, *transaction._dirty, *transaction._deleted}  # noqa: SLF001 - see above


# -- what happens in a session -----------------------------------------------------------------------------------------


def first_look(session: Session, waiter: Waiter) -> JobResult[Any] | None:
    """Look at the job, in a session that is seen for the first time.

    :raises ConfigurationError: for another database than PostgreSQL, or a replica.
    """
    engine = session.get_bind(waiter.spec.mapper).engine
    backend().check_dialect(engine.dialect, f"{waiter.verb}({waiter.model.__name__})")
    if session.scalar(sa.select(sa.func.pg_is_in_recovery()), bind_arguments=waiter.bind):
        msg = (
            f"{waiter.verb}(): the sessions for {waiter.model.__name__} read from a replica, where the end of a job is "
            "seen late, and nothing can be said to Consumers; give a sessionmaker of the primary's engine"
        )
        raise ConfigurationError(msg)
    # PostgreSQL cannot prepare a transaction that has sent a notification.
    waiter.waiting.announces &= backend().triggers.wakes(waiter.spec) and not session.twophase
    return look(session, waiter)


def look(session: Session, waiter: Waiter) -> JobResult[Any] | None:
    """Return how the job has ended, None when it has not."""
    spec = waiter.spec
    row: Any = session.execute(spec.strategy.job_state(spec, waiter.key), bind_arguments=waiter.bind).one_or_none()
    state, error = (_state_of_the_missing(spec), None) if row is None else row
    if state is not None and state not in {*FINISHED, "gone"}:
        session.rollback()
        return None
    job = None
    if row is not None and spec.has("status"):
        mine = sa.select(waiter.model).where(spec.key_in(spec.keys, [waiter.key]))
        job = session.execute(mine.execution_options(populate_existing=True)).unique().scalar_one_or_none()
        session.expunge_all()
    session.rollback()
    return JobResult(cast("Any", state or "gone"), job, error)


def _state_of_the_missing(spec: QueueSpec) -> str:
    return "completed" if spec.config.on_complete == "delete" or not spec.has("status") else "gone"


def announce(session: Session, waiter: Waiter) -> None:
    """Say for what is waited, and commit."""
    session.execute(
        sa.select(backend().notification(waiter.spec, waiter.waiting.announcement)), bind_arguments=waiter.bind
    )
    session.commit()


# -- the order of things -----------------------------------------------------------------------------------------------


def await_end(waiter: Waiter) -> Wait:
    """Wait for the end of a job: look, say so, and look when something is said, or when it is time to."""
    waiting = waiter.waiting
    result: JobResult[Any] | None = yield Beside(first_look, (waiter,))
    if result is None and waiting.announces and not waiting.is_over:
        yield Listen()
    while result is None:
        if waiting.is_over:
            msg = (
                f"{waiter} has not ended within {waiter.timeout:g} s, and goes on; to wait longer give "
                f"{waiter.verb}(..., timeout=...) more seconds, or None for as long as it takes"
            )
            raise WaitTimeout(msg)
        yield Pause(waiting.pause())
        try:
            if waiting.wants_announcement():
                yield Beside(announce, (waiter,))
            if waiting.wants_look():
                result = yield Beside(look, (waiter,))
                waiting.looked()
        except Exception as error:
            if not may_recover(error):
                raise
            waiting.looked()
    return _checked(waiter, result)


def _checked(waiter: Waiter, result: JobResult[Any]) -> JobResult[Any]:
    if waiter.check and result.state != "completed":
        ended = {"failed": "has failed", "cancelled": "was cancelled", "gone": "is not there, or no longer a job"}[
            result.state
        ]
        msg = f"{waiter} {ended}{f': {result.error}' if result.error else ''}"
        raise JobFailed(msg, result)
    return result
