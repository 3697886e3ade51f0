"""The schedules of all queues that the user sees."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from sqlaqueue.admin.schedules import ScheduleInfo
from sqlaqueue.web.attention import remember_schedules
from sqlaqueue.web.context import Context
from sqlaqueue.web.data.parts import attempt_part
from sqlaqueue.web.data.schedules import one_of_each_table, read_schedules
from sqlaqueue.web.rendering.formats import plain, short

_NEXT_TICKS = 3


async def schedules(context: Context) -> Response:
    """Show when schedules tick, and which are late, paused or wrong."""
    found, problems = await schedules_of(context)
    return context.render(
        "schedules.html",
        schedules=sorted(found, key=lambda each: (each.name, each.queue)),
        problems=list(dict.fromkeys(problems)),
        queue_of=context.settings.queues,
        next_ticks=lambda schedule: schedule.next_ticks(_NEXT_TICKS),
        values_of=lambda schedule: _values(context, schedule),
        error_of=lambda schedule: _error(context, schedule),
    )


async def schedules_of(context: Context) -> tuple[list[ScheduleInfo], list[str]]:
    """Return the schedules of the queues that the user sees, and what cannot be read."""
    found: list[ScheduleInfo] = []
    problems: list[str] = []
    names = [queue.name for queue in context.queues]
    for spec in one_of_each_table([queue.spec for queue in context.queues]):
        part = await context.database.read(attempt_part, read_schedules, spec, names)
        found += part.value or ()
        problems += [part.problem] if part.problem else []
    wrong = sum(each.late is not None or each.last_error is not None for each in found)
    remember_schedules(context.state, context.queues, wrong)
    return found, problems


def _values(context: Context, schedule: ScheduleInfo) -> Mapping[str, str]:
    """Return the values that a schedule gives its jobs, without those of redacted columns."""
    spec = context.settings.queues[schedule.queue].spec
    texts: dict[str, str] = {}
    for name, value in schedule.values.items():
        is_redacted = context.settings.is_attribute_redacted(spec, name)
        texts[name] = "redacted" if is_redacted else short(plain(value), 60)
    return texts


def _error(context: Context, schedule: ScheduleInfo) -> str:
    """Return the error of a schedule, which may repeat a value of a column."""
    if schedule.last_error is None:
        return ""
    is_redacted = context.settings.is_redacted(context.settings.queues[schedule.queue].spec, "last_error")
    return "redacted" if is_redacted else short(schedule.last_error, 500)
