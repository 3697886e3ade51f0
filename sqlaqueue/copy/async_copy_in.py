"""Enqueue many jobs by COPY in async code: :func:`async_copy_in`, which does what :func:`~sqlaqueue.copy_in` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

from sqlaqueue.copy.copy_in import copy_rows
from sqlaqueue.exc import StatementError


async def async_copy_in(
    session: AsyncSession | async_scoped_session[Any], model: type[Any], rows: Iterable[Mapping[str, Any]], /
) -> int:
    """Enqueue a job for each row by one COPY; see :func:`~sqlaqueue.copy_in` for parameters and errors.

    With asyncpg each value must be of its column's type in the database, of which the driver takes no other.
    """
    if isinstance(session, async_scoped_session):
        session = session()
    if not isinstance(session, AsyncSession):
        msg = f"async_copy_in({session!r}, ...): give an AsyncSession; for a Session there is copy_in"
        raise StatementError(msg)
    return await session.run_sync(copy_rows, model, rows, "async_copy_in")
