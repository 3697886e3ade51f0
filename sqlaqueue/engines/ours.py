"""Which statements, functions and tables are translated: the library's, and no others.

A program uses a prepared engine for its own tables as well. What it writes for these means the same as before.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.engines.steps import elements
from sqlaqueue.engines.types import undecorated
from sqlaqueue.postgresql.ddl.attach import queue_of
from sqlaqueue.queue.portable import plain_form

_PREFIX = "sqlaqueue_"


def is_ours(table: Any) -> bool:
    """Return whether a table is one of a queue, or one of those that the library adds."""
    return isinstance(table, sa.Table) and (table.name.startswith(_PREFIX) or queue_of(table) is not None)


def uses_our_tables(statement: Any) -> bool:
    """Return whether a statement reads or changes such a table.

    Nothing else decides, as SQLAlchemy caches what a statement is compiled to by its structure.
    """
    return any(is_ours(getattr(each, "table", each)) for each in elements(statement))


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
    return name in {"statement_timestamp", "clock_timestamp"}
