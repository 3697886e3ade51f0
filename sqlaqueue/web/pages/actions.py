"""The actions: each checks the right, does it, writes a line of the audit, and redirects to what it has changed."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session
from starlette.responses import Response

from sqlaqueue import admin
from sqlaqueue.exc import SqlaqueueError, StatementError
from sqlaqueue.web.context import Context
from sqlaqueue.web.data.bulk import BULK_ACTIONS, ByFilter, ByKeys, Done, Selection, act
from sqlaqueue.web.data.job_pages import ListRequest
from sqlaqueue.web.errors import BadRequest, NotFound, ServiceUnavailable
from sqlaqueue.web.pages.confirm import back_url, bulk_action
from sqlaqueue.web.pages.edit import save_edit
from sqlaqueue.web.pages.list_link import list_fields, list_in, list_url
from sqlaqueue.web.pages.selection import (
    bad_parameters,
    columns_in,
    fields_of_selection,
    in_words,
    is_nothing,
    selection_of,
)

_CHANGED = {"requeue": "requeued", "cancel": "cancelled", "purge": "purged"}
"""The notice about changed jobs, by action."""


async def act_on_queue(context: Context) -> Response:
    """Carry out the action in the path on jobs of a queue, or on the queue."""
    action = context.request.path_params["action"]
    if action in BULK_ACTIONS:
        return await _act_on_jobs(context)
    if action == "edit":
        return await save_edit(context)
    if action == "rescue":
        return await _rescue(context)
    if action in {"pause", "resume"}:
        return await _pause(context, action)
    raise NotFound("There is no such action.", "Go back to the page that offers it.")


async def _act_on_jobs(context: Context) -> Response:
    action, queue = bulk_action(context.request.path_params["action"]), context.queue
    context.require(action, queue)
    form = await context.form()
    with bad_parameters():
        came_from = list_in(context, form.fields)
        if is_nothing(form.fields):
            return context.redirect(list_url(context, came_from), ("none_selected", 0))
        chosen = selection_of(columns_in(context), action, form.fields)
        if isinstance(chosen, ByFilter) and chosen.until is None:
            raise BadRequest("until: it is missing.", "An action on all matching jobs begins with its preview.")
        try:
            with context.failures_audited(action, queue, **in_words(chosen)):
                done = await context.database.write(act, action, chosen)
        except SqlaqueueError as error:
            raise BadRequest(f"{error}") from error
    counts = {"asked": done.asked, "twins": done.twins, "left": done.left, "missing": done.missing}
    facts = {name: number for name, number in counts.items() if number}
    what = {"keys": done.keys, **in_words(chosen)}
    context.audit(action, queue, count=done.changed, **what, **facts, error=done.problem)
    if done.problem:
        text = f"{done.changed:,} jobs were changed. Then it was broken off: {done.problem}"
        raise ServiceUnavailable(text, "What was changed stays so. Look at the list, and repeat the action.")
    counts |= {_CHANGED[action]: done.changed, "unchanged": done.unchanged}
    notices = [(code, counts[code]) for code in (_CHANGED[action], *facts, "unchanged") if counts[code]]
    return context.redirect(_next(context, action, chosen, done, came_from), *(notices or [("unchanged", 0)]))


def _next(context: Context, action: str, chosen: Selection, done: Done, came_from: ListRequest | None) -> str:
    queue = context.queue
    if isinstance(chosen, ByFilter) and done.after is not None:
        fields = [("action", action), *fields_of_selection(chosen, **{"from": done.after}), *list_fields(came_from)]
        return context.url("confirm", queue=queue, query=fields)
    keys = chosen.keys if isinstance(chosen, ByKeys) and came_from is None else ()
    if len(keys) == 1 and not (action == "purge" and done.changed):
        return context.url("job", queue=queue, query={"key": keys[0]})
    return back_url(context, chosen, came_from)


async def _rescue(context: Context) -> Response:
    """Rescue jobs whose lease has expired, as a Consumer of the queue would."""
    queue = context.queue
    context.require("requeue", queue)
    with context.failures_audited("rescue", queue):
        rescued = await context.database.write(admin.rescue, queue.model)
    context.audit("rescue", queue, count=rescued)
    # The page of a job has the button as well.
    key = context.request.query_params.get("key")
    back = context.url("queue", queue=queue) if key is None else context.url("job", queue=queue, query={"key": key})
    return context.redirect(back, ("rescued", rescued))


async def _pause(context: Context, action: str) -> Response:
    queue = context.queue
    context.require("pause", queue)
    operation = admin.pause if action == "pause" else admin.resume
    with context.failures_audited(action, queue):
        await context.database.write(operation, queue.model)
    context.audit(action, queue)
    return context.redirect(context.url("queue", queue=queue), (f"{action}d", 1))


_OF_SCHEDULES: dict[str, tuple[Any, str]] = {
    "run": (admin.run_schedule, "schedule_run"),
    "pause": (admin.pause_schedule, "schedule_paused"),
    "resume": (admin.resume_schedule, "schedule_resumed"),
}


async def act_on_schedule(context: Context) -> Response:
    """Run, pause or resume a schedule."""
    action = context.request.path_params["action"]
    if action not in _OF_SCHEDULES:
        raise NotFound("There is no such action.", "Go back to the list of schedules.")
    operation, notice = _OF_SCHEDULES[action]
    form = await context.form()
    # Not in the path: a name may contain a slash.
    name = form.get("schedule")
    queue = next((each for each in context.queues if each.name == form.get("queue")), None)
    if queue is None:
        raise NotFound("There is no such queue, or you have no access to it.", "Choose a schedule from the list.")
    context.require("schedule", queue)
    try:
        with context.failures_audited(f"{action}_schedule", queue, schedule=name):
            await context.database.write(_change_schedule, operation, queue, name)
    except StatementError:
        text = f"{queue.name} has no such schedule."
        raise NotFound(text, "It may have been removed; look at the list again.") from None
    context.audit(f"{action}_schedule", queue, schedule=name)
    return context.redirect(context.url("schedules"), (notice, 1))


def _change_schedule(session: Session, operation: Any, queue: Any, name: str) -> None:
    # One table has the schedules of several queues, and the right is that for one queue.
    if admin.schedule(session, queue.model, name).queue != queue.name:
        session.rollback()
        msg = f"the schedule {name!r} is of another queue"
        raise StatementError(msg)
    operation(session, queue.model, name)
