"""What an operator asks of a queue and does to it: plain functions on a Session, behind the command line.

::

    with Session(engine) as session:
        print(stats(session, Email).due)
        for group in failures(session, Email):
            print(group.kind, group.count)

Those that only look leave the transaction open; those that change jobs do so in batches, and commit each. Each has a
twin for an AsyncSession, such as ``await async_stats(session, Email)``.
"""

from sqlaqueue.admin.cancelling import Cancelled, cancel
from sqlaqueue.admin.changes import cancel_some, execute, in_batches, preview, purge, purge_some, requeue, requeue_some
from sqlaqueue.admin.failures import FailureGroup, failures
from sqlaqueue.admin.listing import JobInfo, job, jobs
from sqlaqueue.admin.stats import Stats, stats
from sqlaqueue.admin.twins import (
    async_cancel,
    async_consumers,
    async_count,
    async_failures,
    async_job,
    async_jobs,
    async_pause,
    async_paused,
    async_purge,
    async_reconcile,
    async_requeue,
    async_rescue,
    async_resume,
    async_stats,
)
from sqlaqueue.admin.which import JobFilter, count
from sqlaqueue.admin.whole import consumers, pause, paused, reconcile, rescue, resume

__all__ = [
    "Cancelled",
    "FailureGroup",
    "JobFilter",
    "JobInfo",
    "Stats",
    "async_cancel",
    "async_consumers",
    "async_count",
    "async_failures",
    "async_job",
    "async_jobs",
    "async_pause",
    "async_paused",
    "async_purge",
    "async_reconcile",
    "async_requeue",
    "async_rescue",
    "async_resume",
    "async_stats",
    "cancel",
    "cancel_some",
    "consumers",
    "count",
    "execute",
    "failures",
    "in_batches",
    "job",
    "jobs",
    "pause",
    "paused",
    "preview",
    "purge",
    "purge_some",
    "reconcile",
    "requeue",
    "requeue_some",
    "rescue",
    "resume",
    "stats",
]
