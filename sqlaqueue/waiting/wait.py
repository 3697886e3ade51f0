"""Wait for the end of a job: :func:`wait`.

::

    session.add(email)
    session.commit()
    result = wait(sessionmaker(engine), email, timeout=10)
    print(result.state, result.job)

Whoever waits is woken by the Consumer that ends the job. Nothing of that is sent for jobs that nobody waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.effects import Beside, Pause
from sqlaqueue.consumer.notifications import listener
from sqlaqueue.consumer.sessions.session_factory import check_session_class, resolve_factory
from sqlaqueue.consumer.sessions.write_routing import open_session, primary_bind
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.retry_policies import Delay
from sqlaqueue.results import JobResult
from sqlaqueue.waiting.job_end import DEFAULT_TIMEOUT, Listen, Waiter, await_end, make_waiter

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
    """Return how a job has ended, as soon as it has: completed, failed for good, cancelled, or its row gone.

    An attempt that fails and is to be repeated is no end. It looks at the database in sessions of its own, so the job
    has to be committed.

    :param session_factory: makes sessions on the primary, such as a ``sessionmaker(engine)``.
    :param job: an instance, or a class with a key, as for ``session.get()``: ``wait(sessions, Email, 5)``. The pair
        ``(Email, 5)`` says the same.
    :param key: the key of the job, when ``job`` is a class; a tuple for a composite key.
    :param timeout: seconds or timedelta, 10 seconds by default; None waits for as long as it takes.
    :param check: raise :class:`~sqlaqueue.exc.JobFailed` unless the job is completed.
    :raises WaitTimeout: when the job has not ended within ``timeout``; it is a :class:`TimeoutError`. The job goes on.
    :raises StatementError: when nobody else can see the job, since the transaction that wrote it is still open.
    :raises NotAQueueError: when the class is no queue.
    """
    bell = threading.Event()
    waiter = make_waiter("wait", job, key, timeout, bell.set, check=check)
    make = resolve_factory(session_factory, "wait", is_async=False)
    engine = _engine_of(make, waiter)
    script, is_listening = await_end(waiter), False
    try:
        result: Any = None
        raised: Exception | None = None
        while True:
            step = script.send(result) if raised is None else script.throw(raised)
            result = raised = None
            try:
                match step:
                    case Beside():
                        with open_session(make) as session:
                            result = step(session)
                    case Pause():
                        bell.wait(None if step.seconds == float("inf") else step.seconds)
                        bell.clear()
                    case Listen():
                        is_listening = True
                        listener.listen(engine, backend().channel_of(waiter.spec), waiter.waiting)
            except Exception as error:  # noqa: BLE001 - the script decides
                raised = error
    except StopIteration as end:
        ended: JobResult[Any] = end.value
        return ended
    finally:
        if is_listening:
            listener.unlisten(engine, waiter.waiting)


def _engine_of(make: Any, waiter: Waiter) -> sa.Engine:
    """Return the engine of the sessions that ``make`` makes."""
    session: Session = make()
    check_session_class(type(session), make, "wait", is_async=False)
    with session:
        return primary_bind(session, waiter.spec.mapper).engine
