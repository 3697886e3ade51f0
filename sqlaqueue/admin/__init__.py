"""Functions on a Session for operators: show what a queue holds, and change its jobs.

::

    with Session(engine) as session:
        print(stats(session, Email).due)
        for group in failures(session, Email):
            print(group.kind, group.count)

Functions that only read leave the transaction open; those that change jobs work in batches, and commit each. Each has
an async version for an AsyncSession, such as ``await async_stats(session, Email)``.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session

from sqlaqueue.admin.changes import (
    Cancelled,
    Requeued,
    cancel,
    cancel_some,
    execute,
    in_batches,
    pause,
    preview,
    purge,
    purge_some,
    reconcile,
    requeue,
    requeue_some,
    rescue,
    resume,
)
from sqlaqueue.admin.doctor.doctor import doctor
from sqlaqueue.admin.doctor.examination import Finding, Thresholds
from sqlaqueue.admin.explain_job import Explanation, explain_job
from sqlaqueue.admin.job_reasons import Reason
from sqlaqueue.admin.jobs import (
    Attempt,
    AttemptOutcome,
    FailureGroup,
    JobFilter,
    JobInfo,
    attempts,
    count,
    failures,
    job,
    jobs,
)
from sqlaqueue.admin.schedules import (
    ScheduleInfo,
    add_schedule,
    edit_schedule,
    pause_schedule,
    remove_schedule,
    reset_schedule,
    resume_schedule,
    run_schedule,
    schedule,
    schedules,
)
from sqlaqueue.admin.state import Depth, KeyAtLimit, Stats, consumers, depth, paused, stats
from sqlaqueue.session_types import check_session

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

__all__ = [
    "Attempt",
    "AttemptOutcome",
    "Cancelled",
    "Depth",
    "Explanation",
    "FailureGroup",
    "Finding",
    "JobFilter",
    "JobInfo",
    "KeyAtLimit",
    "Reason",
    "Requeued",
    "ScheduleInfo",
    "Stats",
    "Thresholds",
    "add_schedule",
    "async_add_schedule",
    "async_attempts",
    "async_cancel",
    "async_consumers",
    "async_count",
    "async_depth",
    "async_doctor",
    "async_edit_schedule",
    "async_explain_job",
    "async_failures",
    "async_job",
    "async_jobs",
    "async_pause",
    "async_pause_schedule",
    "async_paused",
    "async_purge",
    "async_reconcile",
    "async_remove_schedule",
    "async_requeue",
    "async_rescue",
    "async_reset_schedule",
    "async_resume",
    "async_resume_schedule",
    "async_run_schedule",
    "async_schedule",
    "async_schedules",
    "async_stats",
    "attempts",
    "cancel",
    "cancel_some",
    "consumers",
    "count",
    "depth",
    "doctor",
    "edit_schedule",
    "execute",
    "explain_job",
    "failures",
    "in_batches",
    "job",
    "jobs",
    "pause",
    "pause_schedule",
    "paused",
    "preview",
    "purge",
    "purge_some",
    "reconcile",
    "remove_schedule",
    "requeue",
    "requeue_some",
    "rescue",
    "reset_schedule",
    "resume",
    "resume_schedule",
    "run_schedule",
    "schedule",
    "schedules",
    "stats",
]

P = ParamSpec("P")
T = TypeVar("T")


def _async_version(
    operation: Callable[Concatenate[Session, P], T],
) -> Callable[Concatenate[AsyncSession, P], Awaitable[T]]:
    """Return the function for an AsyncSession, which runs the sync one by ``AsyncSession.run_sync()``."""

    async def run(session: AsyncSession, /, *args: P.args, **kwargs: P.kwargs) -> T:
        check_session(session, run.__name__, is_async=True)
        return await session.run_sync(operation, *args, **kwargs)

    functools.update_wrapper(run, operation)
    run.__name__ = run.__qualname__ = f"async_{operation.__name__}"
    return run


async_add_schedule = _async_version(add_schedule)
async_attempts = _async_version(attempts)
async_cancel = _async_version(cancel)
async_consumers = _async_version(consumers)
async_count = _async_version(count)
async_depth = _async_version(depth)
async_doctor = _async_version(doctor)
async_edit_schedule = _async_version(edit_schedule)
async_explain_job = _async_version(explain_job)
async_failures = _async_version(failures)
async_job = _async_version(job)
async_jobs = _async_version(jobs)
async_pause = _async_version(pause)
async_pause_schedule = _async_version(pause_schedule)
async_paused = _async_version(paused)
async_purge = _async_version(purge)
async_reconcile = _async_version(reconcile)
async_remove_schedule = _async_version(remove_schedule)
async_requeue = _async_version(requeue)
async_rescue = _async_version(rescue)
async_reset_schedule = _async_version(reset_schedule)
async_resume = _async_version(resume)
async_resume_schedule = _async_version(resume_schedule)
async_run_schedule = _async_version(run_schedule)
async_schedule = _async_version(schedule)
async_schedules = _async_version(schedules)
async_stats = _async_version(stats)
