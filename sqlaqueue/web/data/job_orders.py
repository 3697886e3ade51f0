"""In which orders a list of jobs can be read: those of the indexes that the live table has.

A list is in the order of an index: the sorted column leads it, or follows columns that the filter gives one value. The
further columns of the index come next, and the key last, so that the order of two jobs is never left open.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog_indexes import ordered_indexes
from sqlaqueue.postgresql.catalog_text import table_oid
from sqlaqueue.postgresql.facts import OrderedIndex
from sqlaqueue.web.data.job_sources import FilterPart, Source

_TABLE_IDS = "sqlaqueue_table_ids"
"""The key in ``session.info`` of the numbers of tables."""

KEPT = 60.0
"""The seconds for which the indexes of a table are remembered."""

PROBED = 3
"""The number of indexes of which it is counted whether they leave few rows."""

_known = weakref.WeakKeyDictionary[sa.Engine, dict[int, tuple[float, Sequence[OrderedIndex]]]]()


@dataclass(frozen=True, eq=False)
class OrderColumn:
    column: sa.Column[Any]
    is_descending: bool
    nulls_first: bool
    is_nullable: bool

    def reversed(self) -> OrderColumn:
        return replace(self, is_descending=not self.is_descending, nulls_first=not self.nulls_first)

    def by(self, value: sa.ColumnElement[Any]) -> sa.UnaryExpression[Any]:
        direction = value.desc() if self.is_descending else value.asc()
        if not self.is_nullable:
            return direction
        return direction.nulls_first() if self.nulls_first else direction.nulls_last()


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
        parts = (tuple(each.reversed() for each in some) for some in (self.prefix, self.columns, self.rest))
        return JobOrder(self.name, not self.is_descending, *parts)


class Orders:
    def __init__(self, source: Source, parts: Sequence[FilterPart], indexes: Sequence[OrderedIndex]) -> None:
        self.source, self.parts = source, parts
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
    ids: dict[sa.Table, int | None] = session.info.setdefault(_TABLE_IDS, {})
    if source.table not in ids:
        ids[source.table] = table_oid(connection, source.table)
    number = ids[source.table]
    if number is None:
        return Orders(source, parts, [])
    known = _known.setdefault(connection.engine, {})
    until, indexes = known.get(number, (0.0, ()))
    if time.monotonic() >= until:
        mapped = {column.name for column in source.table.c}
        indexes = [_until_unmapped(each, mapped) for each in ordered_indexes(connection, number)]
        known[number] = time.monotonic() + KEPT, indexes
    return Orders(source, parts, indexes)


def _until_unmapped(index: OrderedIndex, mapped: set[str]) -> OrderedIndex:
    """Return an index without the columns from the first one on that the model does not have."""
    length = next((place for place, name in enumerate(index.columns) if name not in mapped), len(index.columns))
    return index if length == len(index.columns) else replace(index, columns=index.columns[:length], is_whole=False)
