"""For operators: show what queues hold, and change their jobs and schedules.

::

    with Session(engine) as session:
        admin = QueueAdmin(session, Email)
        print(admin.stats().due)
        for group in admin.failures():
            print(group.kind, group.count)

:class:`QueueAdmin` and :class:`ScheduleAdmin` take a Session; :class:`AsyncQueueAdmin` and :class:`AsyncScheduleAdmin`
take an AsyncSession. Methods that only read leave the transaction open; those that change jobs work in batches, and
commit each. :func:`doctor` looks for what is wrong with queues and their server.
"""

from sqlaqueue.admin.changes import Cancelled, Requeued
from sqlaqueue.admin.doctor.doctor import doctor
from sqlaqueue.admin.doctor.examination import Finding, Thresholds
from sqlaqueue.admin.explain_job import Explanation
from sqlaqueue.admin.job_reasons import Reason
from sqlaqueue.admin.jobs import Attempt, AttemptOutcome, FailureGroup, JobFilter, JobInfo
from sqlaqueue.admin.queue_admin import AsyncQueueAdmin, AsyncScheduleAdmin, QueueAdmin, ScheduleAdmin
from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.admin.state import Depth, KeyAtLimit, Pause, Stats

__all__ = [
    "AsyncQueueAdmin",
    "AsyncScheduleAdmin",
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
    "Pause",
    "QueueAdmin",
    "Reason",
    "Requeued",
    "ScheduleAdmin",
    "ScheduleInfo",
    "Stats",
    "Thresholds",
    "doctor",
]
