"""Functions on a Session for operators: show what a queue holds, and change its jobs.

::

    with Session(engine) as session:
        print(stats(session, Email).due)
        for group in failures(session, Email):
            print(group.kind, group.count)

Functions that only read leave the transaction open; those that change jobs work in batches, and commit each. Each has
an async version for an AsyncSession, such as ``await async_stats(session, Email)``.
"""

from sqlaqueue.admin.async_versions import (
    async_add_schedule,
    async_attempts,
    async_cancel,
    async_consumers,
    async_count,
    async_depth,
    async_doctor,
    async_edit_schedule,
    async_explain_job,
    async_failures,
    async_job,
    async_jobs,
    async_pause,
    async_pause_schedule,
    async_paused,
    async_purge,
    async_reconcile,
    async_remove_schedule,
    async_requeue,
    async_rescue,
    async_reset_schedule,
    async_resume,
    async_resume_schedule,
    async_run_schedule,
    async_schedule,
    async_schedules,
    async_stats,
)
from sqlaqueue.admin.attempts import Attempt, AttemptOutcome, attempts
from sqlaqueue.admin.bulk_changes import (
    cancel_some,
    execute,
    in_batches,
    preview,
    purge,
    purge_some,
)
from sqlaqueue.admin.cancellation import Cancelled, cancel
from sqlaqueue.admin.diagnosis.doctor import doctor
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.admin.diagnosis.thresholds import Thresholds
from sqlaqueue.admin.explanation.explain_job import explain_job
from sqlaqueue.admin.explanation.result import Explanation, Reason
from sqlaqueue.admin.failure_groups import FailureGroup, failures
from sqlaqueue.admin.job_filter import JobFilter, count
from sqlaqueue.admin.job_listing import JobInfo, job, jobs
from sqlaqueue.admin.keys_at_limit import KeyAtLimit
from sqlaqueue.admin.queue_control import consumers, pause, paused, reconcile, rescue, resume
from sqlaqueue.admin.queue_depth import Depth, depth
from sqlaqueue.admin.requeueing import Requeued, requeue, requeue_some
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
from sqlaqueue.admin.statistics import Stats, stats

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
