"""Wait for the end of a job in async code: :func:`async_wait`, by the same script as :func:`~sqlaqueue.wait`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from sqlaqueue.consumer.aio import wait_for_event
from sqlaqueue.consumer.core.effects import Beside, Pause
from sqlaqueue.consumer.notifications.async_listener import async_listener_of
from sqlaqueue.consumer.sessions.session_factory import check_session_class, resolve_factory
from sqlaqueue.consumer.sessions.write_routing import open_session, primary_bind
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.retry_policies import Delay
from sqlaqueue.results import JobResult
from sqlaqueue.waiting.job_end import DEFAULT_TIMEOUT, Listen, Waiter, await_end, make_waiter

T = TypeVar("T")
AsyncSessionFactory = Callable[[], AsyncSession]


@overload
async def async_wait(
    session_factory: AsyncSessionFactory,
    job: tuple[type[T], Any],
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> JobResult[T]: ...
@overload
async def async_wait(
    session_factory: AsyncSessionFactory,
    job: type[T],
    key: Any,
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> JobResult[T]: ...
@overload
async def async_wait(
    session_factory: AsyncSessionFactory,
    job: T,
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> JobResult[T]: ...
async def async_wait(
    session_factory: AsyncSessionFactory,
    job: Any,
    key: Any = None,
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> JobResult[Any]:
    """Return how a job has ended, as soon as it has; see :func:`~sqlaqueue.wait` for parameters and errors.

    :param session_factory: makes sessions on the primary, such as an ``async_sessionmaker(engine)``.
    """
    bell = asyncio.Event()
    waiter = make_waiter("async_wait", job, key, timeout, bell.set, check=check)
    make = resolve_factory(session_factory, "async_wait", is_async=True)
    engine = await _engine_of(make, waiter)
    script, ear = await_end(waiter), None
    try:
        result: Any = None
        raised: Exception | None = None
        while True:
            step = script.send(result) if raised is None else script.throw(raised)
            result = raised = None
            try:
                match step:
                    case Beside():
                        async with open_session(make) as session:
                            result = await session.run_sync(step)
                    case Pause():
                        await wait_for_event(bell, step.seconds)
                        bell.clear()
                    case Listen():
                        ear = async_listener_of(engine)
                        ear.add(backend().channel_of(waiter.spec), waiter.waiting)
            except Exception as error:  # noqa: BLE001 - the script decides
                raised = error
    except StopIteration as end:
        ended: JobResult[Any] = end.value
        return ended
    finally:
        if ear is not None:
            await ear.remove(waiter.waiting)


async def _engine_of(make: Any, waiter: Waiter) -> sa.Engine:
    """Return the engine of the sessions that ``make`` makes."""
    session: AsyncSession = make()
    check_session_class(type(session), make, "async_wait", is_async=True)
    async with session:
        return primary_bind(session.sync_session, waiter.spec.mapper).engine
