"""Statements that read jobs in an order, and examine a bounded number of rows, whatever the filter.

An inner SELECT reads the first rows in the order of an index. The conditions that no index serves are outside of it, so
that a filter without matches ends with the window, not with the table. The last row of a window is returned even if it
does not match: the next window begins after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.run import key_text
from sqlaqueue.web.data.engines import shown_text, stored_size, text_of, typed_text
from sqlaqueue.web.data.job_columns import JobColumn, kind_of_type, stored_type
from sqlaqueue.web.data.job_sources import Exposed, Few, FilterPart, JobOrder, OrderColumn, Orders, Source

SHOWN = 200
"""The number of characters that a list shows of a value. The database cuts it."""


@dataclass(frozen=True)
class Cell:
    column: JobColumn
    text: str | None
    """None for null, for a redacted value, and for a value that is too large to be read in a list."""
    is_cut: bool = False
    """Whether the value is longer."""
    size: int | None = None
    """The stored bytes of a value that is too large."""

    @property
    def is_redacted(self) -> bool:
        return self.column.is_redacted

    @property
    def moment(self) -> datetime | date | None:
        """The value as a moment or a day; None if it is no such value, or none that Python has, such as infinity."""
        if self.text is None or self.column.kind not in {"moment", "naive_moment", "date"}:
            return None
        try:
            if self.column.kind == "date":
                return date.fromisoformat(self.text)
            moment = datetime.fromisoformat(self.text)
            return moment.astimezone(UTC) if moment.tzinfo is not None else moment
        except (ValueError, OverflowError):
            return None


@dataclass(frozen=True)
class JobRow:
    key: str
    """Its key as a text, see :func:`sqlaqueue.queue.run.key_text`."""
    state: str
    cells: Sequence[Cell]
    position: tuple[str | None, ...]
    """The values by which the list is sorted."""


@dataclass(frozen=True, eq=False)
class Results:
    """The columns that a list shows, in a statement and in its rows."""

    shown: Sequence[JobColumn]
    longest: int = SHOWN
    """The number of characters of a value, after which it is cut."""

    def columns(self, jobs: Exposed, position: Sequence[sa.ColumnElement[Any]]) -> list[sa.ColumnElement[Any]]:
        found: list[sa.ColumnElement[Any]] = [jobs.state.label("state")]
        found += [text_of(key).label(f"key_{number}") for number, key in enumerate(jobs.keys)]
        found += [exact_text(value).label(f"position_{number}") for number, value in enumerate(position)]
        for number, column in enumerate(self.shown):
            if column.is_redacted or column.kind == "state":
                continue
            value = jobs.values[column.name]
            found.append(shown_text(value, column.form, self.longest + 1).label(f"text_{number}"))
            if column.form == "large":
                found.append(stored_size(value).label(f"size_{number}"))
        return found

    def job(self, row: Any) -> JobRow:
        keys = [getattr(row, name) for name in row._fields if name.startswith("key_")]
        position = [getattr(row, name) for name in row._fields if name.startswith("position_")]
        cells = [self._cell(row, number, column) for number, column in enumerate(self.shown)]
        return JobRow(key_text(keys), row.state, cells, tuple(position))

    def _cell(self, row: Any, number: int, column: JobColumn) -> Cell:
        if column.is_redacted:
            return Cell(column, None)
        if column.kind == "state":
            return Cell(column, row.state)
        text: str | None = getattr(row, f"text_{number}")
        size: int | None = getattr(row, f"size_{number}", None) if text is None else None
        if text is None:
            return Cell(column, None, size=size, is_cut=size is not None)
        if column.role == "last_error" and self.longest == SHOWN:
            # Its traceback is shown on the job's page.
            line = text.partition("\n")[0][:SHOWN]
            return Cell(column, line, is_cut=len(line) < len(text))
        return Cell(column, text[: self.longest], is_cut=len(text) > self.longest)


def exact_text(value: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    """Return a value as a text from which the database reads the same value, whatever the settings of the session."""
    if kind_of_type(value.type) in {"moment", "naive_moment", "date"}:
        return shown_text(value, "moment", SHOWN)
    return text_of(value)


WINDOW = 10_000
"""The number of rows that one page examines at most."""

Texts = Sequence[str | None]
"""Values by which jobs are sorted, as texts."""


@dataclass(frozen=True, eq=False)
class Examined:
    rows: sa.FromClause
    stored: dict[str, sa.ColumnElement[Any]]
    """Their columns by the names in the database."""
    number: sa.ColumnElement[int] | None = None
    """The number of each row in its window."""


def value_of(column: sa.Column[Any], text: str) -> sa.ColumnElement[Any]:
    if kind_of_type(column.type) == "integer":
        return sa.literal(int(text), sa.BigInteger())
    return typed_text(text, stored_type(column.type))


def equal(column: sa.Column[Any], value: sa.ColumnElement[Any], text: str | None) -> sa.ColumnElement[bool]:
    """Return the condition that ``value`` is the value of a column that is given as a text; None for null."""
    return value.is_(None) if text is None else _plain(column, value) == value_of(column, text)


def after(
    by: Sequence[OrderColumn], values: Sequence[sa.ColumnElement[Any]], position: Texts
) -> list[list[sa.ColumnElement[bool]]]:
    """Return the conditions that a job comes after a position: alternatives, each of which is one part of an index."""
    directions = {each.is_descending for each in by}
    if len(by) > 1 and len(directions) == 1 and not any(each.is_nullable for each in by) and None not in position:
        # One part of the index instead of one for each column.
        mine: Any = sa.tuple_(*(_plain(each.column, value) for each, value in zip(by, values, strict=True)))
        its: Any = sa.tuple_(*(value_of(each.column, text or "") for each, text in zip(by, position, strict=True)))
        return [[mine < its if directions == {True} else mine > its]]
    found: list[list[sa.ColumnElement[bool]]] = []
    for last in reversed(range(len(by))):
        same = [equal(by[number].column, values[number], position[number]) for number in range(last)]
        each, value, text = by[last], values[last], position[last]
        if text is None:
            if each.nulls_first:
                found.append([*same, value.is_not(None)])
            continue
        mine, its = _plain(each.column, value), value_of(each.column, text)
        found.append([*same, mine < its if each.is_descending else mine > its])
        if each.is_nullable and not each.nulls_first:
            found.append([*same, value.is_(None)])
    return found


def _plain(column: sa.Column[Any], value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return a value without the conversions of a type of the program, which may raise for this row."""
    return sa.type_coerce(value, stored_type(column.type))


@dataclass(frozen=True, eq=False)
class Windows:
    """Makes the statements for the jobs of one source that meet all parts of a filter."""

    source: Source
    parts: Sequence[FilterPart]
    results: Results
    merges: bool = True
    """Whether the server merges parts of an index; otherwise one condition has all of them."""

    def examine(
        self,
        clauses: Sequence[sa.ColumnElement[bool]],
        by: Sequence[OrderColumn],
        alternatives: Sequence[Sequence[sa.ColumnElement[bool]]],
        limit: int,
        *,
        numbered: bool,
    ) -> Examined:
        """Return the first rows in the order ``by`` that meet ``clauses``, and one of ``alternatives``, if any."""
        read = {column.name: column for column in (*self.source.read, *self.source.keys)}
        read |= {each.column.name: each.column for each in by}
        labels = {name: f"stored_{number}" for number, name in enumerate(read)}

        columns = [column.label(labels[name]) for name, column in read.items()]
        order = [each.by(each.column) for each in by]

        def part(alternative: Sequence[sa.ColumnElement[bool]]) -> AnySelect:
            return sa.select(*columns).where(*clauses, *alternative).order_by(*order).limit(limit)

        if len(alternatives) > 1 and not self.merges:
            rows = part([sa.or_(*(sa.and_(*each) for each in alternatives))]).subquery("sqlaqueue_examined")
        elif len(alternatives) > 1:
            # The server merges the parts, as each is in the order of the index. Without ORDER BY of its own, each would
            # be read as a whole and sorted.
            parts = sa.union_all(*map(part, alternatives)).subquery("sqlaqueue_parts")
            merged = [each.by(parts.c[labels[each.column.name]]) for each in by]
            rows = sa.select(*parts.c).order_by(*merged).limit(limit).subquery("sqlaqueue_examined")
        else:
            rows = part(alternatives[0] if alternatives else ()).subquery("sqlaqueue_examined")
        if not numbered:
            return Examined(rows, {name: rows.c[label] for name, label in labels.items()})
        examined = [each.by(rows.c[labels[each.column.name]]) for each in by]
        number = sa.func.row_number().over(order_by=examined).label("number")
        counted = sa.select(*rows.c, number).subquery("sqlaqueue_numbered")
        return Examined(counted, {name: counted.c[label] for name, label in labels.items()}, counted.c.number)

    def outside(self, served: Sequence[FilterPart], jobs: Exposed) -> list[sa.ColumnElement[bool]]:
        return [each.holds(jobs) for each in self.parts if each not in served]

    def walk(
        self,
        order: JobOrder,
        served: Sequence[FilterPart],
        position: Texts | None,
        need: int,
        *,
        equals: Sequence[tuple[sa.Column[Any], str | None]] = (),
    ) -> AnySelect:
        """Return the first ``need`` jobs after a position, in the order of an index, of a window of rows.

        If the order is not total, the jobs of each group that is equal in the columns of the index are sorted by their
        keys, but the last group may lack some of its jobs.

        :param served: the conditions of the filter that restrict the part of the index.
        :param position: the values of the columns of the index.
        :param equals: further conditions, which no index serves.
        """
        by, rest = order.columns, order.rest
        # The server knows that a column which equals a constant changes no order, but not so of one which is null.
        nulls = {part.column.name for part in self.parts if part.column is not None and part.is_null}
        prefix = [each for each in order.prefix if each.column.name in nulls]
        clauses = [part.clause for part in served if part.clause is not None]
        alternatives = [] if position is None else after(by, [each.column for each in by], position)
        has_outside = len(served) < len(self.parts) or bool(equals)
        limit = WINDOW if has_outside else need
        found = self.examine(clauses, [*prefix, *by], alternatives, limit, numbered=has_outside)
        jobs = self.source.expose(found.rows, found.stored)
        values = [found.stored[each.column.name] for each in (*by, *rest)]
        statement = sa.select(*self.results.columns(jobs, values)).select_from(jobs.rows)
        if found.number is not None:
            same = [equal(column, found.stored[column.name], text) for column, text in equals]
            matches = sa.and_(*self.outside(served, jobs), *same)
            is_last = found.number == limit
            statement = statement.add_columns(matches.label("matches"), is_last.label("is_last"))
            statement = statement.where(sa.or_(matches, is_last))
        if not alternatives and position is not None:
            statement = statement.where(sa.false())
        in_order = [each.by(found.stored[each.column.name]) for each in (*prefix, *by)]
        statement = statement.order_by(*in_order).limit(need)
        if not rest:
            return statement
        raw = [value.label(f"raw_{number}") for number, value in enumerate(values)]
        first = statement.add_columns(*raw).subquery("sqlaqueue_first_jobs")
        sorted_by = [each.by(first.c[f"raw_{number}"]) for number, each in enumerate((*by, *rest))]
        shown = [column for column in first.c if not column.name.startswith("raw_")]
        group = sa.func.dense_rank().over(order_by=sorted_by[: len(by)]).label("group_number")
        return sa.select(*shown, group).order_by(*sorted_by)

    def sort(
        self,
        clauses: Sequence[sa.ColumnElement[bool]],
        served: Sequence[FilterPart],
        by: Sequence[OrderColumn],
        position: Texts | None,
        need: int,
    ) -> AnySelect:
        found = self.examine(clauses, (), (), WINDOW, numbered=False)
        jobs = self.source.expose(found.rows, found.stored)
        values = [found.stored[each.column.name] for each in by]
        statement = sa.select(*self.results.columns(jobs, values)).select_from(jobs.rows)
        statement = statement.where(*self.outside(served, jobs))
        if position is not None:
            later = [sa.and_(*each) for each in after(by, values, position)]
            statement = statement.where(sa.or_(sa.false(), *later))
        return statement.order_by(*(each.by(value) for each, value in zip(by, values, strict=True))).limit(need)

    def count(self, clauses: Sequence[sa.ColumnElement[bool]], limit: int) -> AnySelect:
        some: AnySelect = sa.select(sa.literal_column("1").label("one")).select_from(self.source.table).where(*clauses)
        return sa.select(sa.func.count()).select_from(some.limit(limit).subquery("sqlaqueue_some"))


FEW = 1000
"""The number of due jobs that are read and sorted before a window of rows is."""


@dataclass(frozen=True)
class FoundJobs:
    jobs: list[JobRow]
    stop: tuple[str | None, ...] | None = None
    """The position up to which rows were examined, if that was not the end of the list."""


@dataclass(frozen=True, eq=False)
class JobReader:
    """Reads the next jobs of a list after a position, by the cheapest way that has a bound.

    * If an index other than that of the order leaves few rows, they are read and sorted. So are due jobs, which the
      index of claims finds priority by priority.
    * Else the index of the order is read from the position on, up to a window of rows.
    * An index in which many rows may be equal gives them in no order of their keys. Rows of one group are then read and
      sorted if they are few; if they are many, the jobs of the group are found by walking in the order of the keys.
    """

    session: Session
    windows: Windows
    orders: Orders

    def read(self, order: JobOrder, position: Texts | None, need: int) -> FoundJobs:
        """Return the next ``need`` jobs after a position, fewer at the end of the list or of the window."""
        source = self.windows.source
        if order.few is not None:
            return self._sorted(clauses_of(order.few), order.few, order.all, position, need)
        narrow = self.first_of_few(self.orders.narrower(order))
        if narrow is not None:
            return self._sorted(clauses_of(narrow), narrow, order.all, position, need)
        is_served = all(part in self.served_by(order) for part in self.windows.parts if part.is_of_list)
        is_due = source.wanted.only == "due"
        few = None if is_due and is_served else self.few()
        if few is None:
            return self._in_order(order, position, need)
        number = self.counts(few)
        if number <= (min(FEW, WINDOW) if is_due else WINDOW):
            return self._sorted([source.is_among(few.keys)], [], order.all, position, need)
        found = self._in_order(order, position, need)
        if number <= WINDOW and found.stop is not None and len(found.jobs) < need:
            return self._sorted([source.is_among(few.keys)], [], order.all, position, need)
        return found

    def few(self) -> Few | None:
        return self.windows.source.few(WINDOW + 1) if self.orders.pages.finds_due else None

    def _in_order(self, order: JobOrder, position: Texts | None, need: int) -> FoundJobs:
        return (self._walked if order.is_total else self._grouped)(order, position, need)

    def first_of_few(self, candidates: Sequence[list[FilterPart]]) -> list[FilterPart] | None:
        return next((some for some in candidates if self.has_few(clauses_of(some))), None)

    def few_parts(self) -> list[FilterPart] | None:
        """Return conditions that leave few rows, which can be sorted by any column; None if an index finds none."""
        return self.first_of_few([*self.orders.served(), self.windows.source.fixed()])

    def has_few(self, clauses: Sequence[sa.ColumnElement[bool]]) -> bool:
        return self._scalar(self.windows.count(clauses, WINDOW + 1)) <= WINDOW

    def counts(self, few: Few) -> int:
        """Return the number of keys, or one more than a window has if there may be others."""
        number = self._scalar(sa.select(sa.func.count()).select_from(few.keys.subquery("sqlaqueue_some")))
        has_more = few.has_more is not None and number <= WINDOW and bool(self._scalar(few.has_more))
        return WINDOW + 1 if has_more else number

    def served_by(self, order: JobOrder) -> list[FilterPart]:
        """Return the conditions of the filter that the index of an order serves."""
        names = {each.column.name for each in (*order.prefix, order.columns[0])}
        fixed = self.windows.source.fixed()
        names |= {part.column.name for part in fixed if part.column is not None}
        return [part for part in self.windows.parts if part.column is not None and part.column.name in names]

    def _sorted(
        self, clauses: Sequence[Any], served: Sequence[FilterPart], by: Sequence[Any], position: Texts | None, need: int
    ) -> FoundJobs:
        rows = self._rows(self.windows.sort(clauses, served, by, position, need))
        return FoundJobs([self.windows.results.job(row) for row in rows])

    def _walked(
        self,
        order: JobOrder,
        position: Texts | None,
        need: int,
        equals: Sequence[tuple[sa.Column[Any], str | None]] = (),
    ) -> FoundJobs:
        return self._found(self._rows(self.windows.walk(order, self.served_by(order), position, need, equals=equals)))

    def _found(self, rows: Sequence[Any]) -> FoundJobs:
        results = self.windows.results
        jobs = [results.job(row) for row in rows if getattr(row, "matches", True)]
        last = rows[-1] if rows else None
        return FoundJobs(jobs, results.job(last).position if getattr(last, "is_last", False) else None)

    def _grouped(self, order: JobOrder, position: Texts | None, need: int) -> FoundJobs:
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
                return FoundJobs([*jobs, *self._found(rows).jobs])
            # The last group may have more jobs, which come before those that were found.
            last = rows[-1]
            jobs += self._found([row for row in rows if row.group_number != last.group_number]).jobs
            group = self.windows.results.job(last).position[:width]
            if stopped:
                return FoundJobs(jobs, tuple(group))
            found = self._in_group(order, group, None, need - len(jobs))
            jobs += found.jobs
            if found.stop is not None or len(jobs) >= need:
                return FoundJobs(jobs, found.stop)

    def _in_group(self, order: JobOrder, group: Texts, key: Texts | None, need: int) -> FoundJobs:
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
        return FoundJobs(jobs, None if found.stop is None else (*group, *found.stop))

    def _rows(self, statement: AnySelect) -> Sequence[Any]:
        return self.session.execute(statement, bind_arguments={"mapper": self.windows.source.spec.mapper}).all()

    def _scalar(self, statement: AnySelect) -> int:
        ((number,),) = self._rows(statement)
        return int(number)


def clauses_of(parts: Sequence[FilterPart]) -> list[sa.ColumnElement[bool]]:
    return [part.clause for part in parts if part.clause is not None]
