"""Wait for the end of a job: :func:`wait`.

::

    session.add(email)
    session.commit()
    result = wait(sessionmaker(engine), email, timeout=10)
    print(result.state, result.job)

The Consumer that settles the job wakes the caller by a notification. It sends none for jobs without a waiting caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.driver import drive
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Wait
from sqlaqueue.consumer.core.statement_deadline import Deadlines, limit_connects
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.sessions.session_factory import check_session_class, resolve_factory
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.queue.retry_policies import Delay
from sqlaqueue.results import JobResult
from sqlaqueue.waiting.job_end import Listen, wait_for_end
from sqlaqueue.waiting.waiter import DEFAULT_TIMEOUT, Waiter, make_waiter
from sqlaqueue.write_routing import execute, open_session, primary_bind

T = TypeVar("T")


@overload
def wait(
    session_factory: Callable[[], Session],
    job: tuple[type[T], Any],
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> JobResult[T]: ...
@overload
def wait(
    session_factory: Callable[[], Session],
    job: type[T],
    key: Any,
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> JobResult[T]: ...
@overload
def wait(
    session_factory: Callable[[], Session],
    job: T,
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> JobResult[T]: ...
def wait(
    session_factory: Callable[[], Session],
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
    waiter = make_waiter("wait", job, key, timeout, wake.set, check=check)
    factory = resolve_factory(session_factory, "wait", is_async=False)
    engine, subscribed = _engine_of(factory, waiter), False

    limit_connects(engine)
    deadlines = Deadlines(waiter.longest_reply, f"wait() for {waiter}")

    def perform(effect: ExecuteInOwnSession | Wait | Listen) -> Any:
        nonlocal subscribed
        match effect:
            case ExecuteInOwnSession():
                with open_session(factory) as session, deadlines.limit(session):
                    return execute(session, effect.operation, effect.arguments)
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


def _engine_of(factory: Any, waiter: Waiter) -> sa.Engine:
    """Return the engine to which a session of the factory writes."""
    session: Session = factory()
    check_session_class(type(session), factory, "wait", is_async=False)
    with session:
        return primary_bind(session, waiter.spec.mapper).engine
