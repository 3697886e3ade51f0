"""Reads the next jobs of a list after a position, by the cheapest way that has a bound.

* If an index other than that of the order leaves few rows, they are read and sorted. So are due jobs, which the index
  of claims finds priority by priority.
* Else the index of the order is read from the position on, up to a window of rows.
* An index in which many rows may be equal gives them in no order of their keys. Rows of one group are then read and
  sorted if they are few; if they are many, the jobs of the group are found by walking in the order of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.web.data.job_orders import Order, Orders
from sqlaqueue.web.data.job_rows import JobRow
from sqlaqueue.web.data.job_sources import Few, Part
from sqlaqueue.web.data.job_windows import WINDOW, Texts, Windows, equal

FEW = 1000
"""The number of due jobs that are read and sorted before a window of rows is."""


@dataclass(frozen=True)
class Found:
    """The jobs that were found."""

    jobs: list[JobRow]
    stop: tuple[str | None, ...] | None = None
    """The position up to which rows were examined, if that was not the end of the list."""


@dataclass(frozen=True, eq=False)
class JobReader:
    """Reads the jobs of one source."""

    session: Session
    windows: Windows
    orders: Orders

    def read(self, order: Order, position: Texts | None, need: int) -> Found:
        """Return the next ``need`` jobs after a position, fewer at the end of the list or of the window."""
        source = self.windows.source
        narrow = self.first_of_few(self.orders.narrower(order))
        if narrow is not None:
            return self._sorted(clauses_of(narrow), narrow, order.all, position, need)
        is_served = all(part in self.served_by(order) for part in self.windows.parts if part.is_of_list)
        is_due = source.wanted.only == "due"
        few = None if is_due and is_served else source.few(WINDOW + 1)
        if few is None:
            return self._in_order(order, position, need)
        number = self.counts(few)
        if number <= (min(FEW, WINDOW) if is_due else WINDOW):
            return self._sorted([source.is_among(few.keys)], [], order.all, position, need)
        found = self._in_order(order, position, need)
        if number <= WINDOW and found.stop is not None and len(found.jobs) < need:
            return self._sorted([source.is_among(few.keys)], [], order.all, position, need)
        return found

    def _in_order(self, order: Order, position: Texts | None, need: int) -> Found:
        if order.is_total:
            return self._walked(order, position, need)
        return self._grouped(order, position, need)

    def first_of_few(self, candidates: Sequence[list[Part]]) -> list[Part] | None:
        """Return the first of some conditions that few rows meet."""
        return next((some for some in candidates if self.has_few(clauses_of(some))), None)

    def has_few(self, clauses: Sequence[sa.ColumnElement[bool]]) -> bool:
        """Return whether no more rows than a window meet ``clauses``, which an index serves."""
        return self._scalar(self.windows.count(clauses, WINDOW + 1)) <= WINDOW

    def counts(self, few: Few) -> int:
        """Return the number of keys, or one more than a window has if there may be others."""
        number = self._scalar(count_of(few.keys))
        has_more = few.has_more is not None and number <= WINDOW and bool(self._scalar(few.has_more))
        return WINDOW + 1 if has_more else number

    def served_by(self, order: Order) -> list[Part]:
        """Return the conditions of the filter that the index of an order serves."""
        names = {each.column.name for each in (*order.prefix, order.columns[0])}
        fixed = self.windows.source.fixed()
        names |= {part.column.name for part in fixed if part.column is not None}
        return [part for part in self.windows.parts if part.column is not None and part.column.name in names]

    def _sorted(
        self, clauses: Sequence[Any], served: Sequence[Part], by: Sequence[Any], position: Texts | None, need: int
    ) -> Found:
        return Found(self._jobs(self.windows.sort(clauses, served, by, position, need)))

    def _walked(
        self,
        order: Order,
        position: Texts | None,
        need: int,
        equals: Sequence[tuple[sa.Column[Any], str | None]] = (),
    ) -> Found:
        served = self.served_by(order)
        rows = self._rows(self.windows.walk(order, served, position, need, equals=equals))
        return self._found(rows)

    def _found(self, rows: Sequence[Any]) -> Found:
        results = self.windows.results
        jobs = [results.job(row) for row in rows if getattr(row, "matches", True)]
        last = rows[-1] if rows else None
        return Found(jobs, results.job(last).position if getattr(last, "is_last", False) else None)

    def _grouped(self, order: Order, position: Texts | None, need: int) -> Found:
        width = len(order.columns)
        jobs: list[JobRow] = []
        group: Texts | None = None
        if position is not None:
            group, key = position[:width], position[width:]
            found = self._in_group(order, group, key or None, need)
            if found.stop is not None or len(found.jobs) >= need:
                return found
            jobs += found.jobs
        while True:
            missing = need - len(jobs)
            served = self.served_by(order)
            rows = self._rows(self.windows.walk(order, served, group, missing))
            stopped = any(getattr(row, "is_last", False) for row in rows)
            if not stopped and len(rows) < missing:
                return Found([*jobs, *self._found(rows).jobs])
            # The last group may have more jobs, which come before those that were found.
            last = rows[-1]
            jobs += self._found([row for row in rows if row.group_number != last.group_number]).jobs
            group = self.windows.results.job(last).position[:width]
            if stopped:
                return Found(jobs, tuple(group))
            found = self._in_group(order, group, None, need - len(jobs))
            jobs += found.jobs
            if found.stop is not None or len(jobs) >= need:
                return Found(jobs, found.stop)

    def _in_group(self, order: Order, group: Texts, key: Texts | None, need: int) -> Found:
        """Return the next jobs of those that are equal in the columns of the index."""
        equals = [(each.column, text) for each, text in zip(order.columns, group, strict=True)]
        served = self.served_by(order)
        clauses = [*clauses_of(served), *(equal(column, column, text) for column, text in equals)]
        position = None if key is None else [*group, *key]
        if self.has_few(clauses):
            return self._sorted(clauses, served, order.all, position, need)
        by_key = self.orders.by_key(is_descending=order.is_descending)
        found = self._walked(by_key, key, need, equals)
        # The key's own order has other positions.
        jobs = [JobRow(job.key, job.state, job.cells, (*group, *job.position)) for job in found.jobs]
        return Found(jobs, None if found.stop is None else (*group, *found.stop))

    def _jobs(self, statement: AnySelect) -> list[JobRow]:
        return [self.windows.results.job(row) for row in self._rows(statement)]

    def _rows(self, statement: AnySelect) -> Sequence[Any]:
        return self.session.execute(statement, bind_arguments=self._bind).all()

    def _scalar(self, statement: AnySelect) -> int:
        number: int = self.session.execute(statement, bind_arguments=self._bind).scalar_one()
        return number

    @property
    def _bind(self) -> dict[str, Any]:
        return {"mapper": self.windows.source.spec.mapper}


def count_of(some: AnySelect) -> AnySelect:
    """Return a SELECT of the number of rows of another."""
    return sa.select(sa.func.count()).select_from(some.subquery("sqlaqueue_some"))


def clauses_of(parts: Sequence[Part]) -> list[sa.ColumnElement[bool]]:
    """Return the conditions on the columns of the source's table."""
    return [part.clause for part in parts if part.clause is not None]
