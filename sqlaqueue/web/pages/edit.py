"""The form with the columns of a job that can be edited, and what becomes of it."""

from __future__ import annotations

from sqlalchemy.orm import Session
from starlette.responses import Response

from sqlaqueue.web.context import Context
from sqlaqueue.web.data.edit_fields import Field
from sqlaqueue.web.data.editing import Edited, EditForm, read_form, save
from sqlaqueue.web.data.job_columns import JobColumns
from sqlaqueue.web.data.parameters import ParameterError
from sqlaqueue.web.errors import NotFound
from sqlaqueue.web.pages.selection import bad_parameters, columns_in, key_in
from sqlaqueue.web.security.forms import FormData

_MISSING = ("There is no such job any more.", "It may have been deleted; look at the list again.")
_VALUE, _NULL, _WAS_NULL = "v.", "null.", "was_null."
"""The beginnings of the names of fields: the text, whether it is NULL, and whether it was when the form was shown."""

_STATUS = {"wrong": 422, "changed": 409, "refused": 409}


async def edit(context: Context) -> Response:
    """Show the form."""
    context.require("edit", context.queue)
    key = key_in(context, context.request.query_params.get("key"))
    with bad_parameters():
        form = await context.database.read(read_form, columns_in(context), key)
    if form is None:
        raise NotFound(*_MISSING)
    return _page(context, key, form)


async def save_edit(context: Context) -> Response:
    """Write what was typed, and redirect to the job; or show the form again with what is wrong."""
    queue = context.queue
    context.require("edit", queue)
    data = await context.form()
    key = key_in(context, data.get("key") if data.all("key") else None)
    requeues = data.get("then") == "requeue"
    if requeues:
        context.require("requeue", queue)
    columns = columns_in(context)
    with bad_parameters(), context.failures_audited("edit", queue, keys=[key], then=data.get("then")):
        edited = await context.database.write(_save, columns, key, data, requeues)
    if edited.outcome == "missing":
        raise NotFound(*_MISSING)
    if edited.outcome in _STATUS and edited.form is not None:
        return _page(context, key, edited.form, status=_STATUS[edited.outcome], is_changed=edited.outcome == "changed")
    job = context.url("job", queue=queue, query={"key": key})
    if edited.outcome == "unchanged":
        return context.redirect(job, ("unchanged", 1))
    context.audit("edit", queue, count=1, keys=[key], columns=list(edited.columns), then=data.get("then"))
    notices = [("edited", 1)] if edited.columns else []
    return context.redirect(job, *notices, *([("requeued", 1)] if edited.outcome == "requeued" else []))


def _save(session: Session, columns: JobColumns, key: str, data: FormData, requeues: bool) -> Edited:  # noqa: FBT001 - the function above names it
    return save(session, columns, key, data.get("version"), _given(data, columns), requeue=requeues)


def _given(data: FormData, columns: JobColumns) -> dict[str, str | None]:
    """Return what was typed by the names of the columns; None for NULL."""
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


def _page(context: Context, key: str, form: EditForm, *, status: int = 200, is_changed: bool = False) -> Response:
    return context.render(
        "edit.html", status=status, queue=context.queue, key=key, form=form, is_changed=is_changed, field_id=_field_id
    )


def _field_id(field: Field) -> str:
    return f"{_VALUE}{field.name}"
