"""Which jobs a request means, and the list from which they were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode

from sqlaqueue.web.data.bulk import MOST_AT_ONCE, MOST_KEYS, BulkAction, ByFilter, ByKeys, Selection, by_filter
from sqlaqueue.web.data.job_columns import JobColumns, columns_of
from sqlaqueue.web.data.job_filters import YEARS, JobsWanted, lists_of, parse_filter
from sqlaqueue.web.data.job_pages import ListRequest, parse_request
from sqlaqueue.web.data.reader import ParameterError
from sqlaqueue.web.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlaqueue.queue.spec import QueueSpec
    from sqlaqueue.web.context import PageContext
    from sqlaqueue.web.settings import Queue

Pairs = Sequence[tuple[str, str]]


def columns_in(context: PageContext) -> JobColumns:
    return columns_of(context.queue.spec, context.settings.is_redacted)


def columns_seen(context: PageContext, spec: QueueSpec) -> JobColumns | None:
    """Return the columns of a queue; None if the user does not see it, or the dashboard does not show it."""
    is_seen = any(queue.spec.table is spec.table for queue in context.queues)
    return columns_of(spec, context.settings.is_redacted) if is_seen else None


@contextmanager
def bad_parameters(advice: str = "Go back, and choose again.") -> Iterator[None]:
    try:
        yield
    except ParameterError as error:
        raise BadRequest(f"{error.parameter}: {error.problem}.", advice) from None


def key_in(context: PageContext, given: str | None) -> str:
    if given is None:
        raise BadRequest("key: it is missing.", f"Choose a job from the list of {context.queue.name}.")
    return given


def selection_of(columns: JobColumns, action: BulkAction, pairs: Pairs) -> Selection:
    keys = tuple(dict.fromkeys(value for name, value in pairs if name == "key"))
    is_filter = ("all", "1") in pairs
    if is_filter == bool(keys):
        problem = "choose single jobs or all matching jobs, not both" if keys else "choose at least one job"
        raise ParameterError("key", problem)
    if keys:
        if len(keys) > MOST_KEYS:
            raise ParameterError("key", f"choose at most {MOST_KEYS} jobs, or all matching jobs")
        return ByKeys(columns, keys)
    given = dict(pairs)
    until, after = given.get("until"), given.get("from")
    bounds = {"until": None if until is None else _moment(until), "after": after or None}
    return by_filter(parse_filter(columns, pairs), action, **bounds, most=_most(given.get("most")))


def fields_of_selection(chosen: Selection, **bounds: str | None) -> list[tuple[str, str]]:
    """Return the fields from which :func:`selection_of` makes this selection."""
    if isinstance(chosen, ByKeys):
        return [("key", key) for key in chosen.keys]
    given = {"until": None if chosen.until is None else chosen.until.isoformat(), "from": chosen.after, **bounds}
    return [("all", "1"), *chosen.wanted.parameters(), *((name, value) for name, value in given.items() if value)]


def is_nothing(pairs: Pairs) -> bool:
    """Return whether the fields of a form mean no job, as no box of a list was ticked."""
    return ("all", "1") not in pairs and not any(name == "key" for name, _ in pairs)


def in_words(chosen: Selection) -> dict[str, object]:
    if isinstance(chosen, ByFilter):
        return {"filter": filter_text(chosen.wanted)}
    return {"keys": list(chosen.keys)}


def filter_text(wanted: JobsWanted) -> str:
    # Quoted, so that a value cannot read as a further condition.
    return urlencode(wanted.parameters(), quote_via=quote, safe=" :@,/") or "all jobs"


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None or moment.year not in YEARS:
        raise ParameterError("until", "it is no moment with a time zone")
    return moment


def _most(text: str | None) -> int:
    if text is None:
        return MOST_AT_ONCE
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(MOST_AT_ONCE)):
        raise ParameterError("most", "it is no number of jobs")
    return int(text)


FIELD = "list"
"""The field that has the query of the list's URL."""

_LONGEST = 8000
"""Its number of characters. Servers limit the length of a URL, of which this is a part."""

_MOST = 200
"""Its number of parameters."""


def listed_url(context: PageContext, queue: Queue, listed: str) -> str:
    """Return the URL of a list of jobs, such as the due ones; that of their state if the queue cannot list them."""
    columns = columns_of(queue.spec, context.settings.is_redacted)
    state = listed if listed in lists_of(columns) else JobsWanted(columns).of(listed).state
    return context.url("jobs", queue=queue, query=[("state", str(state))])


def list_fields(request: ListRequest | None) -> list[tuple[str, str]]:
    """Return the field with which a form carries a list; none for a list whose query is too long."""
    query = "" if request is None else urlencode(request.with_place())
    return [(FIELD, query)] if query and len(query) <= _LONGEST else []


def list_in(context: PageContext, pairs: Sequence[tuple[str, str]]) -> ListRequest | None:
    """Return the list that a form carries. Its URL is made from what was parsed: it is never another page's."""
    given = [value for name, value in pairs if name == FIELD]
    if not given:
        return None
    if len(given) > 1:
        raise ParameterError(FIELD, "it is given twice")
    if len(given[0]) > _LONGEST:
        raise ParameterError(FIELD, f"use at most {_LONGEST} characters")
    try:
        query = parse_qsl(given[0], errors="strict", max_num_fields=_MOST)
    except ValueError:
        raise ParameterError(FIELD, "it is not the query of a list") from None
    return parse_request(columns_in(context), query)


AT = "at"
"""The field that has the place of a job in that list, as a cursor."""


@dataclass(frozen=True)
class Place:
    """A list, and the place of a job in it, so that its page leads to the jobs beside it."""

    request: ListRequest
    at: str

    def fields(self) -> list[tuple[str, str]]:
        return [(FIELD, urlencode(self.request.parameters())), (AT, self.at)]


def place_in(context: PageContext, pairs: Sequence[tuple[str, str]]) -> Place | None:
    at = [value for name, value in pairs if name == AT]
    if not at:
        return None
    if len(at) > 1:
        raise ParameterError(AT, "it is given twice")
    request = list_in(context, pairs) or parse_request(columns_in(context), ())
    return Place(replace(request, after=None, before=None), at[0])


def job_url(context: PageContext, key: str, place: Place | None = None) -> str:
    fields = [] if place is None else place.fields()
    if sum(len(value) for _, value in fields) > _LONGEST:
        fields = []
    return context.url("job", queue=context.queue, query=[("key", key), *fields])


def list_url(context: PageContext, request: ListRequest | None) -> str:
    return context.url("jobs", queue=context.queue, query=() if request is None else request.with_place())
