"""One page of a list of jobs: filtered, in the order of an index, from a cursor on."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.queue.options import FINISHED
from sqlaqueue.sql.engine import sqlstate
from sqlaqueue.sql.portable import filtered
from sqlaqueue.web.data.engines import pages_of
from sqlaqueue.web.data.job import has_one_of, letter_of
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns, kind_of_type, states_of
from sqlaqueue.web.data.job_filters import JobsWanted, lists_of, parse_filter, typed_as
from sqlaqueue.web.data.job_sources import DeadLetters, JobOrder, OrderColumn, Orders, Source, orders_of, source_of
from sqlaqueue.web.data.job_windows import (
    SHOWN,
    WINDOW,
    FoundJobs,
    JobReader,
    JobRow,
    Results,
    Texts,
    Windows,
    clauses_of,
)
from sqlaqueue.web.data.reader import ParameterError

LONGEST = 8000
"""The number of characters of a cursor. An index has no longer values."""

_ALPHABET = re.compile(r"[A-Za-z0-9_-]*")
_SPECIAL_MOMENTS = re.compile(
    r"-?infinity|\d{4,6}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d{1,6})?([+-]\d\d(:\d\d){0,2})?)?( BC)?"
)


def cursor_text(order: JobOrder, position: Texts) -> str:
    """Return where a page begins: the position of a job in the order, as an opaque text in a URL.

    It is no secret: whoever changes it gets another part of the same list, or an error. Its values are checked by the
    kind of their columns, and reach the database as parameters.
    """
    content = json.dumps([_signature(order), *position], ensure_ascii=False, separators=(",", ":"))
    return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def position_of(order: JobOrder, cursor: str, parameter: str) -> Texts:
    """Return the position in a cursor: values of all columns of the order, or of those of its index only."""
    content = _decoded(cursor, parameter)
    if not content or not all(value is None or isinstance(value, str) for value in content):
        raise ParameterError(parameter, "it is no position in a list")
    signature, *position = content
    if signature != _signature(order):
        raise ParameterError(parameter, "it belongs to a list in another order; start from the first page")
    if len(position) not in {len(order.all), len(order.columns)}:
        raise ParameterError(parameter, "it is no position in this list")
    for each, text in zip(order.all, position, strict=False):
        _check(each, text, parameter)
    return position


def _decoded(cursor: str, parameter: str) -> list[Any]:
    if len(cursor) > LONGEST or not _ALPHABET.fullmatch(cursor):
        raise ParameterError(parameter, "it is no position in a list")
    try:
        content = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        raise ParameterError(parameter, "it is no position in a list") from None
    return content if isinstance(content, list) else []


def _signature(order: JobOrder) -> str:
    """Return what a cursor has to have been made for: the columns, and where nulls come."""
    columns = (f"{each.column.name}{'<' if each.nulls_first else '>'}" for each in order.all)
    return f"{order.sort} {' '.join(columns)}"


def _check(by: OrderColumn, text: str | None, parameter: str) -> None:
    if text is None:
        if not by.is_nullable:
            raise ParameterError(parameter, "it is no position in this list")
        return
    kind = kind_of_type(by.column.type)
    if kind in {"moment", "naive_moment", "date"}:
        if not _SPECIAL_MOMENTS.fullmatch(text):
            raise ParameterError(parameter, "it is no position in this list")
        _check_moment(text, parameter)
    elif kind in {"integer", "boolean", "enum", "uuid"}:
        typed_as(by.column, text, parameter)
    elif "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ParameterError(parameter, "it is no position in this list")


def _check_moment(text: str, parameter: str) -> None:
    """Refuse a day that no month has, unless it is in a year that Python does not have."""
    try:
        datetime.fromisoformat(text) if "T" in text else date.fromisoformat(text)
    except ValueError:
        if text.endswith(("infinity", " BC")) or not re.match(r"\d{4}-", text):
            return
        raise ParameterError(parameter, "it is no position in this list") from None


PAGE = 50

_INVALID_VALUE = "22"
"""The class of SQLSTATEs for values that a type does not have."""

FIRST_ORDERS: dict[str | None, tuple[str, ...]] = {
    "pending": ("priority", "run_at"),
    "due": ("run_at", "priority"),
    "expired": ("lease_expires_at",),
    **dict.fromkeys(FINISHED, ("-finished_at",)),
}
"""The roles by which lists are sorted first, if an index has that order; ``-`` stands for descending. An index of
claims that begins with the priority has the jobs in claim order: of each priority, those that are due first."""

_SORTED_BY: dict[str | None, str] = {"pending": "run_at", "due": "run_at", **dict.fromkeys(FINISHED, "-finished_at")}
"""The roles by which few jobs are sorted if no index has a better order than that of a key which tells no time."""

_IN_TIME = ("integer", "moment", "naive_moment", "date")
"""The kinds of keys that grow with time."""

_OWN = ("sort", "columns", "after", "before")


@dataclass(frozen=True)
class ListRequest:
    wanted: JobsWanted
    columns: str | None = None
    sort: str | None = None
    """The name of a column, with ``-`` before it for a descending order; None for the first order of the list."""
    after: str | None = None
    """The cursor from which the page begins."""
    before: str | None = None
    """The cursor before which it ends."""
    is_walked: bool = False
    """Whether an action walks over it: in an order that stays the same whatever the action and others change."""

    def parameters(self, **changed: str | None) -> list[tuple[str, str]]:
        """Return the parameters of a URL of the list from its first page on; None as a changed value leaves one out."""
        own = {"sort": self.sort, "columns": self.columns} | changed
        pairs = [pair for pair in self.wanted.parameters() if pair[0] not in changed]
        return [*pairs, *((name, value) for name, value in own.items() if value is not None)]

    def with_place(self) -> list[tuple[str, str]]:
        place = [("after", self.after), ("before", self.before)]
        return [*self.parameters(), *((name, value) for name, value in place if value is not None)]


@dataclass(frozen=True)
class JobPage:
    request: ListRequest
    columns: Sequence[JobColumn]
    """The columns that are shown, in the order of the cells of a job."""
    jobs: Sequence[JobRow]
    order: JobOrder
    next: str | None
    """The cursor of the page after this one; None at the end."""
    previous: str | None
    sorts: Sequence[str] = ()
    lasting_sorts: Sequence[str] = ()
    """Those by which it can be sorted whatever the filter is."""
    examined: int | None = None
    """The number of rows after which the search for further jobs was broken off; ``next`` continues it, or ``previous``
    if the page was read backwards. None if it was not."""

    @property
    def sort(self) -> str:
        """The order, as in :attr:`ListRequest.sort`."""
        return self.order.sort

    def cursor_of(self, job: JobRow) -> str:
        return cursor_text(self.order, job.position)

    @property
    def is_backwards(self) -> bool:
        """Whether the page was read from its end, so that a search goes on in ``previous``."""
        return self.request.before is not None


def parse_request(columns: JobColumns, parameters: Iterable[tuple[str, str]]) -> ListRequest:
    pairs = list(parameters)
    own: dict[str, str] = {}
    for name, value in pairs:
        if name in _OWN and value:
            if name in own and name != "columns":
                raise ParameterError(name, "it is given twice")
            # A form with a checkbox for each column sends several.
            own[name] = f"{own[name]},{value}" if name in own else value
    wanted = parse_filter(columns, pairs)
    if wanted.state is None and not columns.spec.has("status"):
        # Jobs that wait and jobs that failed are in different tables.
        wanted = replace(wanted, state=states_of(columns.spec)[0])
    if "after" in own and "before" in own:
        raise ParameterError("before", "give one of after and before")
    columns.chosen(own.get("columns"))
    return ListRequest(wanted, own.get("columns"), own.get("sort"), own.get("after"), own.get("before"))


def read_page(session: Session, request: ListRequest, size: int = PAGE, longest: int = SHOWN) -> JobPage:
    """Return a page of a list of jobs.

    It changes settings of the planner, until the transaction ends.

    :param size: the number of jobs.
    :param longest: the number of characters of a value, after which it is cut.
    :raises ParameterError: if the order is not offered, the cursor is malformed, or the database refuses a value.
    """
    wanted = request.wanted
    shown = wanted.columns.chosen(request.columns, wanted.listed)
    set_planner(session, wanted.columns)
    source = source_of(wanted.columns, wanted)
    parts = source.parts()
    orders = orders_of(session, source, parts)
    reader = JobReader(session, _windows(orders, Results(shown, longest)), orders)
    order, sorts = _order(reader, request)
    backwards = request.before is not None
    parameter = "before" if backwards else "after"
    cursor = request.before or request.after
    position = None if cursor is None else position_of(order, cursor, parameter)
    try:
        found = reader.read(order.reversed() if backwards else order, position, size + 1)
    except DBAPIError as error:
        state = sqlstate(error) or ""
        if not state.startswith(_INVALID_VALUE):
            raise
        name = "job" if cursor is None and wanted.key is not None else (parameter if cursor else "f.")
        raise ParameterError(name, "the database has no such value") from None
    page = _page(request, shown, order, found, size)
    same_table = None if source.spec.has("status") else wanted.state
    unfiltered = source_of(wanted.columns, JobsWanted(wanted.columns, state=same_table))
    lasting = orders_of(session, unfiltered, unfiltered.fixed())
    return replace(page, sorts=sorts, lasting_sorts=lasting.names())


def read_rows(session: Session, columns: JobColumns, keys: Sequence[str], shown: Sequence[JobColumn]) -> list[JobRow]:
    """Return the jobs with these keys, in their order, wherever they are stored, as a list shows them."""
    if not keys:
        return []
    results, found = Results(shown), dict[str, JobRow]()
    sources: list[tuple[Source, sa.ColumnElement[bool]]] = [
        (Source(columns, JobsWanted(columns)), has_one_of(columns, keys))
    ]
    if not columns.spec.has("status"):
        letters = DeadLetters(columns, JobsWanted(columns))
        sources.append((letters, sa.or_(*(letter_of(columns, key) for key in keys))))
    for source, mine in sources:
        jobs = source.expose(source.table, {each.name: each for each in source.table.c})
        rows = sa.select(*results.columns(jobs, ())).select_from(jobs.rows).where(mine)
        for row in session.execute(rows, bind_arguments={"mapper": columns.spec.mapper}):
            job = results.job(row)
            found.setdefault(job.key, job)
    return [found[key] for key in dict.fromkeys(keys) if key in found]


def set_planner(session: Session, columns: JobColumns) -> None:
    """Keep the server from plans that read a table whole, until the transaction ends."""
    mapper = columns.spec.mapper
    pages_of(session, mapper).set_planner(session, {"mapper": mapper})


def _windows(orders: Orders, results: Results) -> Windows:
    return Windows(orders.source, orders.parts, results, orders.pages.merges_parts)


def _order(reader: JobReader, request: ListRequest) -> tuple[JobOrder, list[str]]:
    """Return the order of a list, and the names of the columns by which it can be sorted."""
    orders, wanted, names = reader.orders, request.wanted, reader.orders.names()
    first = _first_order(orders, wanted, names)
    if request.is_walked and (first is None or wanted.only is None):
        first = f"-{names[0]}"
    sort = request.sort or first or f"-{names[0]}"
    by_time = _time_of(wanted)
    if first is None and by_time is not None and request.sort in {None, by_time.name, f"-{by_time.name}"}:
        few = reader.few_parts()
        if few is not None:
            sort = request.sort or _time_first(wanted)
            order = orders.of_few(by_time, few, is_descending=sort.startswith("-"))
            if order is not None:
                return order, [*names, by_time.name]
    name = sort.removeprefix("-")
    found = orders.by(name, is_descending=sort.startswith("-")) if name in names else None
    if found is None:
        raise ParameterError("sort", f"no index gives this order; use one of {', '.join(names)}")
    return found, names


def _first_order(orders: Orders, wanted: JobsWanted, names: Sequence[str]) -> str | None:
    """Return the order of a list for which none is given; None if all that is left is a key which tells no time."""
    roles = [*FIRST_ORDERS.get(wanted.listed, ()), *(() if is_in_time(wanted.columns) else ("-created_at",))]
    for role in roles:
        column = wanted.columns.by_role.get(role.removeprefix("-"))
        # By a column of which the filter gives the only value nothing is sorted.
        if column is not None and column.name in names and not orders.is_given(column):
            return f"-{column.name}" if role.startswith("-") else column.name
    return f"-{names[0]}" if is_in_time(wanted.columns) else None


def is_in_time(columns: JobColumns) -> bool:
    """Return whether the order of the keys is that in which the jobs were enqueued, as far as their type tells."""
    keys = columns.of_key
    return len(keys) == 1 and keys[0].kind in _IN_TIME


def _time_of(wanted: JobsWanted) -> JobColumn | None:
    """Return the column by which few jobs are sorted; None if the queue has none that is shown."""
    roles = (_SORTED_BY.get(wanted.listed, "created_at"), "created_at")
    found = (wanted.columns.by_role.get(role.removeprefix("-")) for role in roles)
    return next((each for each in found if each is not None and not each.is_redacted), None)


def _time_first(wanted: JobsWanted) -> str:
    column = _time_of(wanted)
    name = "" if column is None else column.name
    # Those that wait begin with the one that is due first; of all others the newest is looked for.
    return name if column is not None and column.role == "run_at" else f"-{name}"


def _page(request: ListRequest, shown: Sequence[JobColumn], order: JobOrder, found: FoundJobs, size: int) -> JobPage:
    backwards = request.before is not None
    jobs, has_more = found.jobs[:size], len(found.jobs) > size
    forward = cursor_text(order, jobs[-1].position) if has_more else None
    if forward is None and found.stop is not None:
        forward = cursor_text(order, found.stop)
    # A page that was reached by a cursor has jobs on the other side, unless they were deleted meanwhile.
    behind = cursor_text(order, jobs[0].position) if jobs else None
    came_from = request.before if backwards else request.after
    back = None if came_from is None else (behind or came_from)
    return JobPage(
        request,
        shown,
        jobs[::-1] if backwards else jobs,
        order,
        next=back if backwards else forward,
        previous=forward if backwards else back,
        examined=None if has_more or found.stop is None else WINDOW,
    )


CAP = 10_000
"""The number up to which jobs are counted."""


@dataclass(frozen=True)
class Count:
    number: int
    is_complete: bool
    """Whether there are no more: neither the limit nor the end of the window was reached."""

    @classmethod
    def of(cls, number: int, *, is_complete: bool) -> Count:
        return cls(min(number, CAP), is_complete and number <= CAP)

    @property
    def is_known(self) -> bool:
        """Whether it says anything: no job in a part of the rows does not."""
        return self.is_complete or self.number > 0


@dataclass(frozen=True, eq=False)
class _Counted:
    state: str | None
    orders: Orders
    windows: Windows


def count_states(session: Session, wanted: JobsWanted) -> dict[str | None, Count]:
    """Return the number of jobs that meet the other conditions of a filter, by list; by None, those of any state.

    A state that an index finds is counted in that index. The others are counted among the newest jobs by their keys, a
    window of rows.
    """
    set_planner(session, wanted.columns)
    of_any: list[str | None] = [None] if wanted.columns.spec.has("status") else []
    states = [*of_any, *lists_of(wanted.columns)]
    counts: dict[str | None, Count] = {}
    rest: dict[sa.Table, list[_Counted]] = {}
    for state in states:
        source = source_of(wanted.columns, wanted.of(state))
        parts = source.parts()
        orders = orders_of(session, source, parts)
        counted = _Counted(state, orders, _windows(orders, Results(())))
        found = _by_index(session, counted)
        if found is None:
            rest.setdefault(source.table, []).append(counted)
        else:
            counts[state] = found
    for some in rest.values():
        counts |= _in_window(session, some)
    return {state: counts[state] for state in states}


def count_list(session: Session, wanted: JobsWanted) -> Count:
    """Return the number of jobs of one list, as far as they can be counted."""
    set_planner(session, wanted.columns)
    source = source_of(wanted.columns, wanted)
    parts = source.parts()
    orders = orders_of(session, source, parts)
    counted = _Counted(wanted.listed, orders, _windows(orders, Results(())))
    return _by_index(session, counted) or _in_window(session, [counted])[wanted.listed]


def _by_index(session: Session, counted: _Counted) -> Count | None:
    windows, source, candidates = counted.windows, counted.windows.source, counted.orders.served()
    whole = next((some for some in candidates if len(some) == len(windows.parts)), None)
    reader = JobReader(session, windows, counted.orders)
    few = reader.few()
    if whole is not None or not windows.parts:
        served = whole or []
        clauses = clauses_of(served)
    elif few is not None and few.has_more is not None and (keys := reader.counts(few)) <= WINDOW:
        served = [part for part in windows.parts if few.is_exact and part.is_of_list]
        if len(served) == len(windows.parts):
            return Count.of(keys, is_complete=True)
        clauses = [source.is_among(few.keys)]
    elif candidates:
        served = reader.first_of_few(candidates) or candidates[0]
        clauses = clauses_of(served)
    elif few is not None:
        served, clauses = [], [source.is_among(few.keys)]
    else:
        return None
    others = [part for part in windows.parts if part not in served]
    if not others:
        return Count.of(_row(session, source, windows.count(clauses, CAP + 1))[0], is_complete=True)
    examined = windows.examine(clauses, (), (), WINDOW + 1, numbered=False)
    jobs = source.expose(examined.rows, examined.stored)
    matches = sa.and_(sa.true(), *windows.outside(served, jobs))
    number = sa.func.count()
    row = _row(session, source, sa.select(number, filtered(number, matches)).select_from(jobs.rows))
    return Count.of(row[1], is_complete=row[0] <= WINDOW)


def _in_window(session: Session, some: Sequence[_Counted]) -> dict[str | None, Count]:
    """Return the counts of jobs among the newest ones by their keys, in one statement."""
    first = some[0]
    source, windows = first.windows.source, first.windows
    order = first.orders.by_key(is_descending=True)
    fixed = clauses_of(source.fixed())
    examined = windows.examine(fixed, order.columns, (), WINDOW + 1, numbered=False)
    jobs = source.expose(examined.rows, examined.stored)
    number = sa.func.count()
    numbers = [filtered(number, sa.and_(sa.true(), *each.windows.outside((), jobs))) for each in some]
    row = _row(session, source, sa.select(number, *numbers).select_from(jobs.rows))
    is_complete = row[0] <= WINDOW
    return {each.state: Count.of(found, is_complete=is_complete) for each, found in zip(some, row[1:], strict=True)}


def _row(session: Session, source: Source, statement: Any) -> Any:
    return session.execute(statement, bind_arguments={"mapper": source.spec.mapper}).one()
