"""Where the jobs of a list are stored, and in which orders it can be read.

They are in the queue's table, or in the table of dead letters. The orders are those of the indexes that the live table
has. The sorted column leads the index, or follows columns that the filter gives one value. The further columns of the
index come next, and the key last, so that the order of two jobs is never left open.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql.due_times import due_keys
from sqlaqueue.postgresql.facts import OrderedIndex
from sqlaqueue.postgresql.side_tables import key_json, stored_rows
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.sql.portable import nulls_first, nulls_last
from sqlaqueue.sql.types import object_name
from sqlaqueue.strategies.attach import index_name
from sqlaqueue.strategies.delete_returning import MessageStrategy
from sqlaqueue.strategies.delete_row import stored_columns
from sqlaqueue.strategies.update_status import has_expired
from sqlaqueue.web.data.engines import Pages, pages_of
from sqlaqueue.web.data.job_columns import OTHER, JobColumn, JobColumns, state_of, states_of
from sqlaqueue.web.data.job_filters import TOLD_BY, Condition, JobsWanted

Rows = Mapping[str, sa.ColumnElement[Any]]
"""The columns of a source's table, or of a subquery of it, by their names in the database."""


@dataclass(frozen=True, eq=False)
class Exposed:
    rows: sa.FromClause
    values: Mapping[str, sa.ColumnElement[Any]]
    keys: Sequence[sa.ColumnElement[Any]]
    state: sa.ColumnElement[str]


@dataclass(frozen=True, eq=False)
class FilterPart:
    holds: Callable[[Exposed], sa.ColumnElement[bool]]
    """Returns the condition on jobs."""
    column: sa.Column[Any] | None = None
    """The column of the source's table, an index of which may serve the condition."""
    clause: sa.ColumnElement[bool] | None = None
    """The condition, on that column."""
    is_equality: bool = False
    is_null: bool = False
    """Whether it is the condition that the column is null."""
    is_of_list: bool = False
    """Whether it is the condition on the state, or on which jobs of the state are listed."""


@dataclass(frozen=True, eq=False)
class Few:
    """The keys of the jobs of a list, from a table or an index that has no others: often few."""

    keys: AnySelect
    is_exact: bool = False
    """Whether each of them is a job of the list."""
    has_more: AnySelect | None = None
    """Whether there may be others."""


class Source:
    def __init__(self, columns: JobColumns, wanted: JobsWanted) -> None:
        self.columns, self.wanted, self.spec = columns, wanted, columns.spec
        self.table: sa.Table = self.spec.table
        self.keys: Sequence[sa.Column[Any]] = self.spec.keys
        self.read: Sequence[sa.Column[Any]] = [each.column for each in columns.values()]
        """The columns of the table that :meth:`expose` needs."""

    def fixed(self) -> list[FilterPart]:
        return []

    def expose(self, rows: sa.FromClause, stored: Rows) -> Exposed:
        values = {name: stored[each.column.name] for name, each in self.columns.items()}
        status = self.columns.by_role.get("status")
        pending: Any = sa.literal_column("'pending'", sa.Text())
        state = pending if status is None else state_of(self.spec, values[status.name])
        return Exposed(rows, values, [values[each.name] for each in self.columns.of_key], state)

    def parts(self) -> list[FilterPart]:
        wanted, found = self.wanted, [*self.fixed(), *map(self._of_condition, self.wanted.conditions)]
        if wanted.error is not None:
            found.append(FilterPart(lambda jobs: wanted.has_error(jobs.values)))
        if wanted.message is not None:
            found.append(FilterPart(lambda jobs: wanted.has_message(jobs.values)))
        return [*found, *self._of_key(), *self._of_state(), *self._of_only()]

    def _of_condition(self, condition: Condition) -> FilterPart:
        serves = condition.is_equality or condition.is_range
        return FilterPart(
            lambda jobs: condition.on(jobs.values[condition.column.name]),
            self.stored(condition.column) if serves else None,
            condition.on(condition.column.column) if serves else None,
            condition.is_equality,
            condition.is_equality and condition.operator == "null",
        )

    def stored(self, column: JobColumn) -> sa.Column[Any] | None:
        return column.column

    def _of_key(self) -> list[FilterPart]:
        def part(number: int, value: sa.ColumnElement[Any]) -> FilterPart:
            column = self.columns.of_key[number].column
            return FilterPart(
                lambda jobs: _same(jobs.keys[number], value), column, _same(column, value), is_equality=True
            )

        return [part(number, value) for number, value in enumerate(self.wanted.key_values())]

    def _of_state(self) -> list[FilterPart]:
        state = self.wanted.state
        if state is None or not self.spec.has("status"):
            return []
        if state == OTHER:
            # What is in none of the other lists. No index serves this, so that a window of rows is searched.
            listed = [each for each in states_of(self.spec) if each != OTHER]
            return [FilterPart(lambda jobs: jobs.state.not_in(listed))]
        in_state = self.spec.in_state(state)
        status = self.spec.columns["status"]
        return [FilterPart(lambda jobs: jobs.state == state, status, in_state, is_equality=True, is_of_list=True)]

    def _of_only(self) -> list[FilterPart]:
        wanted, spec = self.wanted, self.spec
        if wanted.only is None:
            return []
        column = spec.columns[TOLD_BY[wanted.only]]

        def holds(time: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
            if wanted.only == "due":
                return sa.and_(*spec.due(time, wanted.moment))
            return has_expired(time, wanted.moment)

        name = self.columns.by_role[TOLD_BY[wanted.only]].name
        if wanted.only == "due" and column.nullable:
            # With nulls, which are due, it is no range of an index.
            return [FilterPart(lambda jobs: holds(jobs.values[name]), is_of_list=True)]
        return [FilterPart(lambda jobs: holds(jobs.values[name]), column, holds(column), is_of_list=True)]

    def name_of(self, column: sa.Column[Any]) -> str | None:
        """Return the name under which a list is sorted by a column of the table; None if that is not allowed."""
        found = self.columns.stored_as(column.name)
        return None if found is None or (found.is_redacted and not found.is_key) else found.name

    def implies(self, index: str) -> bool:
        """Return whether the filter implies the predicate of a partial index, which is one of the queue's own."""
        name, table = object_name, self.spec.table.name
        states = {
            name("ix", table, "queue", "claim"): ("pending",),
            name("ix", table, "queue", "lease"): ("processing",),
            str(index_name(self.spec.table)): tuple(self.spec.config.retention),
        }
        return self.wanted.state is not None and self.wanted.state in states.get(index, ())

    def few(self, limit: int) -> Few | None:
        spec, strategy, wanted = self.spec, self.spec.strategy, self.wanted
        if wanted.state != "pending":
            return None
        claimed_from = next((index.table for index in spec.claim_indexes if wanted.only == "due"), None)
        if claimed_from is spec.table:
            # Another name, as the statement around it reads the table as well.
            rows = spec.table.alias("sqlaqueue_due_job")
            waits = [rows.c[spec.columns["status"].key] == spec.literal("pending")] if spec.has("status") else []
            keys = [rows.c[key.key] for key in spec.keys]
            found, has_more = due_keys(spec, rows, keys, waits, at=wanted.moment, limit=limit)
            return Few(found, is_exact=True, has_more=has_more)
        if not isinstance(strategy, MessageStrategy):
            return None
        messages = strategy.messages(spec)
        if claimed_from is messages.table and spec.columns["run_at"].key in messages.table.c:
            jobs, waits = messages.jobs, messages.waits
            found, has_more = due_keys(spec, messages.table, jobs, waits, at=wanted.moment, limit=limit)
            return Few(found, has_more=has_more)
        return Few(sa.select(*messages.jobs).where(*messages.waits).limit(limit))

    def is_among(self, keys: AnySelect) -> sa.ColumnElement[bool]:
        own: Any = sa.tuple_(*self.keys) if len(self.keys) > 1 else self.keys[0]
        among: sa.ColumnElement[bool] = own.in_(keys)
        return among


def _same(key: sa.ColumnElement[Any], value: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    return sa.type_coerce(key, value.type) == value


class DeadLetters(Source):
    """The failed and cancelled jobs of a queue whose claims delete rows."""

    def __init__(self, columns: JobColumns, wanted: JobsWanted) -> None:
        super().__init__(columns, wanted)
        self.table = self.spec.side_tables[DEAD_LETTER]
        self.keys, self.read = [self.table.c.key], list(self.table.c)

    def fixed(self) -> list[FilterPart]:
        queue = self.table.c.queue
        return [FilterPart(lambda _: sa.true(), queue, queue == self.spec.name, is_equality=True)]

    def expose(self, rows: sa.FromClause, stored: Rows) -> Exposed:
        letter = stored_rows(stored["row"], stored_columns(self.spec))
        values: dict[str, sa.ColumnElement[Any]] = {
            name: letter.c[each.column.key] if each.column.computed is None else sa.cast(sa.null(), each.stored_type)
            for name, each in self.columns.items()
        }
        instead = {"last_error": stored["error"], "finished_at": stored["created_at"]}
        roles = self.columns.by_role
        values |= {roles[role].name: value for role, value in instead.items() if role in roles}
        keys = [values[each.name] for each in self.columns.of_key]
        return Exposed(rows.join(letter, sa.true()), values, keys, stored["state"])

    def stored(self, column: JobColumn) -> sa.Column[Any] | None:
        return self.table.c.created_at if column.role == "finished_at" else None

    def _of_key(self) -> list[FilterPart]:
        values = self.wanted.key_values()
        if not values:
            return []
        key = self.table.c.key
        return [FilterPart(lambda _: sa.true(), key, key == key_json(values), is_equality=True)]

    def _of_state(self) -> list[FilterPart]:
        state, wanted = self.table.c.state, self.wanted.state
        return [FilterPart(lambda jobs: jobs.state == wanted, state, state == wanted, is_equality=True)]

    def name_of(self, column: sa.Column[Any]) -> str | None:
        if column is self.table.c.key:
            return self.columns.of_key[0].name
        finished = self.columns.by_role.get("finished_at")
        if column is self.table.c.created_at and finished is not None and not finished.is_redacted:
            return finished.name
        return None

    def implies(self, index: str) -> bool:
        return False

    def few(self, limit: int) -> Few | None:
        return None


def source_of(columns: JobColumns, wanted: JobsWanted) -> Source:
    if not columns.spec.has("status") and wanted.state in {"failed", "cancelled"}:
        return DeadLetters(columns, wanted)
    return Source(columns, wanted)


# -- orders -----------------------------------------------------------------------------------------------------------


_TABLE_IDS = "sqlaqueue_table_ids"
"""The key in ``session.info`` of the numbers of tables."""

KEPT = 60.0
"""The seconds for which the indexes of a table are remembered."""

PROBED = 3
"""The number of indexes of which it is counted whether they leave few rows."""

_known = weakref.WeakKeyDictionary[sa.Engine, dict[Any, tuple[float, Sequence[OrderedIndex]]]]()


@dataclass(frozen=True, eq=False)
class OrderColumn:
    column: sa.Column[Any]
    is_descending: bool
    nulls_first: bool
    is_nullable: bool

    def reversed(self) -> OrderColumn:
        return replace(self, is_descending=not self.is_descending, nulls_first=not self.nulls_first)

    def by(self, value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        direction = value.desc() if self.is_descending else value.asc()
        if not self.is_nullable:
            return direction
        return nulls_first(direction) if self.nulls_first else nulls_last(direction)


@dataclass(frozen=True, eq=False)
class JobOrder:
    name: str
    """The column that it is named after."""
    is_descending: bool
    prefix: tuple[OrderColumn, ...]
    """The columns of the index before, to which the filter gives one value each."""
    columns: tuple[OrderColumn, ...]
    """The columns of the index from the sorted one on."""
    rest: tuple[OrderColumn, ...] = ()
    """The columns of the key, if jobs may be equal in those of the index."""
    few: Sequence[FilterPart] | None = None
    """The conditions that leave few rows, which are read and sorted; None for the order of an index."""

    @property
    def is_total(self) -> bool:
        return not self.rest

    @property
    def all(self) -> tuple[OrderColumn, ...]:
        return (*self.columns, *self.rest)

    @property
    def sort(self) -> str:
        return f"-{self.name}" if self.is_descending else self.name

    def reversed(self) -> JobOrder:
        prefix, columns, rest = (
            tuple(each.reversed() for each in some) for some in (self.prefix, self.columns, self.rest)
        )
        return JobOrder(self.name, not self.is_descending, prefix, columns, rest, self.few)


class Orders:
    def __init__(
        self, source: Source, parts: Sequence[FilterPart], indexes: Sequence[OrderedIndex], pages: Pages
    ) -> None:
        self.source, self.parts, self.pages = source, parts, pages
        self.indexes = [each for each in indexes if not each.is_partial or source.implies(each.name)]
        self._equal = {part.column.name for part in parts if part.column is not None and part.is_equality}
        self._ranges = {part.column.name for part in parts if part.column is not None and not part.is_equality}

    def names(self) -> list[str]:
        """Return the columns by which the jobs can be sorted; the first one is the key's."""
        found = dict.fromkeys([self.by_key(is_descending=False).name])
        for index in self.indexes:
            # A column to which the filter gives one value is sorted in any order.
            for each in index.columns[: self._after_prefix(index) + 1]:
                name = self.source.name_of(self._column(each))
                if name is not None:
                    found.setdefault(name)
        return list(found)

    def by_key(self, *, is_descending: bool) -> JobOrder:
        keys = _keys(self.source.keys, is_descending=is_descending)
        prefix: tuple[OrderColumn, ...] = ()
        for index in self.indexes:
            length = self._after_prefix(index)
            follow = [column.name for column in self.source.keys]
            directions = set(index.descending[length : length + len(follow)])
            if list(index.columns[length : length + len(follow)]) == follow and len(directions) == 1:
                before = self._prefix(index, length, flip=directions != {is_descending})
                prefix = max(prefix, before, key=len)
        return JobOrder(self.source.columns.of_key[0].name, is_descending, prefix, keys)

    def by(self, name: str, *, is_descending: bool) -> JobOrder | None:
        by_key = self.by_key(is_descending=is_descending)
        equal = [self.source.name_of(self._column(each)) for each in self._equal]
        if name == by_key.name or name in equal:
            return replace(by_key, name=name)
        found = [
            order
            for index in self.indexes
            if (order := self._in_order_of(index, name, is_descending=is_descending)) is not None
        ]
        # One that the filter restricts most; then one that needs no sort.
        return max(found, key=lambda order: (len(order.prefix), order.is_total), default=None)

    def of_few(self, by: JobColumn, few: Sequence[FilterPart], *, is_descending: bool) -> JobOrder | None:
        """Return an order that no index has, of few rows; None if the source does not store the column."""
        stored = self.source.stored(by)
        if stored is None:
            return None
        # Without a time a job is last in either direction that a list begins with.
        column = OrderColumn(stored, is_descending, nulls_first=False, is_nullable=True)
        return JobOrder(
            by.name, is_descending, (), (column,), _keys(self.source.keys, is_descending=is_descending), few
        )

    def is_given(self, column: JobColumn) -> bool:
        """Return whether the filter gives a column one value."""
        stored = self.source.stored(column)
        return stored is not None and stored.name in self._equal

    def narrower(self, order: JobOrder) -> list[list[FilterPart]]:
        """Return conditions that another index serves, and which that of ``order`` does not; the most first."""
        own = {each.column.name for each in (*order.prefix, order.columns[0])}
        return [some for some in self.served() if not _names(some) <= own]

    def served(self) -> list[list[FilterPart]]:
        """Return the conditions that the indexes serve: those of each, if they are not met by every job."""
        fixed = _names(self.source.fixed())
        found: dict[frozenset[str], list[FilterPart]] = {}
        for index in self.indexes:
            length = self._after_prefix(index)
            names = {*index.columns[:length], *self._implied_by(index)}
            if length < len(index.columns) and index.columns[length] in self._ranges:
                names.add(index.columns[length])
            parts = [part for part in self.parts if part.column is not None and part.column.name in names]
            if parts and not names <= fixed:
                found.setdefault(frozenset(names), parts)
        return sorted(found.values(), key=len, reverse=True)[:PROBED]

    def _in_order_of(self, index: OrderedIndex, name: str, *, is_descending: bool) -> JobOrder | None:
        length = self._after_prefix(index)
        if length >= len(index.columns):
            return None
        flip = index.descending[length] != is_descending
        columns: list[OrderColumn] = []
        keys = {key.name for key in self.source.keys}
        for number in range(length, len(index.columns)):
            column = self._column(index.columns[number])
            sorted_by = self.source.name_of(column)
            # A cursor has the values of all columns, and must not show those of a redacted one.
            if sorted_by is None or (not columns and sorted_by != name):
                break
            columns.append(self._order_column(index, number, flip=flip))
            keys.discard(column.name)
            if not keys:
                break
        if not columns:
            return None
        is_whole = index.is_whole and len(columns) == len(index.columns) - length
        is_unique = index.is_unique and is_whole and not any(each.is_nullable for each in columns)
        rest = [] if is_unique else [key for key in self.source.keys if key.name in keys]
        prefix = self._prefix(index, length, flip=flip)
        return JobOrder(name, is_descending, prefix, tuple(columns), _keys(rest, is_descending=is_descending))

    def _prefix(self, index: OrderedIndex, length: int, *, flip: bool) -> tuple[OrderColumn, ...]:
        found = [self._order_column(index, number, flip=flip) for number in range(length)]
        # The columns of the predicate of a partial index have one value as well.
        names = self._implied_by(index) - {each.column.name for each in found}
        found += [OrderColumn(self._column(name), flip, flip, is_nullable=False) for name in sorted(names)]
        return tuple(found)

    def _implied_by(self, index: OrderedIndex) -> set[str]:
        return {self.source.spec.columns["status"].name} if index.is_partial else set()

    def _order_column(self, index: OrderedIndex, number: int, *, flip: bool) -> OrderColumn:
        is_descending, nulls_first = index.descending[number] != flip, index.nulls_first[number] != flip
        return OrderColumn(self._column(index.columns[number]), is_descending, nulls_first, index.nullable[number])

    def _after_prefix(self, index: OrderedIndex) -> int:
        """Return the number of columns at the beginning of an index to which the filter gives one value each."""
        places = (place for place, name in enumerate(index.columns) if name not in self._equal)
        return next(places, len(index.columns))

    def _column(self, name: str) -> sa.Column[Any]:
        return next(column for column in self.source.table.c if column.name == name)


def _names(parts: Sequence[FilterPart]) -> set[str]:
    return {part.column.name for part in parts if part.column is not None}


def _keys(columns: Sequence[sa.Column[Any]], *, is_descending: bool) -> tuple[OrderColumn, ...]:
    return tuple(OrderColumn(each, is_descending, is_descending, is_nullable=False) for each in columns)


def orders_of(session: Session, source: Source, parts: Sequence[FilterPart]) -> Orders:
    connection = session.connection(bind_arguments={"mapper": source.spec.mapper})
    # Within a transaction a name leads to the same table; a page asks several times.
    pages = pages_of(session, source.spec.mapper)
    ids: dict[sa.Table, Any] = session.info.setdefault(_TABLE_IDS, {})
    if source.table not in ids:
        ids[source.table] = pages.table_id(connection, source.table)
    number = ids[source.table]
    if number is None:
        return Orders(source, parts, [], pages)
    known = _known.setdefault(connection.engine, {})
    until, indexes = known.get(number, (0.0, ()))
    if time.monotonic() >= until:
        mapped = {column.name for column in source.table.c}
        indexes = [_until_unmapped(each, mapped) for each in pages.ordered_indexes(connection, number)]
        known[number] = time.monotonic() + KEPT, indexes
    return Orders(source, parts, indexes, pages)


def _until_unmapped(index: OrderedIndex, mapped: set[str]) -> OrderedIndex:
    """Return an index without the columns from the first one on that the model does not have."""
    length = next((place for place, name in enumerate(index.columns) if name not in mapped), len(index.columns))
    return index if length == len(index.columns) else replace(index, columns=index.columns[:length], is_whole=False)
