"""One page of a list of jobs: filtered, in the order of an index, from a cursor on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog_indexes import SETTINGS
from sqlaqueue.sql.errors import sqlstate
from sqlaqueue.web.data.job_columns import JobColumn, JobColumns, states_of
from sqlaqueue.web.data.job_cursors import cursor_text, position_of
from sqlaqueue.web.data.job_filters import JobsWanted, Only, parse_filter
from sqlaqueue.web.data.job_orders import Order, Orders, orders_of
from sqlaqueue.web.data.job_reader import Found, JobReader
from sqlaqueue.web.data.job_rows import JobRow, Results
from sqlaqueue.web.data.job_sources import source_of
from sqlaqueue.web.data.job_windows import WINDOW, Windows
from sqlaqueue.web.data.parameters import ParameterError

PAGE = 50
"""The number of jobs on a page."""

_INVALID_VALUE = "22"
"""The class of SQLSTATEs for values that a type does not have."""

FIRST_ORDERS: dict[Only | None, tuple[str, ...]] = {"due": ("run_at", "priority"), "expired": ("lease_expires_at",)}
"""The roles by which some lists are sorted first, if an index has that order. An index of claims that begins with the
priority has the due jobs in claim order: of each priority, those that have been due for the longest time come first."""

_OWN = ("sort", "columns", "after", "before")


@dataclass(frozen=True)
class ListRequest:
    """What a list shows, as parsed from the parameters of a URL."""

    wanted: JobsWanted
    columns: str | None = None
    sort: str | None = None
    """The name of a column, with ``-`` before it for a descending order; None for the order of :data:`FIRST_ORDERS`, or
    the newest keys first."""
    after: str | None = None
    """The cursor from which the page begins."""
    before: str | None = None
    """The cursor before which it ends."""

    def parameters(self, **changed: str | None) -> list[tuple[str, str]]:
        """Return the parameters of a URL of the same list from its first page on.

        :param changed: parameters with other values; None leaves one out.
        """
        own = {"sort": self.sort, "columns": self.columns} | changed
        pairs = [pair for pair in self.wanted.parameters() if pair[0] not in changed]
        return [*pairs, *((name, value) for name, value in own.items() if value is not None)]

    def with_place(self) -> list[tuple[str, str]]:
        """Return the parameters of a URL of this page of the list."""
        place = [("after", self.after), ("before", self.before)]
        return [*self.parameters(), *((name, value) for name, value in place if value is not None)]

    def without(self, parameter: str) -> list[tuple[str, str]]:
        """Return the same without one condition of the filter."""
        return [pair for pair in self.parameters() if pair[0] != parameter]


@dataclass(frozen=True)
class JobPage:
    """One page of a list of jobs."""

    request: ListRequest
    columns: Sequence[JobColumn]
    """The columns that are shown, in the order of the cells of a job."""
    jobs: Sequence[JobRow]
    sort: str
    """The order, as in :attr:`ListRequest.sort`."""
    next: str | None
    """The cursor of the page after this one; None at the end."""
    previous: str | None
    """That of the page before."""
    sorts: Sequence[str] = ()
    """The columns by which the list can be sorted."""
    lasting_sorts: Sequence[str] = ()
    """Those by which it can be sorted whatever the filter is."""
    examined: int | None = None
    """The number of rows after which the search for further jobs was broken off; ``next`` continues it, or ``previous``
    if the page was read backwards. None if it was not."""

    @property
    def is_backwards(self) -> bool:
        """Whether the page was read from its end, so that a search goes on in ``previous``."""
        return self.request.before is not None


def parse_request(columns: JobColumns, parameters: Iterable[tuple[str, str]]) -> ListRequest:
    """Return what a list shows, from the parameters of a URL.

    :raises ParameterError: if one of them is malformed.
    """
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


def read_page(session: Session, request: ListRequest, size: int = PAGE) -> JobPage:
    """Return a page of a list of jobs.

    It changes settings of the planner, until the transaction ends.

    :raises ParameterError: if the order is not offered, the cursor is malformed, or the database refuses a value.
    """
    wanted = request.wanted
    shown = wanted.columns.chosen(request.columns, wanted.listed)
    set_planner(session, wanted.columns)
    source = source_of(wanted.columns, wanted)
    parts = source.parts()
    orders = orders_of(session, source, parts)
    order = _order(orders, request)
    reader = JobReader(session, Windows(source, parts, Results(shown)), orders)
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
    return replace(page, sorts=orders.names(), lasting_sorts=lasting.names())


def set_planner(session: Session, columns: JobColumns) -> None:
    """Keep the server from plans that read a table whole, until the transaction ends."""
    calls = [sa.func.set_config(name, value, sa.true()) for name, value in SETTINGS.items()]
    session.execute(sa.select(*calls), bind_arguments={"mapper": columns.spec.mapper})


def _order(orders: Orders, request: ListRequest) -> Order:
    names = orders.names()
    sort = request.sort or _first_order(request.wanted, names)
    name = sort.removeprefix("-")
    order = orders.by(name, is_descending=sort.startswith("-")) if name in names else None
    if order is None:
        raise ParameterError("sort", f"no index gives this order; use one of {', '.join(names)}")
    return order


def _first_order(wanted: JobsWanted, names: Sequence[str]) -> str:
    """Return the order of a list for which none is given: the newest keys first, if no index has a better one."""
    for role in FIRST_ORDERS.get(wanted.only, ()):
        column = wanted.columns.by_role.get(role)
        if column is not None and column.name in names:
            return column.name
    return f"-{names[0]}"


def _page(request: ListRequest, shown: Sequence[JobColumn], order: Order, found: Found, size: int) -> JobPage:
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
        order.sort,
        next=back if backwards else forward,
        previous=forward if backwards else back,
        examined=None if has_more or found.stop is None else WINDOW,
    )
