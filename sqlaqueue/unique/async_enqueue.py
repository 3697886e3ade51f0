"""Enqueue unique jobs in async code: :func:`async_enqueue`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, overload

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

from sqlaqueue.session_types import check_session, session_in_scope
from sqlaqueue.unique.enqueue import enqueue_in
from sqlaqueue.unique.enqueueing import Enqueued, OnTwin

T = TypeVar("T")


@overload
async def async_enqueue(
    session: AsyncSession | async_scoped_session[Any], jobs: Iterable[T], /, *, on_twin: OnTwin = "skip"
) -> list[Enqueued[T]]: ...
@overload
async def async_enqueue(
    session: AsyncSession | async_scoped_session[Any], jobs: T, /, *, on_twin: OnTwin = "skip"
) -> list[Enqueued[T]]: ...
async def async_enqueue(session: Any, jobs: Any, /, *, on_twin: OnTwin = "skip") -> list[Enqueued[Any]]:
    """Insert those jobs that have no twin, like :func:`~sqlaqueue.enqueue`, which documents parameters and errors."""
    check_session(session, "async_enqueue", is_async=True)
    result: list[Enqueued[Any]] = await session_in_scope(session).run_sync(enqueue_in, jobs, on_twin)
    return result
