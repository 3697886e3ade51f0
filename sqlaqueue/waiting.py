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

from sqlaqueue.backoff import Delay
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.serving import ears
from sqlaqueue.serving.steps import Beside, Pause
from sqlaqueue.serving.waiting import JobResult, Listen, Waiter, await_end, make_waiter, maker_of
from sqlaqueue.strategies.wake_up_triggers import channel_of

T = TypeVar("T")


@overload
def wait(
    session_factory: Callable[[], Session],
    job: tuple[type[T], Any],
    /,
    timeout: Delay | None = None,
    *,
    check: bool = False,
) -> JobResult[T]: ...
@overload
def wait(
    session_factory: Callable[[], Session], job: T, /, timeout: Delay | None = None, *, check: bool = False
) -> JobResult[T]: ...
def wait(
    session_factory: Callable[[], Session], job: Any, /, timeout: Delay | None = None, *, check: bool = False
) -> JobResult[Any]:
    """Return how a job has ended, as soon as it has: completed, failed for good, cancelled, or its row gone.

    An attempt that fails and is to be repeated is no end. It looks at the database in sessions of its own, so the job
    has to be committed.

    :param session_factory: makes sessions on the primary, such as a ``sessionmaker(engine)``.
    :param job: an instance, or the class with the key: ``(Email, 5)``, a tuple for a composite key.
    :param timeout: seconds or timedelta; None waits for as long as it takes.
    :param check: raise :class:`~sqlaqueue.exc.JobFailed` unless the job is completed.
    :raises WaitTimeout: when the time is over, and the job is not; it is a :class:`TimeoutError`.
    :raises StatementError: when nobody else can see the job, since the transaction that wrote it is still open.
    :raises NotAQueueError: when the class is no queue.
    """
    bell = threading.Event()
    waiter = make_waiter("wait", job, timeout, bell.set, check=check)
    make = maker_of(session_factory)
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
                        with make() as session:
                            result = step(session)
                    case Pause():
                        bell.wait(None if step.seconds == float("inf") else step.seconds)
                        bell.clear()
                    case Listen():
                        is_listening = True
                        ears.listen(engine, channel_of(waiter.spec), waiter.waiting)
            except Exception as error:  # noqa: BLE001 - the script decides
                raised = error
    except StopIteration as end:
        ended: JobResult[Any] = end.value
        return ended
    finally:
        if is_listening:
            ears.unlisten(engine, waiter.waiting)


def _engine_of(make: Any, waiter: Waiter) -> sa.Engine:
    """Return the engine of the sessions that ``make`` makes."""
    if not callable(make):
        msg = f"wait({make!r}, ...): give what makes sessions, such as a sessionmaker(engine), and not a session"
        raise ConfigurationError(msg)
    session = make()
    if not isinstance(session, Session):
        msg = f"wait: {make!r} makes {type(session).__name__}; give a sessionmaker, or use async_wait"
        raise ConfigurationError(msg)
    with session:
        return session.get_bind(waiter.spec.mapper).engine
