"""Schedules that are overdue, cannot be fired, or whose jobs would not run."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from sqlaqueue.admin.diagnosis.checks.shared import live_consumers
from sqlaqueue.admin.diagnosis.examination import Examination, target_of
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.admin.schedules import schedules as read_schedules
from sqlaqueue.postgresql.faults import missing_tables
from sqlaqueue.schedules.recurrence import ScheduleTables
from sqlaqueue.texts import duration_text


def check_schedules(examination: Examination) -> Iterator[Finding]:
    """Find schedules that nothing fires, that cannot be fired, and whose queue nothing serves."""
    for spec in examination.specs:
        tables = ScheduleTables.look_up(spec)
        if missing_tables(examination.connection, [tables.schedules, tables.ticks]):
            continue
        with examination.session() as session:
            stored = [each for each in read_schedules(session, spec.model) if each.queue == spec.name]
        active = [each for each in stored if each.paused_at is None or each.run_requested_at is not None]
        for each in active:
            yield from _of_schedule(each, target_of(spec))
        if active and not live_consumers(examination, spec):
            names = ", ".join(repr(each.name) for each in active)
            yield Finding(
                severity="notice",
                code="unserved_schedule",
                queue=spec.name,
                summary=f"No live Consumer serves the queue {spec.name}, for which there are schedules: {names}.",
                consequence="The jobs that they enqueue do not run until a Consumer is started.",
                fixes=(f"sqlaqueue worker {target_of(spec)}=MODULE:HANDLER",),
                facts={"schedules": [each.name for each in active]},
            )


def _of_schedule(schedule: ScheduleInfo, target: str) -> Iterator[Finding]:
    if schedule.last_error is not None:
        yield Finding(
            severity="critical",
            code="schedule_error",
            queue=schedule.queue,
            summary=f"The schedule {schedule.name!r} could not be fired: {schedule.last_error}.",
            consequence="It enqueues no jobs. Correct what the error names, and then let it be fired again.",
            fixes=(f"sqlaqueue schedules run {target} {quote(schedule.name)}",),
            facts={"schedule": schedule.name, "error": schedule.last_error},
        )
    elif schedule.late is not None:
        late = duration_text(schedule.late.total_seconds())
        yield Finding(
            severity="critical",
            code="late_schedule",
            queue=schedule.queue,
            summary=f"The schedule {schedule.name!r} has been overdue for {late}.",
            consequence=(
                "No process fires it, and its jobs are not enqueued. Start a Consumer with schedules=[...], or a "
                "Scheduler, that has imported its class."
            ),
            fixes=(f"sqlaqueue scheduler {target if schedule.factory is None else 'MODULE:SCHEDULES'}",),
            facts={"schedule": schedule.name, "late": schedule.late.total_seconds()},
        )
