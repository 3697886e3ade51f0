"""INSERT .. ON CONFLICT on the primary key of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from sqlaqueue._typing import AnySelect

Rows = Mapping[str, Any] | tuple[Sequence[str], AnySelect]
"""The values of one row, or the names of columns with a SELECT of their values."""


def insert_or_ignore(table: sa.Table, rows: Rows) -> sa.Insert:
    """Return an INSERT that leaves existing rows as they are."""
    return _insert(table, rows).on_conflict_do_nothing()


def insert_or_replace(
    table: sa.Table, rows: Rows, *, replaced: Sequence[str] = (), raised: Sequence[str] = ()
) -> sa.Insert:
    """Return an INSERT that writes the columns ``replaced`` of existing rows, and ``raised`` where they are smaller."""
    insert = _insert(table, rows)
    values: dict[str, Any] = {name: insert.excluded[name] for name in replaced}
    values |= {name: sa.func.greatest(table.c[name], insert.excluded[name]) for name in raised}
    return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=values)


def insert_unless(
    table: sa.Table,
    rows: Rows | None,
    *,
    unique: Sequence[sa.ColumnElement[Any]],
    where: sa.ColumnElement[bool] | None,
) -> sa.Insert:
    """Return an INSERT that inserts no row whose values in a unique index exist already.

    It names the index, so that a violation of another constraint is an error.
    """
    insert = postgresql.insert(table) if rows is None else _insert(table, rows)
    return insert.on_conflict_do_nothing(index_elements=list(unique), index_where=where)


def _insert(table: sa.Table, rows: Rows) -> postgresql.Insert:
    insert = postgresql.insert(table)
    return insert.from_select(*rows) if isinstance(rows, tuple) else insert.values(**rows)
