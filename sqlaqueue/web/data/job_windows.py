"""Statements that read jobs in an order, and examine a bounded number of rows, whatever the filter.

An inner SELECT reads the first rows in the order of an index. The conditions that no index serves are outside of it, so
that a filter without matches ends with the window, not with the table. The last row of a window is returned even if it
does not match: the next window begins after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.web.data.job_columns import kind_of_type, stored_type
from sqlaqueue.web.data.job_orders import Order, OrderColumn
from sqlaqueue.web.data.job_rows import Results
from sqlaqueue.web.data.job_sources import Exposed, Part, Source

WINDOW = 10_000
"""The number of rows that one page examines at most."""

Texts = Sequence[str | None]
"""Values by which jobs are sorted, as texts."""


@dataclass(frozen=True, eq=False)
class Examined:
    """Rows of the source's table in a subquery."""

    rows: sa.FromClause
    stored: dict[str, sa.ColumnElement[Any]]
    """Their columns by the names in the database."""
    number: sa.ColumnElement[int] | None = None
    """The number of each row in its window."""


def value_of(column: sa.Column[Any], text: str) -> sa.ColumnElement[Any]:
    """Return the value of a column that is given as a text of a cursor."""
    if kind_of_type(column.type) == "integer":
        return sa.literal(int(text), sa.BigInteger())
    return sa.cast(sa.literal(text, sa.Text()), stored_type(column.type))


def equal(column: sa.Column[Any], value: sa.ColumnElement[Any], text: str | None) -> sa.ColumnElement[bool]:
    """Return the condition that ``value`` is the value of a column that is given as a text; None for null."""
    return value.is_(None) if text is None else _plain(column, value) == value_of(column, text)


def after(
    by: Sequence[OrderColumn], values: Sequence[sa.ColumnElement[Any]], position: Texts
) -> list[list[sa.ColumnElement[bool]]]:
    """Return the conditions that a job comes after a position, as alternatives each of which is one part of an index.

    :param values: the values of a job by which it is sorted.
    """
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
    """Return a value without conversions by the application."""
    return sa.type_coerce(value, stored_type(column.type))


class Windows:
    """Makes the statements for the jobs of one source.

    :param parts: the conditions of the filter.
    """

    def __init__(self, source: Source, parts: Sequence[Part], results: Results) -> None:
        self.source, self.parts, self.results = source, parts, results

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

        def part(alternative: Sequence[sa.ColumnElement[bool]]) -> AnySelect:
            return sa.select(*columns).where(*clauses, *alternative)

        order = [each.by(each.column) for each in by]
        if len(alternatives) > 1:
            # The server merges the parts, as each is in the order of the index. Without ORDER BY of its own, each would
            # be read as a whole and sorted.
            parts = sa.union_all(*(part(each).order_by(*order).limit(limit) for each in alternatives)).subquery(
                "sqlaqueue_parts"
            )
            merged = [each.by(parts.c[labels[each.column.name]]) for each in by]
            rows = sa.select(*parts.c).order_by(*merged).limit(limit).subquery("sqlaqueue_examined")
        else:
            rows = (
                part(alternatives[0] if alternatives else ())
                .order_by(*order)
                .limit(limit)
                .subquery("sqlaqueue_examined")
            )
        if not numbered:
            return Examined(rows, {name: rows.c[label] for name, label in labels.items()})
        order = [each.by(rows.c[labels[each.column.name]]) for each in by]
        number = sa.func.row_number().over(order_by=order).label("number")
        counted = sa.select(*rows.c, number).subquery("sqlaqueue_numbered")
        return Examined(counted, {name: counted.c[label] for name, label in labels.items()}, counted.c.number)

    def outside(self, served: Sequence[Part], jobs: Exposed) -> list[sa.ColumnElement[bool]]:
        """Return the conditions of the filter that are not ``served`` by an index."""
        return [each.holds(jobs) for each in self.parts if each not in served]

    def walk(
        self,
        order: Order,
        served: Sequence[Part],
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
        served: Sequence[Part],
        by: Sequence[OrderColumn],
        position: Texts | None,
        need: int,
    ) -> AnySelect:
        """Return the first ``need`` jobs after a position, of the few rows that meet ``clauses``."""
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
        """Return how many rows meet ``clauses``, counted up to ``limit``."""
        some: AnySelect = sa.select(sa.literal_column("1").label("one")).select_from(self.source.table).where(*clauses)
        return sa.select(sa.func.count()).select_from(some.limit(limit).subquery("sqlaqueue_some"))
