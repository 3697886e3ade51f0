"""Which statements, functions and tables are translated: the library's, and no others.

A program uses a prepared engine for its own tables as well. What it writes for these means the same as before.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.functions import FunctionElement

from sqlaqueue.engines.steps import elements
from sqlaqueue.engines.types import undecorated
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.sql.engine import plain_form

_PREFIX = "sqlaqueue_"
_CLOCKS = frozenset({"statement_timestamp", "clock_timestamp"})


def is_ours(table: Any) -> bool:
    """Return whether a table is one of a queue, or one of those that the library adds."""
    return isinstance(table, sa.Table) and (table.name.startswith(_PREFIX) or queue_of(table) is not None)


def is_translated(statement: Any) -> bool:
    """Return whether a statement is about such a table, or calls the clock of the library.

    A program does not call it, as the functions are PostgreSQL's. Nothing else decides: SQLAlchemy caches what a
    statement is compiled to by its structure.
    """
    return any(is_ours(getattr(each, "table", each)) or _is_clock(each) for each in elements(statement))


def _is_clock(element: Any) -> bool:
    return isinstance(element, FunctionElement) and element.name in _CLOCKS


def has_spans(column: Any) -> bool:
    """Return whether a column of a span is the library's own, which has a number of seconds.

    The program's, those of its queues among them, are what SQLAlchemy makes of an Interval: a moment after 1970.
    """
    if not isinstance(undecorated(getattr(column, "type", None)), sa.Interval):
        return False
    tables = (getattr(base, "table", None) for base in column.base_columns)
    return any(isinstance(table, sa.Table) and table.name.startswith(_PREFIX) for table in tables)


def is_span_of_program(element: Any) -> bool:
    """Return whether an element is a column of a span, and none of the library's own."""
    is_span = isinstance(undecorated(getattr(element, "type", None)), sa.Interval)
    return is_span and isinstance(element, sa.ColumnClause) and not has_spans(element)


def uses_spans(statement: Any) -> bool:
    """Return whether a statement is about columns of spans that are the library's own."""
    tables = {getattr(each, "table", each) for each in elements(statement)}
    return any(has_spans(column) for table in tables if isinstance(table, sa.Table) for column in table.c)


def uses_zones(statement: Any) -> bool:
    """Return whether a statement is about a moment with a time zone, which a prepared engine has in UTC."""
    for each in elements(statement):
        table = getattr(each, "table", each)
        columns = table.c if isinstance(table, sa.Table) else [each]
        if any(has_zone(getattr(column, "type", None)) for column in columns):
            return True
    return False


def has_zone(type_: Any) -> bool:
    """Return whether a type is that of a moment with a time zone."""
    inner = undecorated(type_)
    return isinstance(inner, sa.DateTime) and inner.timezone


def is_moment_of_insert(column: sa.Column[Any]) -> bool:
    """Return whether a server default is the moment of the INSERT, and is to be the same as the library's.

    The ``now()`` of a program's column without a time zone is left to the dialect.
    """
    default: Any = getattr(column.server_default, "arg", None)
    name = getattr(default, "name", None)
    if name == "now":
        return plain_form(default) is not None or has_zone(column.type)
    return name in _CLOCKS
