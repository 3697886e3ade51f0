"""The actions: each checks the right, does it, writes a line of the audit, and redirects to what it has changed."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

from sqlalchemy.orm import Session
from starlette.responses import Response

from sqlaqueue.admin import changes, schedules
from sqlaqueue.admin.state import pauses
from sqlaqueue.exc import SqlaqueueError, StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.side_tables import MOST_OF_AUTHOR, MOST_OF_REASON
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web import links
from sqlaqueue.web.context import NOT_STORED, ONCE, PageContext, forget_pauses
from sqlaqueue.web.data import queues as queue_data
from sqlaqueue.web.data.bulk import (
    BULK_ACTIONS,
    SPREADS,
    BulkAction,
    ByFilter,
    ByKeys,
    Done,
    NewValues,
    PreviewedJob,
    Selection,
    act,
    can_spread,
    changeable,
    new_values,
    preview,
)
from sqlaqueue.web.data.edit import EditForm, read_copy, read_form, save, save_copy
from sqlaqueue.web.data.job_columns import JobColumns
from sqlaqueue.web.data.job_pages import Count, ListRequest, read_rows
from sqlaqueue.web.data.job_windows import JobRow
from sqlaqueue.web.data.reader import ParameterError
from sqlaqueue.web.data.records import Record, read_record, read_records
from sqlaqueue.web.data.undo import Changes, Undone, look, roles_of, undo, why_not
from sqlaqueue.web.errors import BadRequest, Forbidden, NotFound, ServiceUnavailable
from sqlaqueue.web.queues import worker_of
from sqlaqueue.web.security import FormData
from sqlaqueue.web.settings import Action, Queue

LABELS: dict[BulkAction, str] = {"requeue": "Requeue", "cancel": "Cancel", "change": "Change", "purge": "Delete"}

RIGHTS: dict[BulkAction, Action] = {"requeue": "requeue", "cancel": "cancel", "change": "edit", "purge": "purge"}
"""The right to an action."""

_TIMEOUT = 10.0
"""Seconds for a statement of a preview: the user has asked for it, and it is not repeated."""


async def confirm(context: PageContext) -> Response:
    action = bulk_action(context.request.query_params.get("action", ""))
    return await _preview_page(context, action, context.request.query_params.multi_items())


async def _preview_page(
    context: PageContext, action: BulkAction, pairs: links.Pairs, errors: Mapping[str, str] | None = None
) -> Response:
    """Return the page that asks before an action; with what is wrong with the values that were typed there."""
    queue = context.queue
    context.require(RIGHTS[action], queue)
    with links.bad_parameters():
        came_from, place = links.list_in(context, pairs), links.place_in(context, pairs)
        if links.is_nothing(pairs):
            return context.redirect(links.list_url(context, came_from), ("none_selected", 0))
        chosen = links.selection_of(links.columns_in(context), action, pairs)
        names = None if came_from is None else came_from.columns
        found = await context.database.read(preview, action, chosen, names, statement_timeout=_TIMEOUT)
    changed = found.changed
    until = most = None
    if isinstance(chosen, ByFilter):
        until = (chosen.until or found.now).isoformat()
        most = str(changed.number) if changed is not None and changed.is_complete else None
    can = changed is not None and (changed.number > 0 or not changed.is_complete)
    return context.render(
        "confirm.html",
        queue=queue,
        action=action,
        label=LABELS[action],
        preview=found,
        is_filter=isinstance(chosen, ByFilter),
        conditions=chosen.wanted.parameters() if isinstance(chosen, ByFilter) else (),
        changed="an unknown number of" if changed is None else count_text(changed),
        is_one=changed == Count(1, is_complete=True),
        can=can,
        spreads=SPREADS if action == "requeue" and can and can_spread(chosen.columns) else {},
        new_fields=changeable(links.columns_in(context)) if action == "change" else (),
        typed={name.removeprefix(_VALUE): text for name, text in pairs if name.startswith(_VALUE)},
        errors=errors or {},
        status=422 if errors else 200,
        count_text=count_text,
        fields=[
            *links.fields_of_selection(chosen, until=until, most=most),
            *(links.list_fields(came_from) if place is None else place.fields()),
        ],
        back=_page_of(context, chosen, place) or back_url(context, chosen, came_from),
    )


def bulk_action(name: str) -> BulkAction:
    if name not in BULK_ACTIONS:
        raise BadRequest(f"action: use one of {', '.join(BULK_ACTIONS)}.")
    return BULK_ACTIONS[BULK_ACTIONS.index(name)]


def _page_of(context: PageContext, chosen: Selection, place: links.Place | None) -> str | None:
    """Return the page of the job on which an action was chosen, if it came from a list."""
    if place is None or not isinstance(chosen, ByKeys) or len(chosen.keys) != 1:
        return None
    return links.job_url(context, chosen.keys[0], place)


def back_url(context: PageContext, chosen: object, came_from: ListRequest | None) -> str:
    if came_from is None and isinstance(chosen, ByFilter):
        came_from = ListRequest(chosen.wanted)
    return links.list_url(context, came_from)


def count_text(count: Count) -> str:
    """Write a number of jobs that may not have been counted to the end."""
    return f"{count.number:,}" + ("" if count.is_complete else "+")


_MISSING = ("There is no such job any more.", "It may have been deleted; look at the list again.")
_VALUE, _NULL, _WAS_NULL = "v.", "null.", "was_null."
"""The beginnings of the names of fields: the text, whether it is NULL, and whether it was when the form was shown."""

_STATUS = {"wrong": 422, "changed": 409, "refused": 409}


async def edit(context: PageContext) -> Response:
    context.require("edit", context.queue)
    key = links.key_in(context, context.request.query_params.get("key"))
    with links.bad_parameters():
        form = await context.database.read(read_form, links.columns_in(context), key)
    if form is None:
        raise NotFound(*_MISSING)
    return _page(context, key, form)


async def save_edit(context: PageContext) -> Response:
    queue = context.queue
    context.require("edit", queue)
    data = await context.form()
    key = links.key_in(context, data.get("key") if data.all("key") else None)
    requeues = data.get("then") == "requeue"
    if requeues:
        context.require("requeue", queue)
    columns = links.columns_in(context)
    with links.bad_parameters(), context.failures_audited("edit", queue, keys=[key], then=data.get("then")):
        write = functools.partial(save, requeue=requeues)
        edited = await context.database.write(write, columns, key, data.get("version"), _given(data, columns))
    if edited.outcome == "missing":
        raise NotFound(*_MISSING)
    if edited.outcome in _STATUS and edited.form is not None:
        return _page(context, key, edited.form, status=_STATUS[edited.outcome], is_changed=edited.outcome == "changed")
    job = context.url("job", queue=queue, query={"key": key})
    if edited.outcome == "unchanged":
        return context.redirect(job, ("unchanged", 1))
    facts: dict[str, Any] = {"columns": list(edited.columns), "then": data.get("then")}
    done = await context.record("edit", queue, count=1, keys=[key], **facts)
    notices = [("edited", 1)] if edited.columns else []
    return context.redirect(job, *notices, *([("requeued", 1)] if edited.outcome == "requeued" else []), *done)


async def enqueue(context: PageContext) -> Response:
    context.require("enqueue", context.queue)
    key = links.key_in(context, context.request.query_params.get("key"))
    with links.bad_parameters():
        form = await context.database.read(read_copy, links.columns_in(context), key)
    if form is None:
        raise NotFound(*_MISSING)
    return _page(context, key, form, is_copy=True)


async def save_enqueued(context: PageContext) -> Response:
    context.require("enqueue", context.queue)
    data = await context.form()
    return await context.once(data, functools.partial(_enqueue, context, data))


async def _enqueue(context: PageContext, data: FormData) -> Response:
    queue = context.queue
    key = links.key_in(context, data.get("key") if data.all("key") else None)
    columns = links.columns_in(context)
    with links.bad_parameters(), context.failures_audited("enqueue", queue, like=key):
        edited = await context.database.write(save_copy, columns, key, _given(data, columns))
    if edited.outcome == "missing":
        raise NotFound(*_MISSING)
    if edited.form is not None:
        return _page(context, key, edited.form, status=_STATUS[edited.outcome], is_copy=True)
    made = await context.record("enqueue", queue, count=1, keys=[edited.key], like=key)
    return context.redirect(context.url("job", queue=queue, query={"key": edited.key}), ("enqueued", 1), *made)


def _given(data: FormData, columns: JobColumns) -> dict[str, str | None]:
    nulls = {name.removeprefix(_NULL) for name, _ in data.fields if name.startswith(_NULL)}
    were_null = {name.removeprefix(_WAS_NULL) for name, _ in data.fields if name.startswith(_WAS_NULL)}
    given: dict[str, str | None] = {}
    for field, text in data.fields:
        if not field.startswith(_VALUE):
            continue
        name = field.removeprefix(_VALUE)
        if name in given:
            raise ParameterError(field[:100], "it is given twice")
        kind = columns[name].kind if name in columns else "text"
        # Only a text may be empty. What was typed into a field that was NULL counts, though it is still ticked.
        is_null = (name in nulls and not (text and name in were_null)) if kind == "text" else text.strip() == ""
        given[name] = None if is_null else text
    return given


def _page(
    context: PageContext,
    key: str,
    form: EditForm,
    *,
    status: int = 200,
    is_changed: bool = False,
    is_copy: bool = False,
) -> Response:
    return context.render(
        "edit.html",
        status=status,
        queue=context.queue,
        key=key,
        form=form,
        is_changed=is_changed,
        is_copy=is_copy,
        once=(ONCE, secrets.token_urlsafe(16)),
        field_id=lambda field: f"{_VALUE}{field.name}",
    )


_CHANGED = {"requeue": "requeued", "cancel": "cancelled", "change": "changed", "purge": "purged"}
"""The notice about changed jobs, by action."""


async def act_on_queue(context: PageContext) -> Response:
    action = context.request.path_params["action"]
    if action in BULK_ACTIONS:
        return await _act_on_jobs(context, bulk_action(action))
    if action == "edit":
        return await save_edit(context)
    if action == "enqueue":
        return await save_enqueued(context)
    if action == "rescue":
        return await _rescue(context)
    if action in {"pause", "resume"}:
        return await _pause(context, action)
    if action == "undo":
        return await _undo(context)
    raise NotFound("There is no such action.", "Go back to the page that offers it.")


async def _act_on_jobs(context: PageContext, action: BulkAction) -> Response:
    queue = context.queue
    context.require(RIGHTS[action], queue)
    form = await context.form()
    values: NewValues = {}
    facts_of_values: dict[str, Any] = {}
    if action == "change":
        typed = {name.removeprefix(_VALUE): text for name, text in form.fields if name.startswith(_VALUE)}
        with links.bad_parameters():
            values, errors = new_values(links.columns_in(context), typed)
        if not values and not errors:
            errors = {"": "Write at least one value."}
        if errors:
            return await _preview_page(context, action, form.fields, errors)
        facts_of_values = {"values": {each.name: typed[each.name].strip() for each in values}}
    with links.bad_parameters():
        came_from, place = links.list_in(context, form.fields), links.place_in(context, form.fields)
        if links.is_nothing(form.fields):
            return context.redirect(links.list_url(context, came_from), ("none_selected", 0))
        chosen = links.selection_of(links.columns_in(context), action, form.fields)
        if isinstance(chosen, ByFilter) and chosen.until is None:
            raise BadRequest("until: it is missing.", "An action on all matching jobs starts with its preview.")
        spread = _spread_in(form, action, chosen)
        what = {
            **links.in_words(chosen),
            **facts_of_values,
            **({} if spread is None else {"spread": form.get("spread")}),
        }
        try:
            with context.failures_audited(action, queue, **what):
                run = functools.partial(act, spread=spread, values=values)
                done = await context.database.write(run, action, chosen)
        except SqlaqueueError as error:
            raise BadRequest(f"{error}") from error
    counts = {"asked": done.asked, "duplicates": done.duplicates, "left": done.left, "missing": done.missing}
    facts = {name: number for name, number in counts.items() if number}
    what = {"keys": done.keys, **what}
    changed = Changes(roles_of(queue.spec), done.changes).as_json() if done.changes else None
    made = await context.record(action, queue, count=done.changed, changes=changed, **what, **facts, error=done.problem)
    if done.problem:
        text = f"{done.changed:,} jobs were changed. Then it was broken off: {done.problem}"
        raise ServiceUnavailable(text, "What was changed stays so. Look at the list, and repeat the action.")
    counts |= {_CHANGED[action]: done.changed, "unchanged": done.unchanged}
    notices = [(code, counts[code]) for code in (_CHANGED[action], *facts, "unchanged") if counts[code]]
    page = _page_of(context, chosen, place) if not (action == "purge" and done.changed) else None
    # If nothing was done, there is nothing to show.
    link = made if done.changed or done.asked else _of_failure(made)
    page = page or _next(context, action, chosen, done, came_from)
    return context.redirect(page, *(notices or [("unchanged", 0)]), *link)


def _of_failure(made: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the notice that what was done could not be stored, if so: for pages without a link to it."""
    return [NOT_STORED] if NOT_STORED in made else []


def _spread_in(form: FormData, action: BulkAction, chosen: Selection) -> timedelta | None:
    """Return over how long the jobs are to become due; None for at once."""
    name = form.get("spread")
    if not name:
        return None
    if name not in SPREADS:
        raise ParameterError("spread", f"use one of {', '.join(SPREADS)}")
    if action != "requeue":
        raise ParameterError("spread", "only a requeue is spread over some time")
    if not can_spread(chosen.columns):
        raise ParameterError("spread", "this queue has no time that could be set: it leaves out run_at, or redacts it")
    return SPREADS[name]


def _next(context: PageContext, action: str, chosen: Selection, done: Done, came_from: ListRequest | None) -> str:
    queue = context.queue
    if isinstance(chosen, ByFilter) and done.after is not None:
        fields = [
            ("action", action),
            *links.fields_of_selection(chosen, **{"from": done.after}),
            *links.list_fields(came_from),
        ]
        return context.url("confirm", queue=queue, query=fields)
    keys = chosen.keys if isinstance(chosen, ByKeys) and came_from is None else ()
    if len(keys) == 1 and not (action == "purge" and done.changed):
        return context.url("job", queue=queue, query={"key": keys[0]})
    return back_url(context, chosen, came_from)


async def _rescue(context: PageContext) -> Response:
    queue = context.queue
    context.require("requeue", queue)
    with context.failures_audited("rescue", queue):
        rescued = await context.database.write(changes.rescue, queue.model)
    made = await context.record("rescue", queue, count=rescued)
    # The page of a job has the button as well.
    key = context.request.query_params.get("key")
    back = context.url("queue", queue=queue) if key is None else context.url("job", queue=queue, query={"key": key})
    return context.redirect(back, ("rescued", rescued), *_of_failure(made))


async def confirm_pause(context: PageContext) -> Response:
    context.require("pause", context.queue)
    return context.render("confirm_pause.html", queue=context.queue, most=MOST_OF_REASON, reason="", wrong="")


async def _pause(context: PageContext, action: str) -> Response:
    queue = context.queue
    context.require("pause", queue)
    reason = ""
    if action == "pause" and context.request.headers.get("content-type"):
        reason = " ".join((await context.form()).get("reason").split())
    facts: dict[str, Any] = {"reason": reason} if reason else {}
    if len(reason) > MOST_OF_REASON or not reason.isprintable():
        wrong = f"Use at most {MOST_OF_REASON} characters, all of them printable."
        values = {"most": MOST_OF_REASON, "reason": reason, "wrong": wrong}
        return context.render("confirm_pause.html", status=422, queue=queue, **values)
    with context.failures_audited(action, queue, **facts):
        if action == "pause":
            author = "".join(each for each in context.user if each.isprintable())[:MOST_OF_AUTHOR]
            since = await context.database.write(_pause_queue, queue.model, reason, author)
        else:
            since = await context.database.write(changes.resume, queue.model)
    forget_pauses(context)
    changed = None if since is None else {"since": since.isoformat()}
    made = await context.record(action, queue, changes=changed, **facts)
    shown = made if changed else _of_failure(made)
    return context.redirect(context.url("queue", queue=queue), (f"{action}d", 1), *shown)


def _pause_queue(session: Session, model: Any, reason: str, author: str) -> datetime | None:
    """Pause a queue, and return the moment; None if it was paused already."""
    spec = spec_of(model)
    before = pauses(session, [spec])
    changes.pause(session, model, reason=reason, author=author)
    return None if before else pauses(session, [spec])[spec.name].since


_OF_WORKERS: dict[changes.ConsumerAction, str] = {"quiet": "Quiet", "resume": "Resume", "stop": "Stop"}


def _worker_action(name: str) -> changes.ConsumerAction:
    for each in get_args(changes.ConsumerAction):
        if each == name:
            found: changes.ConsumerAction = each
            return found
    raise NotFound("There is no such action.", "Go back to the list of Consumers.")


async def confirm_worker(context: PageContext) -> Response:
    given = context.request.query_params
    action = _worker_action(given.get("action", ""))
    worker, others = await worker_of(context, given.get("queue", ""), given.get("id", ""))
    claiming = [each for each in others if not (each.row.quiet_asked or each.row.stop_asked)]
    return context.render(
        "confirm_worker.html", action=action, label=_OF_WORKERS[action], worker=worker, others=claiming
    )


async def act_on_worker(context: PageContext) -> Response:
    action = _worker_action(context.request.path_params["action"])
    form = await context.form()
    worker, _ = await worker_of(context, form.get("queue"), form.get("id"))
    queue, facts = worker.queue, {"worker": worker.name, "id": worker.row.id}
    with context.failures_audited(f"{action}_worker", queue, **facts):
        await context.database.write(changes.ask_consumers, queue.model, action, [worker.row.id])
    made = await context.record(f"{action}_worker", queue, **facts)
    return context.redirect(context.url("workers"), (f"{action}_asked", 1), *_of_failure(made))


_OF_SCHEDULES: dict[str, tuple[Any, str]] = {
    "run": (schedules.run_schedule, "schedule_run"),
    "pause": (schedules.pause_schedule, "schedule_paused"),
    "resume": (schedules.resume_schedule, "schedule_resumed"),
    "reset": (schedules.reset_schedule, "schedule_reset"),
    "remove": (schedules.remove_schedule, "schedule_removed"),
}

_FIELDS_OF_SCHEDULES = (
    "cron",
    "every",
    "timezone",
    "values",
    "jitter",
    "catch_up",
    "misfire_grace",
    "skip_unfinished",
)


def may_edit_schedules(context: PageContext, queue: Queue) -> bool:
    """Return whether the user may add and edit schedules of a queue: they enqueue jobs with any values."""
    return context.may("schedule", queue) and context.may("enqueue", queue)


def _scheduled_queue(context: PageContext, name: str) -> Queue:
    queue = next((each for each in context.queues if each.name == name), None)
    if queue is None:
        raise NotFound("There is no such queue, or you have no access to it.", "Choose a schedule from the list.")
    context.require("schedule", queue)
    return queue


async def edit_schedule(context: PageContext) -> Response:
    given = context.request.query_params
    if "schedule" not in given:
        offered = [queue for queue in context.queues if may_edit_schedules(context, queue)]
        if not offered:
            raise Forbidden(
                "You may not add schedules.", "That needs the rights schedule and enqueue, by the access rule."
            )
        form = queue_data.ScheduleForm(name="", texts=queue_data.NEW_SCHEDULE)
        return _schedule_page(context, form, given.get("queue", ""))
    queue = _scheduled_queue(context, given.get("queue", ""))
    context.require("enqueue", queue)
    read = functools.partial(queue_data.read_schedule_form, is_hidden=_hides(context, queue))
    try:
        form = await context.database.read(read, queue.spec, given["schedule"])
    except StatementError:
        raise NotFound(f"{queue.name} has no such schedule.", "It may have been removed.") from None
    return _schedule_page(context, form, queue.name)


def _hides(context: PageContext, queue: Queue) -> queue_data.IsHidden:
    return functools.partial(context.settings.is_attribute_redacted, queue.spec)


def _schedule_page(context: PageContext, form: queue_data.ScheduleForm, queue: str, status: int = 200) -> Response:
    return context.render(
        "edit_schedule.html",
        status=status,
        form=form,
        chosen=queue,
        offered=[each for each in context.queues if may_edit_schedules(context, each)],
    )


async def _save_schedule(context: PageContext) -> Response:
    data = await context.form()
    queue = _scheduled_queue(context, data.get("queue"))
    context.require("enqueue", queue)
    name = data.get("schedule")
    texts = {each: data.get(each) for each in _FIELDS_OF_SCHEDULES}
    form = queue_data.ScheduleForm(name=name, texts=texts, version=data.get("version"), origin=data.get("origin"))
    if data.get("then") == "look":
        return _schedule_page(context, queue_data.look_at_schedule(form, datetime.now(UTC)), queue.name)
    facts: dict[str, Any] = {"schedule": name}
    action = "edit_schedule" if form.version else "add_schedule"
    save = functools.partial(queue_data.save_schedule, is_hidden=_hides(context, queue))
    try:
        with context.failures_audited(action, queue, **facts):
            outcome = await context.database.write(save, queue.spec, form)
    except StatementError:
        raise NotFound(f"{queue.name} has no such schedule.", "It may have been removed.") from None
    if not isinstance(outcome, str):
        return _schedule_page(context, outcome, queue.name, 422)
    made: list[tuple[str, int]] = []
    if outcome != "unchanged":
        made = await context.record(action, queue, **facts, cron=texts["cron"], every=texts["every"])
    return context.redirect(context.url("schedules"), (f"schedule_{outcome}", 1), *_of_failure(made))


async def act_on_schedule(context: PageContext) -> Response:
    action = context.request.path_params["action"]
    if action == "save":
        return await _save_schedule(context)
    if action not in _OF_SCHEDULES:
        raise NotFound("There is no such action.", "Go back to the list of schedules.")
    operation, notice = _OF_SCHEDULES[action]
    form = await context.form()
    # Not in the path: a name may contain a slash.
    name = form.get("schedule")
    queue = _scheduled_queue(context, form.get("queue"))
    try:
        with context.failures_audited(f"{action}_schedule", queue, schedule=name):
            await context.database.write(_change_schedule, operation, queue, name)
    except StatementError:
        text = f"{queue.name} has no such schedule."
        raise NotFound(text, "It may have been removed; look at the list again.") from None
    made = await context.record(f"{action}_schedule", queue, schedule=name)
    return context.redirect(context.url("schedules"), (notice, 1), *_of_failure(made))


def _change_schedule(session: Session, operation: Any, queue: Any, name: str) -> None:
    # One table has the schedules of several queues, and the right is that for one queue.
    if schedules.schedule(session, queue.model, name).queue != queue.name:
        session.rollback()
        raise StatementError(f"the schedule {name!r} is of another queue")
    operation(session, queue.model, name)


# -- what was done -----------------------------------------------------------------------------------------------------

_RIGHTS: dict[str, Action] = {"requeue": "requeue", "cancel": "cancel", "change": "edit", "pause": "pause"}
"""The right to undo an action: that to the action itself."""

_FINAL = {
    "purge": "Deleted jobs cannot be brought back.",
    "edit": "Edit the job again to change it back.",
    "enqueue": "Cancel the job that was enqueued.",
    "rescue": "Rescued jobs have no lease any more that could be given back.",
    "undo": "Carry the action out again.",
    "resume": "Pause the queue again.",
}
"""Why other actions cannot be undone."""

_SHOWN = 20


async def show_done(context: PageContext) -> Response:
    record = await _record_of(context, context.request.query_params.get("id", ""))
    found: Undone | None = None
    jobs: Sequence[JobRow] = ()
    is_still_paused = record.action == "pause" and await context.database.read(_is_of, context.queue.spec, record)
    if record.changes is not None and record.action != "pause":
        columns, changed = links.columns_in(context), Changes.of_json(record.changes)
        found = await context.database.read(look, columns, changed, statement_timeout=_TIMEOUT)
        keys = [each.key for each in changed.jobs[:_SHOWN]]
        shown = [each for each in columns.chosen(None) if each.kind != "state" and not each.is_key]
        jobs = await context.database.read(read_rows, columns, keys, shown)
    return context.render(
        "done.html",
        queue=context.queue,
        record=record,
        found=found,
        is_still_paused=is_still_paused,
        jobs=[PreviewedJob(job, "", is_changed=True) for job in jobs],
        right=_RIGHTS.get(record.action),
        why_not=_FINAL.get(record.action) or why_not(context.queue.spec),
    )


async def _record_of(context: PageContext, given: str) -> Record:
    queue, model = context.queue, context.settings.audit
    if not context.access.changes(queue.name):
        raise Forbidden(
            f"You may look at {queue.name}, but not at what other people have done there.",
            "Ask for the right to an action, which the access rule of the dashboard grants.",
        )
    number = int(given) if given.isascii() and given.isdigit() and len(given) <= 18 else 0  # noqa: PLR2004 - 64 bits
    if model is None:
        found = context.memory.get(number, queue.name)
    else:
        found = await context.database.read(read_record, model, number, queue.name)
    if found is None:
        advice = "It was deleted from the table of the audit."
        if model is None:
            advice = "Only the last actions of each process are remembered; Dashboard(audit=...) keeps them in a table."
        raise NotFound("This action is not known any more.", advice)
    return found


async def _undo(context: PageContext) -> Response:
    queue = context.queue
    data = await context.form()
    record = await _record_of(context, data.get("id"))
    right = _RIGHTS.get(record.action)
    if right is None or record.changes is None:
        raise BadRequest("This action cannot be undone.", _FINAL.get(record.action, ""))
    context.require(right, queue)
    if record.action == "pause":
        return await _undo_pause(context, record)
    columns, changed = links.columns_in(context), Changes.of_json(record.changes)
    facts: dict[str, Any] = {"of": record.action, "of_id": record.id}
    with context.failures_audited("undo", queue, **facts):
        found = await context.database.write(undo, columns, changed)
    counts = {"undone": len(found.jobs), "left_alone": len(found.left), "gone": len(found.gone)}
    counts["refused"] = len(found.refused)
    told: dict[str, Any] = {name: number for name, number in counts.items() if number and name != "undone"}
    made = await context.record("undo", queue, count=len(found.jobs), keys=found.jobs, **facts, **told)
    if found.jobs:
        made += await context.note_undone(queue, record.id)
    notices = [(name, number) for name, number in counts.items() if number or name == "undone"]
    return context.redirect(context.url("done", queue=queue, query={"id": record.id}), *notices, *_of_failure(made))


def _is_of(session: Session, spec: QueueSpec, record: Record) -> bool:
    """Return whether a queue is still paused since an action."""
    now = pauses(session, [spec]).get(spec.name)
    return now is not None and now.since.isoformat() == (record.changes or {}).get("since")


def _resume(session: Session, model: Any, record: Record) -> bool:
    is_still_paused = _is_of(session, spec_of(model), record)
    if is_still_paused:
        changes.resume(session, model)
    return is_still_paused


async def _undo_pause(context: PageContext, record: Record) -> Response:
    queue = context.queue
    facts: dict[str, Any] = {"of": record.action, "of_id": record.id}
    with context.failures_audited("undo", queue, **facts):
        is_undone = await context.database.write(_resume, queue.model, record)
    forget_pauses(context)
    made: list[tuple[str, int]] = []
    if is_undone:
        made = [*await context.record("undo", queue, **facts), *await context.note_undone(queue, record.id)]
    page = context.url("done", queue=queue, query={"id": record.id})
    return context.redirect(page, ("resumed", 1) if is_undone else ("resumed_since", 1), *_of_failure(made))


_PAGE = 50


async def show_audit(context: PageContext) -> Response:
    model, given = context.settings.audit, context.request.query_params.get("before")
    if given is not None and not (given.isascii() and given.isdigit() and len(given) <= 18):  # noqa: PLR2004 - 64 bits
        raise BadRequest("before: it is no number of an action.", "Start from the newest.")
    queues = {queue.name: queue for queue in context.queues if context.access.changes(queue.name)}
    if context.queues and not queues:
        raise Forbidden(
            "You may look at queues, but not at what other people have done there.",
            "Ask for the right to an action, which the access rule of the dashboard grants.",
        )
    records: Sequence[Record] = list[Record]()
    if model is not None and queues:
        before = None if given is None else int(given)
        records = await context.database.read(read_records, model, [*queues], before, _PAGE + 1)
    return context.render(
        "audit.html",
        is_kept=model is not None,
        records=records[:_PAGE],
        queue_of=queues,
        older=records[_PAGE - 1].id if len(records) > _PAGE else None,
        is_first=given is None,
    )
