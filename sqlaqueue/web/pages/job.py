"""The page of one job: what it is, what has happened to it, what holds it back, and what can be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from sqlaqueue.consumer.pace import RESCUE
from sqlaqueue.queue.options import FINISHED, STATES
from sqlaqueue.web.context import Context
from sqlaqueue.web.data.bulk import APPLIES_TO, BulkAction
from sqlaqueue.web.data.job_life import JobLife, events_of, read_life
from sqlaqueue.web.data.json_text import indented
from sqlaqueue.web.data.stored_job import ShownValue
from sqlaqueue.web.errors import NotFound
from sqlaqueue.web.pages.confirm import LABELS
from sqlaqueue.web.pages.job_list import size_text
from sqlaqueue.web.pages.selection import bad_parameters, columns_in, key_in

_LONG = 120
"""The number of characters from which a value has a block of its own."""


_IS_PROCESSING = "It is processing. Wait for its end, or cancel it first."
_IS_LOST = "Its lease has expired. It can be edited when it was rescued."


@dataclass(frozen=True)
class Button:
    """An action that a page offers."""

    action: str
    label: str
    why_not: str = ""
    """Why it cannot be carried out."""
    is_asked: bool = False
    """Whether the user is asked before."""


async def job(context: Context) -> Response:
    """Show one job."""
    key = key_in(context, context.request.query_params.get("key"))
    with bad_parameters():
        # To learn whether another transaction has locked the job, it is locked for a moment.
        life = await context.database.read(read_life, columns_in(context), key, read_only=False)
    if life is None:
        raise NotFound(
            f"There is no job {key[:200]} in {context.queue.name}.",
            "It was never enqueued, the transaction that inserts it is not committed, or it was deleted.",
        )
    return context.render(
        "job.html",
        queue=context.queue,
        life=life,
        events=events_of(life),
        buttons=_buttons(context, life),
        own=[each for each in _values(life) if each.column.role is None],
        of_queue=[each for each in _values(life) if each.column.role is not None],
        link=lambda value: _link(context, value),
        block=_block,
        size_text=size_text,
        rescue_seconds=round(RESCUE),
    )


def _values(life: JobLife) -> list[ShownValue]:
    return [] if life.row is None else list(life.row.values.values())


def _block(value: ShownValue) -> str | None:
    """Return a value that needs a block of its own; None for one that fits a line."""
    text = value.text
    if text is None or value.column.kind not in {"text", "bytes", "other"}:
        return None
    if value.column.kind == "other" and text[:1] in {"{", "["} and not value.size and _is_json(value):
        return indented(text)
    return text if len(text) > _LONG or "\n" in text else None


def _is_json(value: ShownValue) -> bool:
    return "JSON" in type(value.column.stored_type).__name__.upper()


def _link(context: Context, value: ShownValue) -> str | None:
    if value.text is None or value.size:
        return None
    typed: Any = int(value.text) if value.column.kind == "integer" else value.text
    return context.settings.link(context.queue.spec, str(value.column.column.key), typed)


def _buttons(context: Context, life: JobLife) -> list[Button]:
    """Return the actions that make sense for the state, with the reason where one that users look for is impossible."""
    queue, found = context.queue, []
    if context.may("edit", queue) and life.state in {*STATES}:
        why = {"processing": _IS_LOST if life.is_lost else _IS_PROCESSING}.get(life.state, "")
        label = "Edit and requeue…" if life.state in FINISHED else "Edit…"
        found.append(Button("edit", label, why))
    actions: tuple[BulkAction, ...] = ("requeue", "cancel", "purge")
    for action in actions:
        # A job without a row has failed, as far as its attempts tell.
        applies = life.state in APPLIES_TO[action] or (life.row is None and action == "requeue")
        if applies and context.may(action, queue):
            why = _why_not(action, life)
            # What a completed job does would be done twice.
            is_asked = action == "purge" or (action == "requeue" and life.state == "completed")
            label = LABELS[action] + ("…" if is_asked else "")
            found.append(Button(action, label, why, is_asked=is_asked))
    return found


def _why_not(action: BulkAction, life: JobLife) -> str:
    if life.row is None:
        return "Its row was deleted, so it cannot run again."
    unique = life.uniqueness.value
    if action == "requeue" and unique is not None and unique.twin is not None:
        return f"Its twin, job {unique.twin}, counts: only one of the two can be unfinished."
    return ""
