"""Before an action: how many jobs it concerns, the first of them, and what happens to each state."""

from __future__ import annotations

from starlette.responses import Response

from sqlaqueue.web.context import Context
from sqlaqueue.web.data.bulk import BULK_ACTIONS, BulkAction, ByFilter, preview
from sqlaqueue.web.data.job_counts import Count
from sqlaqueue.web.data.job_pages import ListRequest
from sqlaqueue.web.errors import BadRequest
from sqlaqueue.web.pages.list_link import list_fields, list_in, list_url
from sqlaqueue.web.pages.selection import bad_parameters, columns_in, fields_of_selection, is_nothing, selection_of

LABELS: dict[BulkAction, str] = {"requeue": "Requeue", "cancel": "Cancel", "purge": "Delete"}

_TIMEOUT = 10.0
"""Seconds for a statement of a preview: the user has asked for it, and it is not repeated."""


async def confirm(context: Context) -> Response:
    """Show what an action would do, with the button that does it."""
    pairs = context.request.query_params.multi_items()
    action = bulk_action(context.request.query_params.get("action", ""))
    queue = context.queue
    context.require(action, queue)
    with bad_parameters():
        came_from = list_in(context, pairs)
        if is_nothing(pairs):
            return context.redirect(list_url(context, came_from), ("none_selected", 0))
        chosen = selection_of(columns_in(context), action, pairs)
        found = await context.database.read(preview, action, chosen, statement_timeout=_TIMEOUT)
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
        count_text=count_text,
        fields=[*fields_of_selection(chosen, until=until, most=most), *list_fields(came_from)],
        back=back_url(context, chosen, came_from),
    )


def bulk_action(name: str) -> BulkAction:
    """Return the action of this name.

    :raises BadRequest: if there is none.
    """
    if name not in BULK_ACTIONS:
        raise BadRequest(f"action: use one of {', '.join(BULK_ACTIONS)}.")
    return BULK_ACTIONS[BULK_ACTIONS.index(name)]


def back_url(context: Context, chosen: object, came_from: ListRequest | None) -> str:
    """Return the URL of the list from which jobs were chosen."""
    if came_from is None and isinstance(chosen, ByFilter):
        came_from = ListRequest(chosen.wanted)
    return list_url(context, came_from)


def count_text(count: Count) -> str:
    """Write a number of jobs that may not have been counted to the end."""
    return f"{count.number:,}" + ("" if count.is_complete else "+")
