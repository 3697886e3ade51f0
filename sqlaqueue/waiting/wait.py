"""Wait for the end of a job: :func:`wait`.

::

    session.add(email)
    session.commit()
    result = wait(sessionmaker(engine), email, timeout=10)
    print(result.state, result.job)

The Consumer that settles the job wakes the caller by a notification. It sends none for jobs without a waiting caller.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Generator
from typing import Any, NamedTuple, TypeVar, cast, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session, object_session

from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Wait, drive
from sqlaqueue.consumer.core.errors import is_connection_lost, may_recover
from sqlaqueue.consumer.core.waker import Deadlines, limit_connects
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.pace import longest_wait
from sqlaqueue.exc import ConfigurationError, JobFailed, JobResult, StatementError, WaitTimeout
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.notify_payloads import MAX_BYTES, Payload, Settled, WaitRequest
from sqlaqueue.postgresql.triggers import channel_of, notification, wakes
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import check_session_class, execute, open_session, primary_bind, resolve_factory
from sqlaqueue.sql.portable import in_recovery
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.texts import split_error

NOTIFY_INTERVAL = 20.0
"""Seconds between notifications, for Consumers that have started since, and as Consumers forget them."""

FIRST_DELAY = 0.05
"""Seconds before the second poll; the delay grows with the time waited."""

MAX_DELAY, MAX_DELAY_NOT_LISTENING = 5.0, 1.0
"""Maximum seconds between two polls, if notifications arrive and if not."""


class WaitState(listener.Subscriber):
    """Decides when to notify Consumers and when to poll.

    It is a subscriber of the queue's channel, and safe for use by several threads.

    :param job: the text of the job's key.
    :param wake: called when a poll may be due.
    """

    def __init__(
        self,
        job: str,
        wake: Callable[[], object],
        timeout: float | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._job, self._wake, self._now, self._draw = job, wake, now, draw
        self.id = uuid.uuid4().hex
        self.notification = WaitRequest(self.id, [job])
        """The notification to send."""
        self._since = self._notify_at = now()
        self._deadline = float("inf") if timeout is None else self._since + timeout
        self._poll_at = self._since + FIRST_DELAY
        self._unanswered = 0
        self._is_woken = False
        self.listening = False
        """Whether it has received its own notification, and so will receive that the job was settled."""
        self.notifies = len(str(self.notification)) <= MAX_BYTES
        """Whether it sends notifications; otherwise it only polls."""

    def receive(self, payload: Payload) -> None:
        """Poll when the own notification arrives, and when the job was settled."""
        match payload:
            case WaitRequest(self.id):
                if not self.listening:
                    # The job may have been settled before a Consumer received the notification.
                    self.listening, self._notify_at = True, self._now() + self._interval()
                    self._wake_up()
            case Settled(jobs) if self._job in jobs:
                # The row may be read from a snapshot before the notification: poll with short delays again.
                self._since = self._now()
                self._wake_up()

    def listening_lost(self) -> None:
        """Announce again, as notifications may have been missed."""
        self.listening = False
        self._notify_at, self._unanswered = self._now(), 0
        self._wake()

    def _wake_up(self) -> None:
        self._is_woken = True
        self._wake()

    @property
    def timed_out(self) -> bool:
        return self._deadline <= self._now()

    def seconds_until_due(self) -> float:
        """Return the seconds until a notification of its own or a poll is due, or the timeout."""
        if self._is_woken:
            return 0.0
        due = min(self._poll_at, self._deadline, self._notify_at if self.notifies else float("inf"))
        return max(0.0, due - self._now())

    def take_notification(self) -> bool:
        """Return whether a notification of its own is due; if so, schedule the next one."""
        now = self._now()
        if not self.notifies or self._notify_at > now:
            return False
        # Until one is received: the connection may not have been listening when it was sent.
        soon = 2 * FIRST_DELAY * 2.0 ** min(self._unanswered, 20)
        self._notify_at = now + (self._interval() if self.listening else min(soon, self._interval()))
        self._unanswered += 1
        return True

    def _interval(self) -> float:
        # Jittered, as many callers may have started to wait at the same time.
        return NOTIFY_INTERVAL * (0.8 + 0.4 * self._draw())

    def take_poll(self) -> bool:
        """Return whether a poll is due; notifications received after this call make another one due."""
        if self._is_woken or min(self._poll_at, self._deadline) <= self._now():
            self._is_woken = False
            return True
        return False

    def not_settled(self) -> None:
        """Schedule the next poll, after the last one has found the job pending or running."""
        now = self._now()
        longest = MAX_DELAY if self.listening else MAX_DELAY_NOT_LISTENING
        self._poll_at = now + min(max(FIRST_DELAY, (now - self._since) / 2), longest)


DEFAULT_TIMEOUT = 10.0
"""The default timeout in seconds: a job that no Consumer runs must not block the caller for ever."""


class Waiter:
    """One call of ``wait()`` or ``async_wait()``, with its arguments checked.

    :param function: the name of the called function, for errors.
    :param job: an instance, its class, or a pair of its class and its key.
    :param key: the job's key if ``job`` is a class, else None.
    :param wake: called when a poll may be due.
    :raises NotAQueueError: if the class is not a queue.
    :raises StatementError: if the key is malformed, or the job has not been committed.
    """

    def __init__(
        self, function: str, job: Any, key: Any, timeout: Delay | None, wake: Callable[[], object], *, check: bool
    ) -> None:
        self.function, self.check = function, check
        self.timeout = None if timeout is None else seconds(timeout, f"{function}(timeout=...)")
        if isinstance(job, QueueMixin):
            if key is not None:
                msg = (
                    f"{function}(..., <{type(job).__name__}>, {key!r}): remove the key, as the instance has one; give "
                    f"the timeout as {function}(..., timeout={key!r})"
                )
                raise StatementError(msg)
            self.model: type[Any] = type(job)
            self.spec = spec_of(self.model)
            self.key = _committed_key(job, function)
        else:
            is_pair = key is None and isinstance(job, tuple) and len(job) == 2  # noqa: PLR2004 - a class and a key
            model, given = job if is_pair else (job, key)
            if not isinstance(model, type):
                msg = (
                    f"{function}(..., {job!r}): give an instance of a queue class, or the class and a key, as in "
                    f"{function}(..., Email, 5)"
                )
                raise StatementError(msg)
            self.model, self.spec = model, spec_of(model)
            self.key = given if isinstance(given, tuple) else (given,)
            if len(self.key) != len(self.spec.keys) or any(part is None for part in self.key):
                columns = ", ".join(column.key for column in self.spec.keys)
                msg = (
                    f"{function}(..., {self.model.__name__}, {given!r}): this is not a primary key, which is "
                    f"({columns})"
                )
                raise StatementError(msg)
        self.state = WaitState(key_text(self.key), wake, self.timeout)
        self.bind = {"mapper": self.spec.mapper}
        """The ``bind_arguments`` of statements, as a session may have several engines."""
        self.longest_reply = longest_wait((self.timeout or float("inf")) / 2)
        """The most seconds to wait for the database, whose connection is then given up."""

    def __str__(self) -> str:
        return f"{self.model.__name__} {key_text(self.key)}"


def _committed_key(job: Any, function: str) -> Key:
    """Return the key of an instance, if its changes are committed."""
    state, session, name = sa.inspect(job), object_session(job), type(job).__name__
    key: Key | None = state.identity
    if key is None:
        msg = f"{function}(): this {name} is not in the database; add it to a session and commit, then wait for it"
        raise StatementError(msg)
    name = f"{name} {key_text(key)}"
    transaction = None if session is None else session.get_nested_transaction() or session.get_transaction()
    uncommitted = session is not None and (job in session.deleted or session.is_modified(job))
    while transaction is not None and not uncommitted:
        # SQLAlchemy has no public attribute for the objects that a transaction has flushed.
        uncommitted = any(state in each for each in (transaction._new, transaction._dirty, transaction._deleted))  # noqa: SLF001 - see above
        transaction = transaction.parent
    run = run_of(job)
    if run is not None and run.transaction is not None and run.transaction.is_active:
        msg = f"{function}(): {name} is claimed by an open transaction of this process; settle it and commit first"
        raise StatementError(msg)
    if uncommitted:
        msg = (
            f"{function}(): {name} has been changed in a transaction that is still open, which no Consumer can see; "
            "commit its session first"
        )
        raise StatementError(msg)
    return key


_ENDS = (*FINISHED, "gone")


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
        outcomes = {
            "failed": "has failed",
            "cancelled": "was cancelled",
            "gone": "does not exist, or is no longer a job",
        }
        error_text = f": {result.error}" if result.error else ""
        msg = f"{waiter} {outcomes[result.state]}{error_text}"
        raise JobFailed(msg, result)
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


def first_poll(session: Session, waiter: Waiter) -> JobResult[Any] | None:
    """Check that the database is a primary that the library supports, and poll."""
    engine = session.get_bind(waiter.spec.mapper).engine
    check_dialect(engine.dialect, f"{waiter.function}({waiter.model.__name__})")
    if session.scalar(sa.select(in_recovery()), bind_arguments=waiter.bind):
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
    """Return the state of the job, which itself is loaded in some states."""
    spec, job = waiter.spec, None
    state, error, has_row = read_state(session, spec, waiter.key)
    if state in load_in and has_row and spec.has("status"):
        query = sa.select(waiter.model).where(spec.key_in(spec.keys, [waiter.key]))
        job = session.execute(query.execution_options(populate_existing=True)).unique().scalar_one_or_none()
        session.expunge_all()
    session.rollback()
    return JobResult(cast("Any", state), job, error)


class JobState(NamedTuple):
    state: str
    """The name of the state, or ``gone``."""
    error: str | None
    """The last error, without its traceback."""
    has_row: bool
    """Whether a row says so, be it a dead letter."""


def read_state(session: Session, spec: QueueSpec, key: Key) -> JobState:
    state = spec.strategy.job_state(spec, key)
    row: Any = session.execute(state, bind_arguments={"mapper": spec.mapper}).one_or_none()
    if row is not None:
        error = None if row[1] is None else split_error(row[1])[0]
        return JobState(row[0] or "gone", error, has_row=True)
    vanishes = spec.config.on_complete == "delete" or not spec.has("status")
    return JobState("completed" if vanishes else "gone", None, has_row=False)


def notify_consumers(session: Session, waiter: Waiter) -> None:
    session.execute(sa.select(notification(waiter.spec, waiter.state.notification)), bind_arguments=waiter.bind)
    session.commit()


T = TypeVar("T")
SessionFactory = Callable[[], Session]


@overload
def wait(
    session_factory: SessionFactory, job: tuple[type[T], Any], /, *, timeout: Delay | None = ..., check: bool = ...
) -> JobResult[T]: ...
@overload
def wait(
    session_factory: SessionFactory, job: type[T], key: Any, /, *, timeout: Delay | None = ..., check: bool = ...
) -> JobResult[T]: ...
@overload
def wait(
    session_factory: SessionFactory, job: T, /, *, timeout: Delay | None = ..., check: bool = ...
) -> JobResult[T]: ...
def wait(
    session_factory: SessionFactory,
    job: Any,
    key: Any = None,
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> JobResult[Any]:
    """Wait until a job is completed, has failed for good, is cancelled or deleted, and return its result.

    A failed attempt that will be retried does not end the wait. The job must be committed, as ``wait()`` reads it in
    sessions of its own.

    ::

        email = Email(to="ada@example.com")
        session.add(email)
        session.commit()
        with Consumer(Email, send, sessions):
            assert wait(sessions, email, timeout=30).state == "completed"

    :param session_factory: makes sessions of the primary, such as a ``sessionmaker(engine)``.
    :param job: an instance, or a class with a key, as for ``session.get()``: ``wait(sessions, Email, 5)``. The pair
        ``(Email, 5)`` is equivalent.
    :param key: the primary key of the job if ``job`` is a class; a tuple for a composite key.
    :param timeout: seconds or timedelta, 10 seconds by default; None for no limit.
    :param check: raise :class:`~sqlaqueue.exc.JobFailed` unless the job is completed.
    :raises WaitTimeout: if the job has not finished within ``timeout``; a :class:`TimeoutError`. The job goes on.
    :raises StatementError: if the transaction that wrote the job is still open, or the key is malformed.
    :raises NotAQueueError: if the class is not a queue.
    """
    wake = threading.Event()
    waiter = Waiter("wait", job, key, timeout, wake.set, check=check)
    factory = resolve_factory(session_factory, "wait", is_async=False)
    session: Session = factory()
    check_session_class(type(session), factory, "wait", is_async=False)
    with session:
        engine, subscribed = primary_bind(session, waiter.spec.mapper).engine, False
    limit_connects(engine)
    deadlines = Deadlines(waiter.longest_reply, f"wait() for {waiter}")

    def perform(effect: ExecuteInOwnSession | Wait | Listen) -> Any:
        nonlocal subscribed
        match effect:
            case ExecuteInOwnSession():
                with open_session(factory) as opened, deadlines.limit(opened):
                    return execute(opened, effect.operation, effect.arguments)
            case Wait():
                wake.wait(None if effect.seconds == float("inf") else effect.seconds)
                wake.clear()
            case Listen():
                subscribed = True
                listener.listen(engine, channel_of(waiter.spec), waiter.state)
        return None

    try:
        with deadlines.watched():
            return drive(wait_for_end(waiter), perform)
    finally:
        if subscribed:
            listener.unlisten(engine, waiter.state)
