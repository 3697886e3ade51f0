"""Bulk enqueueing by COPY in async code: :func:`async_copy_in`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

from sqlaqueue.copy.copy_in import CopyOnTwin, copy_rows
from sqlaqueue.exc import StatementError


async def async_copy_in(
    session: AsyncSession | async_scoped_session[Any],
    model: type[Any],
    rows: Iterable[Mapping[str, Any]],
    /,
    *,
    on_twin: CopyOnTwin = "raise",
) -> int:
    """Enqueue a job for each row by COPY, like :func:`~sqlaqueue.copy_in`, which documents parameters and errors.

    asyncpg accepts only values of the type of the column in the database.
    """
    if isinstance(session, async_scoped_session):
        session = session()
    if not isinstance(session, AsyncSession):
        msg = f"async_copy_in({session!r}, ...): use an AsyncSession, or copy_in() for a Session"
        raise StatementError(msg)
    return await session.run_sync(copy_rows, model, rows, "async_copy_in", on_twin)
