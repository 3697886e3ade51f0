"""Wait for the end of a job in async code: :func:`async_wait`, with the same routine as :func:`~sqlaqueue.wait`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, overload

from sqlalchemy.ext.asyncio import AsyncSession

from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Wait, adrive
from sqlaqueue.consumer.core.waker import Deadlines, limit_connects
from sqlaqueue.consumer.notifications.async_listener import AsyncListener, async_listener_of
from sqlaqueue.consumer.tasks import wait_for_event
from sqlaqueue.exc import JobResult
from sqlaqueue.postgresql.triggers import channel_of
from sqlaqueue.queue.retry_policies import Delay
from sqlaqueue.sessions import check_session_class, execute, open_session, primary_bind, resolve_factory
from sqlaqueue.waiting.wait import DEFAULT_TIMEOUT, Listen, Waiter, wait_for_end

T = TypeVar("T")
AsyncSessionFactory = Callable[[], AsyncSession]


@overload
async def async_wait(
    session_factory: AsyncSessionFactory, job: tuple[type[T], Any], /, *, timeout: Delay | None = ..., check: bool = ...
) -> JobResult[T]: ...
@overload
async def async_wait(
    session_factory: AsyncSessionFactory, job: type[T], key: Any, /, *, timeout: Delay | None = ..., check: bool = ...
) -> JobResult[T]: ...
@overload
async def async_wait(
    session_factory: AsyncSessionFactory, job: T, /, *, timeout: Delay | None = ..., check: bool = ...
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
    """Wait until a job has finished, and return its result; see :func:`~sqlaqueue.wait` for parameters and errors.

    ::

        async with AsyncConsumer(Email, async_send, async_sessions):
            result = await async_wait(async_sessions, Email, 1, timeout=30)

    :param session_factory: makes sessions of the primary, such as an ``async_sessionmaker(engine)``.
    """
    wake = asyncio.Event()
    waiter = Waiter("async_wait", job, key, timeout, wake.set, check=check)
    factory = resolve_factory(session_factory, "async_wait", is_async=True)
    session: AsyncSession = factory()
    check_session_class(type(session), factory, "async_wait", is_async=True)
    async with session:
        engine = primary_bind(session.sync_session, waiter.spec.mapper).engine
    listener: AsyncListener | None = None
    limit_connects(engine)
    deadlines = Deadlines(waiter.longest_reply, f"async_wait() for {waiter}", in_loop=True)

    async def perform(effect: ExecuteInOwnSession | Wait | Listen) -> Any:
        nonlocal listener
        match effect:
            case ExecuteInOwnSession():
                async with open_session(factory) as opened, deadlines.limit_in_task(opened):
                    return await opened.run_sync(execute, effect.operation, effect.arguments)
            case Wait():
                await wait_for_event(wake, effect.seconds)
                wake.clear()
            case Listen():
                listener = async_listener_of(engine)
                listener.add(channel_of(waiter.spec), waiter.state)
        return None

    try:
        async with deadlines.watched_in_task():
            return await adrive(wait_for_end(waiter), perform)
    finally:
        if listener is not None:
            await listener.remove(waiter.state)
