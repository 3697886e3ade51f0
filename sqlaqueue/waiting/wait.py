"""Wait for the end of jobs: :func:`wait` for one, :func:`wait_all` for several.

::

    session.add(email)
    session.commit()
    result = wait(sessionmaker(engine), email, timeout=10)
    print(result.state, result.job)

The Consumer that ends a job wakes the caller by a notification. It sends none for jobs without a waiting caller.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
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
from sqlaqueue.notify_payloads import MAX_BYTES, Payload, Settled, WaitRequest, settled_payloads
from sqlaqueue.postgresql.triggers import channel_of, notification, wakes
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import check_session_class, execute, open_session, primary_bind, resolve_factory
from sqlaqueue.sql.portable import in_recovery
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.texts import split_error

T = TypeVar("T")

NOTIFY_INTERVAL = 20.0
"""Seconds between notifications, for Consumers that have started since, and as Consumers forget them."""

FIRST_DELAY = 0.05
"""Seconds before the second poll; the delay grows with the time waited."""

MAX_DELAY, MAX_DELAY_NOT_LISTENING = 5.0, 1.0
"""Maximum seconds between two polls, if notifications arrive and if not."""


class WaitState(listener.Subscriber):
    """Decides when to notify Consumers and when to poll.

    It is a subscriber of the queue's channel, and safe for use by several threads.

    :param jobs: the texts of the jobs' keys.
    :param wake: called when a poll may be due.
    """

    def __init__(
        self,
        jobs: Iterable[str],
        wake: Callable[[], object],
        timeout: float | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._jobs, self._wake, self._now, self._draw = set(jobs), wake, now, draw
        self._settled: set[str] = set()
        self.id = uuid.uuid4().hex
        self._since = self._notify_at = now()
        self._deadline = float("inf") if timeout is None else self._since + timeout
        self._poll_at = self._since + FIRST_DELAY
        self._unanswered = 0
        self._is_woken = False
        self.listening = False
        """Whether it has received its own notification, and so will receive that the job was settled."""
        self.notifies = all(len(str(each)) <= MAX_BYTES for each in self.notifications)
        """Whether it sends notifications; otherwise it only polls."""

    @property
    def notifications(self) -> list[WaitRequest]:
        """The notifications to send: as many as keep each short enough."""
        return [WaitRequest(self.id, payload.jobs) for payload in settled_payloads(sorted(self._jobs), len(self.id))]

    def has_ended(self, job: str) -> None:
        """Wait for one job less."""
        self._jobs.discard(job)

    def receive(self, payload: Payload) -> None:
        """Poll when the own notification arrives, and when the last of the jobs was settled."""
        match payload:
            case WaitRequest(self.id):
                if not self.listening:
                    # The job may have been settled before a Consumer received the notification.
                    self.listening, self._notify_at = True, self._now() + self._interval()
                    self._wake_up()
            case Settled(jobs) if not self._jobs.isdisjoint(jobs):
                # The row may be read from a snapshot before the notification: poll with short delays again.
                self._settled.update(self._jobs.intersection(jobs))
                # Of many jobs each would cost a query for all; those that end meanwhile are found by the usual polls.
                if self._jobs <= self._settled:
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
        """Schedule the next poll, after the last one has found a job pending or running."""
        now = self._now()
        longest = MAX_DELAY if self.listening else MAX_DELAY_NOT_LISTENING
        self._poll_at = now + min(max(FIRST_DELAY, (now - self._since) / 2), longest)


DEFAULT_TIMEOUT = 10.0
"""The default timeout in seconds: a job that no Consumer runs must not block the caller for ever."""


class Waiter:
    """The jobs of one class that a call of ``wait()`` or of its relatives waits for, with its arguments checked.

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
        self.results: dict[Key, JobResult[Any] | None] = {self.key: None}
        """By the keys of the jobs; None for those that have not ended."""
        self.state = WaitState([key_text(self.key)], wake, self.timeout)
        self.bind = {"mapper": self.spec.mapper}
        """The ``bind_arguments`` of statements, as a session may have several engines."""
        self.longest_reply = longest_wait((self.timeout or float("inf")) / 2)
        """The most seconds to wait for the database, whose connection is then given up."""

    def __str__(self) -> str:
        return f"{self.model.__name__} {key_text(self.key)}"

    @property
    def left(self) -> list[Key]:
        """The keys of jobs that have not ended."""
        return [key for key, result in self.results.items() if result is None]

    def result(self, key: Key) -> JobResult[Any]:
        """Return the result of a job that has ended.

        :raises JobFailed: if the caller has asked for that, unless it is completed.
        """
        result = self.results[key]
        assert result is not None, key  # noqa: S101 - the routine ends when all jobs have
        if self.check and result.state != "completed":
            outcomes = {
                "failed": "has failed",
                "cancelled": "was cancelled",
                "gone": "does not exist, or is no longer a job",
            }
            error_text = f": {result.error}" if result.error else ""
            msg = f"{self.model.__name__} {key_text(key)} {outcomes[result.state]}{error_text}"
            raise JobFailed(msg, result)
        return result


def waiters_of(
    function: str, jobs: Any, timeout: Delay | None, wake: Callable[[], object], *, check: bool
) -> tuple[list[Waiter], list[tuple[Waiter, Key]]]:
    """Return a waiter for each class of the jobs; and for each job, in the order given, its waiter and its key."""
    if isinstance(jobs, (str, bytes, type, QueueMixin)) or not isinstance(jobs, Iterable):
        msg = (
            f"{function}(..., {jobs!r}): give a list of jobs: instances, or pairs of a class and a key, as in "
            f"{function}(..., [email, (Email, 5)])"
        )
        raise StatementError(msg)
    by_class: dict[type[Any], Waiter] = {}
    order = []
    for job in jobs:
        single = Waiter(function, job, None, timeout, wake, check=check)
        waiter = by_class.setdefault(single.model, single)
        waiter.results[single.key] = None
        order.append((waiter, single.key))
    for waiter in by_class.values():
        waiter.state = WaitState(map(key_text, waiter.results), wake, waiter.timeout)
    return list(by_class.values()), order


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
        msg = f"{function}(): {name} is claimed by an open transaction of this process; complete it and commit first"
        raise StatementError(msg)
    if uncommitted:
        msg = (
            f"{function}(): {name} has been changed in a transaction that is still open, which no Consumer can see; "
            "commit its session first"
        )
        raise StatementError(msg)
    return key


_ENDS = (*FINISHED, "gone")


class Listen(NamedTuple):
    """Subscribe the waiter's state to the queue's channel."""

    waiter: Waiter


WaitRoutine = Generator[ExecuteInOwnSession | Wait | Listen, Any, None]


def wait_for_ends(waiters: Sequence[Waiter]) -> WaitRoutine:
    """Poll the jobs, notify Consumers of the waiters, and poll when a notification arrives or a poll is due."""
    for waiter in waiters:
        yield from _first_look(waiter)
        if waiter.left and waiter.state.notifies and not waiter.state.timed_out:
            yield Listen(waiter)
    while waiting := [waiter for waiter in waiters if waiter.left]:
        if all(waiter.state.timed_out for waiter in waiting):
            raise WaitTimeout(_late(waiters, waiting))
        yield Wait("poll", min(waiter.state.seconds_until_due() for waiter in waiting))
        for waiter in waiting:
            state = waiter.state
            try:
                if state.take_notification():
                    yield ExecuteInOwnSession(notify_consumers, (waiter,))
                if state.take_poll():
                    yield ExecuteInOwnSession(poll, (waiter,))
                    state.not_settled()
            except Exception as error:
                if not may_recover(error):
                    raise
                state.not_settled()


def _late(waiters: Sequence[Waiter], waiting: Sequence[Waiter]) -> str:
    function, timeout, number = waiters[0].function, waiters[0].timeout, sum(len(each.results) for each in waiters)
    late = [f"{waiter.model.__name__} {key_text(key)}" for waiter in waiting for key in waiter.left]
    more = f" and {len(late) - _MOST_NAMED} more" if len(late) > _MOST_NAMED else ""
    names = ", ".join(late[:_MOST_NAMED]) + more
    if number == 1:
        said = f"{names} has not finished within {timeout:g} s; it is not cancelled"
    else:
        said = f"{len(late)} of {number} jobs have not finished within {timeout:g} s: {names}; they are not cancelled"
    return f"{said}. To wait longer, give {function}(..., timeout=...) more seconds, or None for no limit"


_MOST_NAMED = 10
"""The number of jobs that an error names."""


def _first_look(waiter: Waiter) -> Generator[ExecuteInOwnSession, Any, None]:
    look = ExecuteInOwnSession(first_poll, (waiter,))
    try:
        yield look
    except Exception as error:
        if not is_connection_lost(error):
            raise
        # That of the pool may have been lost long before, and the next one is new.
        yield look


def first_poll(session: Session, waiter: Waiter) -> None:
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
    poll(session, waiter)


_PER_QUERY = 1000
"""Jobs whose states one statement reads."""


def poll(session: Session, waiter: Waiter) -> None:
    """Store the results of jobs that are neither pending nor running."""
    left = waiter.left
    for start in range(0, len(left), _PER_QUERY):
        keys = left[start : start + _PER_QUERY]
        for key, found in zip(keys, read_jobs(session, waiter, keys, load_in=_ENDS), strict=True):
            if found.state in _ENDS:
                waiter.results[key] = found
                waiter.state.has_ended(key_text(key))


def read_job(session: Session, waiter: Waiter, *, load_in: Collection[str]) -> JobResult[Any]:
    """Return the state of the job, which itself is loaded in some states."""
    (found,) = read_jobs(session, waiter, [waiter.key], load_in=load_in)
    return found


def read_jobs(
    session: Session, waiter: Waiter, keys: Sequence[Key], *, load_in: Collection[str]
) -> list[JobResult[Any]]:
    spec, jobs = waiter.spec, dict[Key, Any]()
    states = read_states(session, spec, keys)
    loaded = [key for key, each in zip(keys, states, strict=True) if each.state in load_in and each.has_row]
    if loaded and spec.has("status"):
        query = sa.select(waiter.model).where(spec.key_in(spec.keys, loaded))
        found = session.execute(query.execution_options(populate_existing=True)).unique().scalars().all()
        jobs = by_key({cast("Key", sa.inspect(job).identity): job for job in found}, loaded)
        session.expunge_all()
    session.rollback()
    return [
        JobResult(cast("Any", state.state), jobs.get(key), state.error) for key, state in zip(keys, states, strict=True)
    ]


def by_key(found: Mapping[Key, T], keys: Sequence[Key]) -> dict[Key, T]:
    """Return what was found by the keys as they were given: as ``"5"`` perhaps, where the database has 5."""
    if len(keys) == 1:
        return dict.fromkeys(keys, value) if (value := next(iter(found.values()), None)) is not None else {}
    by_text = {key_text(key): value for key, value in found.items()}
    values = ((key, found.get(key, by_text.get(key_text(key)))) for key in keys)
    return {key: value for key, value in values if value is not None}


class JobState(NamedTuple):
    state: str
    """The name of the state, or ``gone``."""
    error: str | None
    """The last error, without its traceback."""
    has_row: bool
    """Whether a row says so, be it a dead letter."""


def read_states(session: Session, spec: QueueSpec, keys: Sequence[Key]) -> list[JobState]:
    rows: Any = session.execute(spec.strategy.job_states(spec, keys), bind_arguments={"mapper": spec.mapper})
    found: dict[Key, JobState] = {}
    for row in rows:
        *key, state, error = row
        found[tuple(key)] = JobState(state or "gone", None if error is None else split_error(error)[0], has_row=True)
    vanishes = spec.config.on_complete == "delete" or not spec.has("status")
    missing = JobState("completed" if vanishes else "gone", None, has_row=False)
    given = by_key(found, keys)
    return [given.get(key, missing) for key in keys]


def notify_consumers(session: Session, waiter: Waiter) -> None:
    for each in waiter.state.notifications:
        session.execute(sa.select(notification(waiter.spec, each)), bind_arguments=waiter.bind)
    session.commit()


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
    :raises WaitTimeout: if the job has not finished within ``timeout``; a :class:`TimeoutError`. The job continues.
    :raises StatementError: if the transaction that wrote the job is still open, or the key is malformed.
    :raises NotAQueueError: if the class is not a queue.
    """
    wake = threading.Event()
    waiter = Waiter("wait", job, key, timeout, wake.set, check=check)
    _drive(session_factory, [waiter], wake)
    return waiter.result(waiter.key)


@overload
def wait_all(
    session_factory: SessionFactory,
    jobs: Iterable[tuple[type[T], Any]],
    /,
    *,
    timeout: Delay | None = ...,
    check: bool = ...,
) -> list[JobResult[T]]: ...
@overload
def wait_all(
    session_factory: SessionFactory, jobs: Iterable[T], /, *, timeout: Delay | None = ..., check: bool = ...
) -> list[JobResult[T]]: ...
def wait_all(
    session_factory: SessionFactory,
    jobs: Any,
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> list[JobResult[Any]]:
    """Wait until each of several jobs has ended, and return their results in the order of the jobs.

    It costs as much as :func:`wait` for one job: one listener, and one query for the jobs of a class at each look.

    ::

        emails = [Email(to="ada@example.com"), Email(to="bob@example.com")]
        session.add_all(emails)
        session.commit()
        with Consumer(Email, send, sessions):
            results = wait_all(sessions, emails, timeout=60)
            print(sum(result.state == "completed" for result in results))

    :param session_factory: makes sessions of the primary, such as a ``sessionmaker(engine)``.
    :param jobs: instances, or pairs of a class and a key; of one queue or of several. None of them: an empty list.
    :param timeout: seconds or timedelta for all of them, 10 seconds by default; None for no limit.
    :param check: raise :class:`~sqlaqueue.exc.JobFailed` unless all jobs are completed, for the first one that is not,
        when all have ended.
    :raises WaitTimeout: if one of them has not finished within ``timeout``; it names those, and they continue.
    :raises StatementError: as :func:`wait` does; and if ``jobs`` is not a list or another iterable.
    :raises NotAQueueError: if a class is not a queue.
    """
    wake = threading.Event()
    waiters, order = waiters_of("wait_all", jobs, timeout, wake.set, check=check)
    _drive(session_factory, waiters, wake)
    return [waiter.result(key) for waiter, key in order]


def _drive(session_factory: SessionFactory, waiters: Sequence[Waiter], wake: threading.Event) -> None:
    """Wait until all jobs have ended."""
    if not waiters:
        return
    function = waiters[0].function
    factory = resolve_factory(session_factory, function, is_async=False)
    session: Session = factory()
    check_session_class(type(session), factory, function, is_async=False)
    with session:
        engines = {waiter: primary_bind(session, waiter.spec.mapper).engine for waiter in waiters}
    for engine in engines.values():
        limit_connects(engine)
    subscribed: list[Waiter] = []
    deadlines = Deadlines(waiters[0].longest_reply, f"{function}() for {waiters[0]}")

    def perform(effect: ExecuteInOwnSession | Wait | Listen) -> Any:
        match effect:
            case ExecuteInOwnSession():
                with open_session(factory) as opened, deadlines.limit(opened):
                    return execute(opened, effect.operation, effect.arguments)
            case Wait():
                wake.wait(None if effect.seconds == float("inf") else effect.seconds)
                wake.clear()
            case Listen(waiter):
                subscribed.append(waiter)
                listener.listen(engines[waiter], channel_of(waiter.spec), waiter.state)
        return None

    try:
        with deadlines.watched():
            drive(wait_for_ends(waiters), perform)
    finally:
        for waiter in subscribed:
            listener.unlisten(engines[waiter], waiter.state)
