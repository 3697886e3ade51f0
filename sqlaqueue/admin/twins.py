"""The same functions for an AsyncSession: each runs its namesake by ``AsyncSession.run_sync()``."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from sqlaqueue.admin.cancelling import cancel
from sqlaqueue.admin.changes import purge, requeue
from sqlaqueue.admin.failures import failures
from sqlaqueue.admin.listing import job, jobs
from sqlaqueue.admin.stats import stats
from sqlaqueue.admin.which import count
from sqlaqueue.admin.whole import consumers, pause, paused, reconcile, rescue, resume
from sqlaqueue.consumer.sessions.session_factory import check_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

P = ParamSpec("P")
T = TypeVar("T")


def _twin(
    operation: Callable[Concatenate[Session, P], T],
) -> Callable[Concatenate[AsyncSession, P], Awaitable[T]]:
    async def run(session: AsyncSession, /, *args: P.args, **kwargs: P.kwargs) -> T:
        check_session(session, run.__name__, is_async=True)
        return await session.run_sync(operation, *args, **kwargs)

    functools.update_wrapper(run, operation)
    run.__name__ = run.__qualname__ = f"async_{operation.__name__}"
    return run


async_cancel = _twin(cancel)
async_consumers = _twin(consumers)
async_count = _twin(count)
async_failures = _twin(failures)
async_job = _twin(job)
async_jobs = _twin(jobs)
async_pause = _twin(pause)
async_paused = _twin(paused)
async_purge = _twin(purge)
async_reconcile = _twin(reconcile)
async_requeue = _twin(requeue)
async_rescue = _twin(rescue)
async_resume = _twin(resume)
async_stats = _twin(stats)
