"""The list from which jobs were chosen: carried by the forms, so that the user comes back to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from sqlaqueue.web.data.job_columns import columns_of
from sqlaqueue.web.data.job_filters import JobsWanted, lists_of
from sqlaqueue.web.data.job_pages import ListRequest, parse_request
from sqlaqueue.web.data.parameters import ParameterError
from sqlaqueue.web.pages.selection import columns_in

if TYPE_CHECKING:
    from sqlaqueue.web.context import Context
    from sqlaqueue.web.settings import Queue

FIELD = "list"
"""The field that has the query of the list's URL."""

_LONGEST = 8000
"""Its number of characters. Servers limit the length of a URL, of which this is a part."""

_MOST = 200
"""Its number of parameters."""


def listed_url(context: Context, queue: Queue, listed: str) -> str:
    """Return the URL of a list of jobs, such as the due ones; that of their state if the queue cannot list them."""
    columns = columns_of(queue.spec, context.settings.is_redacted)
    state = listed if listed in lists_of(columns) else JobsWanted(columns).of(listed).state
    return context.url("jobs", queue=queue, query=[("state", str(state))])


def list_fields(request: ListRequest | None) -> list[tuple[str, str]]:
    """Return the field with which a form carries a list; none for a list whose query is too long."""
    query = "" if request is None else urlencode(request.with_place())
    return [(FIELD, query)] if query and len(query) <= _LONGEST else []


def list_in(context: Context, pairs: Sequence[tuple[str, str]]) -> ListRequest | None:
    """Return the list that the fields of a request carry; None if they carry none.

    Its URL is made from what was parsed, so that it is never that of another page.

    :raises ParameterError: if it is malformed.
    """
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


def list_url(context: Context, request: ListRequest | None) -> str:
    """Return the URL of a list of the queue in the path; by None, that of all of its jobs."""
    return context.url("jobs", queue=context.queue, query=() if request is None else request.with_place())
