"""The search: a line of text as the conditions of a filter, in the list of one queue or in all queues of the user.

A line has words with a space between them; one with spaces is put in quotes.

===========================  =======================================================================
``customer_id:5``            a column has a value; ``null`` and ``!null`` stand for none and for any
``total:>=10``               not less; ``<=``: not more; ``10..20``: both
``created_at:1h``            within the last hour; ``15min`` and ``7d`` likewise
``subject:Re*``              begins with a text; ``~order``: contains it
``payload.customer.id:5``    a value in JSON
``state:failed``             also ``error``, the kind of an error, and ``key``
``5``                        the key of a job, if keys are integers or UUIDs
``"no answer"``              other words are looked for in the texts of errors
===========================  =======================================================================
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.responses import Response

from sqlaqueue.consumer.core.errors import is_connection_lost
from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.web.context import PageContext, SharedResult, last_result, shared_result
from sqlaqueue.web.data.engines import stored_size, text_of
from sqlaqueue.web.data.failures import Failures, read_failures
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns, columns_of
from sqlaqueue.web.data.job_filters import (
    JSON,
    OPERATORS,
    filterable,
    is_json,
    lists_of,
    parameter_of,
    parse_filter,
    span_of,
)
from sqlaqueue.web.data.job_pages import JobPage, ListRequest, parse_request, read_page
from sqlaqueue.web.data.reader import ParameterError, QueueReader, problem_text
from sqlaqueue.web.database import Places
from sqlaqueue.web.errors import PageError
from sqlaqueue.web.rendering import Zone
from sqlaqueue.web.settings import Queue

Pairs = list[tuple[str, str]]

LINE = "q"
"""The parameter with the line."""

_LONGEST_LINE = 1000
_WORD = re.compile(r'(?:[^\s"]|"[^"]*(?:"|$))+')
_NAMED = re.compile(r'([^\s:"]+):(.+)', re.DOTALL)
_OF_JOBS = {"state": "state", "error": "error", "message": "message", "key": "job"}


@dataclass(frozen=True)
class Line:
    conditions: Pairs
    """The parameters of a filter."""
    words: str
    """The rest, which may be the key of a job or a part of an error."""


def parse_line(columns: JobColumns, line: str, zone: Zone) -> Line:
    """Return what a line means in a queue.

    :param zone: the zone of the times in it that name none.
    :raises ParameterError: if the queue has no such column that is shown, or a value is none of its column.
    """
    if len(line) > _LONGEST_LINE:
        raise ParameterError(LINE, f"use at most {_LONGEST_LINE} characters")
    conditions: Pairs = []
    words: list[str] = []
    for word in _WORD.findall(line):
        named = None if word.startswith('"') else _NAMED.fullmatch(word)
        if named is None:
            words.append(word.replace('"', ""))
        else:
            conditions += _of_name(columns, named[1], named[2], zone)
    return Line(conditions, " ".join(words).strip())


def _of_name(columns: JobColumns, name: str, value: str, zone: Zone) -> Pairs:
    if name in _OF_JOBS:
        return [(_OF_JOBS[name], _unquoted(value))]
    shown = filterable(columns)
    for column in shown:
        if name in {column.name, column.role}:
            return of_column(column, value, zone)
    for column in shown:
        if is_json(column) and name.startswith(f"{column.name}."):
            path = name.removeprefix(f"{column.name}.")
            return [(f"{parameter_of(column, JSON)}.{path}", _unquoted(value))]
    # The same for a redacted column as for none.
    raise ParameterError(LINE, f"no column {name[:100]!r} is shown; put words of an error in quotes")


def of_column(column: JobColumn, value: str, zone: Zone) -> Pairs:
    """Return the conditions on a column that a value with its signs means."""
    if value in {"null", "!null"} and column.column.nullable:
        return [(parameter_of(column, "null"), "yes" if value == "null" else "no")]
    if column.kind in {"other", "bytes"}:
        path = f"; write {column.name}.name:value for a value in it" if is_json(column) else ""
        raise ParameterError(LINE, f"{column.name} as a whole is not compared{path}")
    return [
        (parameter_of(column, operator), moment_in(column, _unquoted(text), zone))
        for operator, text in _signed(value, OPERATORS[column.kind])
    ]


def _signed(value: str, operators: Sequence[str]) -> list[tuple[str, str]]:
    """Return the operators that the signs of a value mean, each with its text; none for a value in quotes."""
    for sign, operator in ((">=", "min"), ("<=", "max"), ("~", "contains")):
        if value.startswith(sign) and operator in operators:
            return [(operator, value.removeprefix(sign))]
    if value.endswith("*") and "starts" in operators:
        return [("starts", value[:-1])]
    least, dots, most = value.partition("..")
    if dots and "min" in operators:
        return [(operator, text) for operator, text in (("min", least), ("max", most)) if text]
    return [("last" if "last" in operators and _is_span(value) else "", value)]


def _unquoted(value: str) -> str:
    return value.replace('"', "")


def _is_span(value: str) -> bool:
    try:
        span_of(value, LINE)
    except ParameterError:
        return False
    return True


def moment_in(column: JobColumn, text: str, zone: Zone) -> str:
    """Return the text of a value; that of a moment without a zone is in the zone of the page, and names it then."""
    if column.kind != "moment":
        return text
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return text
        return (moment.astimezone() if zone.info is None else moment.replace(tzinfo=zone.info)).isoformat()
    except (ValueError, OverflowError, OSError):
        return text  # refused where it is parsed


def _is_key(columns: JobColumns, words: str) -> bool:
    try:
        parse_filter(columns, [("job", words)])
    except ParameterError:
        return False
    return True


def _in_errors(columns: JobColumns, words: str) -> Pairs | None:
    error = columns.by_role.get("last_error")
    if error is None or error.is_redacted:
        return None
    return [(parameter_of(error, "contains"), words)]


# -- one queue: conditions are added one by one ------------------------------------------------------------------------

FORMS = (LINE, "add", "value", "time", "within", "since", "until")
"""The fields of the forms that add conditions to a list."""


def with_added(columns: JobColumns, pairs: Sequence[tuple[str, str]], zone: Zone) -> Pairs | None:
    """Return the parameters of a list with the conditions that its forms add; None if they add none.

    :raises ParameterError: if a condition is malformed.
    """
    given = {name: value.strip() for name, value in pairs if name in FORMS}
    if not given:
        return None
    added = [*_of_line(columns, given.get(LINE, ""), zone), *_of_choice(columns, given, zone)]
    added += _of_times(columns, given, zone)
    names = {name for name, _ in added}
    kept = [pair for pair in pairs if pair[1] and pair[0] not in {*FORMS, *names}]
    # Pages of another list are none of this one.
    return [*(pair for pair in kept if not added or pair[0] not in {"after", "before"}), *added]


def _of_line(columns: JobColumns, line: str, zone: Zone) -> Pairs:
    found = parse_line(columns, line, zone)
    if not found.words:
        return found.conditions
    by_error = _in_errors(columns, found.words)
    has_typed_keys = all(each.kind != "text" for each in columns.of_key)
    if _is_key(columns, found.words) and (has_typed_keys or by_error is None):
        return [*found.conditions, ("job", found.words)]
    if by_error is None:
        raise ParameterError(LINE, "this queue does not show errors; write column:value, or the key of a job")
    return [*found.conditions, *by_error]


def _of_choice(columns: JobColumns, given: dict[str, str], zone: Zone) -> Pairs:
    name, value = given.get("add", ""), given.get("value", "")
    if not name:
        if value:
            raise ParameterError("add", "choose what to compare the value with")
        return []
    choices = {
        parameter_of(column, operator): column for column in filterable(columns) for operator in OPERATORS[column.kind]
    }
    if name.endswith((".null=yes", ".null=no")):
        parameter, _, value = name.rpartition("=")
        return [(parameter, value)]
    if not value:
        raise ParameterError("value", "type a value, or choose a condition that needs none")
    return [(name, moment_in(choices[name], value, zone) if name in choices else value)]


def _of_times(columns: JobColumns, given: dict[str, str], zone: Zone) -> Pairs:
    times = [(operator, given[field]) for operator, field in TIMES if given.get(field)]
    if not times:
        return []
    column = columns.get(given.get("time", ""))
    if column is None or column not in moments_of(columns):
        raise ParameterError("time", "choose one of the columns with times")
    return [(parameter_of(column, operator), moment_in(column, text, zone)) for operator, text in times]


TIMES = (("last", "within"), ("min", "since"), ("max", "until"))
"""The operators of times, each with its field."""


def moments_of(columns: JobColumns) -> list[JobColumn]:
    return [each for each in filterable(columns) if "last" in OPERATORS[each.kind]]


# -- suggestions -------------------------------------------------------------------------------------------------------

MOST_SUGGESTED = 200
_SAMPLE = 50
"""The number of jobs, the newest by their keys, of whose JSON the names are suggested."""

_LARGEST_SAMPLE = 8000
"""The stored bytes up to which a value is read for that."""

_KINDS = 5
"""The number of kinds of errors that are suggested of a queue."""

_SUGGESTED_FOR = 60.0
"""The seconds for which they are remembered."""


def suggested(columns: JobColumns) -> list[str]:
    """Return beginnings of words that mean something in a queue."""
    found = [f"state:{each}" for each in lists_of(columns)]
    for column in filterable(columns):
        if column.kind == "state":
            continue
        choices = ("true", "false") if column.kind == "boolean" else column.choices
        found += [f"{column.name}:{each}" for each in choices] or [f"{column.name}:"]
    error = columns.by_role.get("last_error")
    return [*found, "error:"] if error is not None and not error.is_redacted else found


async def suggestions(context: PageContext, queues: Sequence[Queue], *, reads: bool = True) -> list[str]:
    """Return what the line of a search suggests for some queues, with names and kinds of errors from their jobs.

    :param reads: whether the jobs of a queue are read if that was long ago; otherwise what is remembered will do.
    """
    found: dict[str, None] = {}
    for queue in queues:
        columns, key = columns_of(queue.spec, context.settings.is_redacted), ("suggested", queue.name)

        async def read(columns: JobColumns = columns) -> Sequence[str]:
            return await context.database.read(_sampled, columns)

        remembered: SharedResult[Sequence[str]] | None = last_result(context.state, key)
        # Without them the page is complete.
        with contextlib.suppress(PageError, SQLAlchemyError):
            if reads:
                remembered = await shared_result(context.state, key, _SUGGESTED_FOR, read)
        found |= dict.fromkeys([*suggested(columns), *(() if remembered is None else remembered.value)])
    return list(found)[:MOST_SUGGESTED]


def _sampled(session: Session, columns: JobColumns) -> list[str]:
    """Return suggestions from the newest jobs: names in their JSON, and the most frequent kinds of errors."""
    found = [f"{name}:" for name in _names_in_json(session, columns)]
    error = columns.by_role.get("last_error")
    if error is None or error.is_redacted:
        return found
    try:
        with session.begin_nested():
            failures = read_failures(QueueReader.begin(session, columns.spec))
    except DBAPIError as problem:
        if is_connection_lost(problem):
            raise
        return found
    kinds = [kind for kind, _ in failures.kinds if kind] if isinstance(failures, Failures) else []
    return [*found, *(f"error:{kind}" for kind in kinds[:_KINDS])]


def _names_in_json(session: Session, columns: JobColumns) -> list[str]:
    """Return the names at the top of the JSON in the newest jobs, after that of their column; none if not readable."""
    spec, found = columns.spec, dict[str, None]()
    newest = [each.desc() for each in spec.keys]
    for column in filterable(columns):
        if not is_json(column):
            continue
        value = column.column
        is_small = stored_size(value) <= _LARGEST_SAMPLE
        text = sa.case((is_small, text_of(sa.type_coerce(value, column.stored_type))))
        some = sa.select(text).select_from(spec.table).order_by(*newest).limit(_SAMPLE)
        try:
            with session.begin_nested():
                rows = session.execute(some, bind_arguments={"mapper": spec.mapper}).scalars().all()
        except DBAPIError as error:
            if is_connection_lost(error):
                raise
            continue
        names = sorted({name for row in rows if row for name in _names_of(row)})
        found |= dict.fromkeys(f"{column.name}.{name}" for name in names[:_SAMPLE])
    return list(found)


def _names_of(document: str) -> list[str]:
    try:
        content = json.loads(document)
    except (ValueError, RecursionError):
        return []
    # Another name, as one with a space or a dot, cannot be written in a path.
    return [name for name in content if re.fullmatch(r"[\w-]+", name)] if isinstance(content, dict) else []


# -- all queues --------------------------------------------------------------------------------------------------------

SHOWN = 10
"""The number of jobs that are shown of a queue."""

_PLACES = Places("searches", 2, 1, "Other searches are being made at the moment.")
"""Two searches are made at the same time, each of another reader and in one session: other pages have the others."""

_STATEMENT_TIMEOUT = 1.5
_LONGEST = 5.0
"""The seconds after which no further queue is searched."""


BY_KEY = "by key"


@dataclass(frozen=True)
class Wanted:
    queue: Queue
    what: str
    """How the jobs were found, where a line may mean several things."""
    request: ListRequest


@dataclass(frozen=True)
class Hits:
    wanted: Wanted
    page: JobPage

    @property
    def has_more(self) -> bool:
        return self.page.next is not None


@dataclass
class SearchResults:
    hits: list[Hits] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """The queues that were not searched, or not to the end, by the reason."""
    cut: list[Wanted] = field(default_factory=list)
    """Where only a part of the jobs was examined, and none of it was found."""
    nothing_in: list[str] = field(default_factory=list)
    """The queues that were searched in vain."""

    def leave_out(self, queue: Queue, reason: str) -> None:
        names = self.left_out.setdefault(reason, [])
        if queue.name not in names:
            names.append(queue.name)


async def search(context: PageContext) -> Response:
    line = context.request.query_params.get(LINE, "").strip()
    found = await _search_all(context, line) if line else None
    return context.render(
        "search.html",
        line=line,
        found=found,
        suggestions=await suggestions(context, context.queues),
        list_url=lambda wanted: context.url("jobs", queue=wanted.queue, query=wanted.request.parameters()),
        shown_columns=lambda page: [number for number, each in enumerate(page.columns) if each.kind != "state"],
    )


async def _search_all(context: PageContext, line: str) -> SearchResults:
    results = SearchResults()
    wanted: list[Wanted] = []
    for queue in context.queues:
        try:
            wanted += _requests(context, queue, line)
        except ParameterError as error:
            results.leave_out(queue, f"{error.problem}.")
    async with _PLACES.one():
        await context.database.read(_read_all, wanted, results, statement_timeout=_STATEMENT_TIMEOUT)
    return results


def _requests(context: PageContext, queue: Queue, line: str) -> list[Wanted]:
    """Return the lists whose first jobs are what a line means in a queue."""
    columns = columns_of(queue.spec, context.settings.is_redacted)
    parsed = parse_line(columns, line, context.zone)
    has_state = any(name == "state" for name, _ in parsed.conditions)
    # Where claims delete rows, those that wait and those that failed are in different tables.
    in_two_tables = not has_state and not queue.spec.has("status")
    everywhere: list[Pairs] = (
        [[("state", each)] for each in ("pending", "failed", "cancelled")] if in_two_tables else [[]]
    )

    def made(what: str, *pairs: tuple[str, str]) -> Wanted:
        return Wanted(queue, what, parse_request(columns, [*parsed.conditions, *pairs]))

    if not parsed.words:
        return [made("", *state) for state in everywhere]
    found = []
    if _is_key(columns, parsed.words):
        found += [made(BY_KEY, *state, ("job", parsed.words)) for state in everywhere]
    by_error = _in_errors(columns, parsed.words)
    if by_error is not None:
        # Of all jobs, those have errors; the others would only make the search longer.
        state = [] if has_state else [("state", "failed")]
        found.append(made("in errors", *state, *by_error))
    if not found:
        raise ParameterError(LINE, "it does not show errors, and this is no key of it")
    return found


def _read_all(session: Session, wanted: Sequence[Wanted], results: SearchResults) -> None:
    """Read the first jobs of each list, one list after the other, so that a search takes one session only."""
    until = time.monotonic() + _LONGEST
    # It is read again if the connection was lost.
    results.hits.clear()
    results.cut.clear()
    searched: dict[str, bool] = {}
    for each in wanted:
        name = each.queue.name
        if time.monotonic() > until:
            results.leave_out(each.queue, f"the search had taken {_LONGEST:.0f} seconds already.")
            continue
        try:
            with session.begin_nested():
                page = read_page(session, each.request, SHOWN)
        except ParameterError as error:
            # Words that the database does not take as a key may be those of an error.
            if each.what != BY_KEY:
                results.leave_out(each.queue, f"{error.problem}.")
            continue
        except (DBAPIError, SqlaqueueError) as error:
            if is_connection_lost(error):
                raise
            results.leave_out(each.queue, problem_text(error))
            continue
        searched[name] = searched.get(name, False) or bool(page.jobs)
        if page.jobs:
            results.hits.append(Hits(each, page))
        elif page.examined is not None:
            results.cut.append(each)
            searched[name] = True
    results.nothing_in = [name for name, has_found in searched.items() if not has_found]
