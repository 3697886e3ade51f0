"""How many jobs of each state a filter selects, counted up to a limit and within a window of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.web.data.job_filters import JobsWanted, lists_of
from sqlaqueue.web.data.job_orders import Orders, orders_of
from sqlaqueue.web.data.job_pages import set_planner
from sqlaqueue.web.data.job_reader import JobReader, clauses_of
from sqlaqueue.web.data.job_rows import Results
from sqlaqueue.web.data.job_sources import Source, source_of
from sqlaqueue.web.data.job_windows import WINDOW, Windows

CAP = 10_000
"""The number up to which jobs are counted."""


@dataclass(frozen=True)
class Count:
    """A number of jobs."""

    number: int
    is_complete: bool
    """Whether there are no more: neither the limit nor the end of the window was reached."""

    @classmethod
    def of(cls, number: int, *, is_complete: bool) -> Count:
        """Return a count that is not above the limit."""
        return cls(min(number, CAP), is_complete and number <= CAP)

    @property
    def is_known(self) -> bool:
        """Whether it says anything: no job in a part of the rows does not."""
        return self.is_complete or self.number > 0


@dataclass(frozen=True, eq=False)
class _Counted:
    """The jobs of one state that are to be counted."""

    state: str | None
    source: Source
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
        counted = _Counted(state, source, orders_of(session, source, parts), Windows(source, parts, Results(())))
        found = _by_index(session, counted)
        if found is None:
            rest.setdefault(source.table, []).append(counted)
        else:
            counts[state] = found
    for some in rest.values():
        counts |= _in_window(session, some)
    return {state: counts[state] for state in states}


def _by_index(session: Session, counted: _Counted) -> Count | None:
    """Return the count of jobs that an index finds; None if none does."""
    source, windows = counted.source, counted.windows
    candidates = counted.orders.served()
    whole = next((some for some in candidates if len(some) == len(windows.parts)), None)
    reader = JobReader(session, windows, counted.orders)
    few = source.few(WINDOW + 1)
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
        number = _row(session, source, windows.count(clauses, CAP + 1))[0]
        return Count.of(number, is_complete=True)
    examined = windows.examine(clauses, (), (), WINDOW + 1, numbered=False)
    jobs = source.expose(examined.rows, examined.stored)
    matches = sa.and_(sa.true(), *windows.outside(served, jobs))
    row = _row(session, source, sa.select(_number(), _number(matches)).select_from(jobs.rows))
    return Count.of(row[1], is_complete=row[0] <= WINDOW)


def _in_window(session: Session, some: Sequence[_Counted]) -> dict[str | None, Count]:
    """Return the counts of jobs among the newest ones by their keys, in one statement."""
    first = some[0]
    source, windows = first.source, first.windows
    order = first.orders.by_key(is_descending=True)
    fixed = clauses_of(source.fixed())
    examined = windows.examine(fixed, order.columns, (), WINDOW + 1, numbered=False)
    jobs = source.expose(examined.rows, examined.stored)
    numbers = [_number(sa.and_(sa.true(), *each.windows.outside((), jobs))) for each in some]
    row = _row(session, source, sa.select(_number(), *numbers).select_from(jobs.rows))
    is_complete = row[0] <= WINDOW
    return {each.state: Count.of(number, is_complete=is_complete) for each, number in zip(some, row[1:], strict=True)}


def _number(matches: sa.ColumnElement[bool] | None = None) -> sa.ColumnElement[int]:
    number = sa.func.count()
    return number if matches is None else number.filter(matches)


def _row(session: Session, source: Source, statement: Any) -> Any:
    return session.execute(statement, bind_arguments={"mapper": source.spec.mapper}).one()
