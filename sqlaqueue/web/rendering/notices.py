"""The texts that a page shows after an action; URLs name them by code, so that a link cannot show another text."""

from __future__ import annotations

from starlette.datastructures import QueryParams

_TEXTS = {
    "requeued": ("{} job is pending again.", "{} jobs are pending again."),
    "twins": ("{} job has a twin and was not requeued.", "{} jobs have a twin and were not requeued."),
    "left": ("{} job was left as it was; try again later.", "{} jobs were left as they were; try again later."),
    "rescued": ("{} job was rescued.", "{} jobs were rescued."),
    "cancelled": ("{} job was cancelled.", "{} jobs were cancelled."),
    "asked": ("{} processing job was asked to stop.", "{} processing jobs were asked to stop."),
    "missing": ("{} job had finished already.", "{} jobs had finished already."),
    "purged": ("{} job was deleted.", "{} jobs were deleted."),
    "unchanged": ("{} job was not changed.", "{} jobs were not changed."),
    "remaining": ("{} more job matches; repeat the action.", "{} more jobs match; repeat the action."),
    "none_selected": ("No job is selected.",) * 2,
    "edited": ("The job was changed.", "The jobs were changed."),
    "paused": ("The queue is paused: no job begins until it is resumed.",) * 2,
    "resumed": ("The queue is resumed: its jobs begin again.",) * 2,
    "schedule_run": ("The schedule will be run by the next process that fires schedules.",) * 2,
    "schedule_paused": ("The schedule is paused.",) * 2,
    "schedule_resumed": ("The schedule is resumed.",) * 2,
}
"""The singular and the plural of each."""

_MOST = 6


def notices_in(query: QueryParams) -> list[str]:
    """Return the notices that a URL names; what is malformed is left out."""
    found = []
    for each in query.getlist("notice")[:_MOST]:
        code, _, number = each.partition(":")
        if code in _TEXTS and number.isascii() and number.isdigit() and len(number) <= 18:  # noqa: PLR2004 - 64 bits
            singular, plural = _TEXTS[code]
            found.append((singular if int(number) == 1 else plural).format(f"{int(number):,}"))
    return found
