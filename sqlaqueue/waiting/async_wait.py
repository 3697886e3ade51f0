"""Wait for the end of jobs in async code: :func:`async_wait` and :func:`async_wait_all`, by the same routine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
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
from sqlaqueue.waiting.wait import DEFAULT_TIMEOUT, Listen, Waiter, wait_for_ends, waiters_of

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
    await _drive(session_factory, [waiter], wake)
    return waiter.result(waiter.key)


@overload
async def async_wait_all(
    session_factory: AsyncSessionFactory,
    jobs: Iterable[tuple[type[T], Any]],
    /,
    *,
    timeout: Delay | None = ...,
    check: bool = ...,
) -> list[JobResult[T]]: ...
@overload
async def async_wait_all(
    session_factory: AsyncSessionFactory, jobs: Iterable[T], /, *, timeout: Delay | None = ..., check: bool = ...
) -> list[JobResult[T]]: ...
async def async_wait_all(
    session_factory: AsyncSessionFactory,
    jobs: Any,
    /,
    *,
    timeout: Delay | None = DEFAULT_TIMEOUT,
    check: bool = False,
) -> list[JobResult[Any]]:
    """Wait until each of several jobs has ended; see :func:`~sqlaqueue.wait_all` for parameters and errors.

    ::

        async with AsyncConsumer(Email, async_send, async_sessions):
            results = await async_wait_all(async_sessions, [(Email, 1), (Email, 2)], timeout=60)

    :param session_factory: makes sessions of the primary, such as an ``async_sessionmaker(engine)``.
    """
    wake = asyncio.Event()
    waiters, order = waiters_of("async_wait_all", jobs, timeout, wake.set, check=check)
    await _drive(session_factory, waiters, wake)
    return [waiter.result(key) for waiter, key in order]


async def _drive(session_factory: AsyncSessionFactory, waiters: Sequence[Waiter], wake: asyncio.Event) -> None:
    """Wait until all jobs have ended."""
    if not waiters:
        return
    function = waiters[0].function
    factory = resolve_factory(session_factory, function, is_async=True)
    session: AsyncSession = factory()
    check_session_class(type(session), factory, function, is_async=True)
    async with session:
        engines = {waiter: primary_bind(session.sync_session, waiter.spec.mapper).engine for waiter in waiters}
    for engine in engines.values():
        limit_connects(engine)
    subscribed: list[tuple[AsyncListener, Waiter]] = []
    deadlines = Deadlines(waiters[0].longest_reply, f"{function}() for {waiters[0]}", in_loop=True)

    async def perform(effect: ExecuteInOwnSession | Wait | Listen) -> Any:
        match effect:
            case ExecuteInOwnSession():
                async with open_session(factory) as opened, deadlines.limit_in_task(opened):
                    return await opened.run_sync(execute, effect.operation, effect.arguments)
            case Wait():
                await wait_for_event(wake, effect.seconds)
                wake.clear()
            case Listen(waiter):
                found = async_listener_of(engines[waiter])
                subscribed.append((found, waiter))
                found.add(channel_of(waiter.spec), waiter.state)
        return None

    try:
        async with deadlines.watched_in_task():
            await adrive(wait_for_ends(waiters), perform)
    finally:
        for found, waiter in subscribed:
            await found.remove(waiter.state)
