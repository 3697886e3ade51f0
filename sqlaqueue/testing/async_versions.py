"""The functions for an AsyncSession whose sync form is an operation on a Session."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlaqueue.queue.retry_policies import Delay
from sqlaqueue.schedules.schedule import Schedule
from sqlaqueue.testing._types import Jobs
from sqlaqueue.testing.crash import crash_in
from sqlaqueue.testing.enqueued import enqueued
from sqlaqueue.testing.fire_schedules import fire_in
from sqlaqueue.testing.in_transaction.joined_sessions import resolve_session
from sqlaqueue.testing.travel import travel
from sqlaqueue.write_routing import execute

if TYPE_CHECKING:
    from sqlaqueue.testing._types import AnyAsyncSession

T = TypeVar("T")


async def async_enqueued(session: AnyAsyncSession, model: Jobs[T], /, **columns: Any) -> list[T]:
    """Do what :func:`enqueued` does."""
    own = resolve_session(session, "async_enqueued", is_async=True)
    jobs: list[T] = await own.run_sync(enqueued, model, **columns)
    return jobs


async def async_fire_schedules(session: AnyAsyncSession, schedules: Sequence[Schedule[Any] | type[Any]]) -> list[Any]:
    """Do what :func:`fire_schedules` does."""
    own = resolve_session(session, "async_fire_schedules", is_async=True)
    jobs: list[Any] = await own.run_sync(fire_in, schedules, "async_fire_schedules")
    return jobs


async def async_travel(session: AnyAsyncSession, delta: Delay) -> None:
    """Do what :func:`travel` does."""
    await resolve_session(session, "async_travel", is_async=True).run_sync(travel, delta)


async def async_crash(session: AnyAsyncSession, job: Any) -> None:
    """Do what :func:`crash` does."""
    own = resolve_session(session, "async_crash", is_async=True)
    await own.run_sync(execute, partial(crash_in, is_async=True), (job, "async_crash"))
