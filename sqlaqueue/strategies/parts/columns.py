"""Columns of the model's table in the subqueries and CTEs of a statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapper
from sqlalchemy.sql.elements import KeyedColumnElement


def attribute_names(mapper: Mapper[Any]) -> dict[sa.ColumnElement[Any], str]:
    """Return the columns of a class with the names of their attributes."""
    return {column: attribute.key for attribute in mapper.column_attrs for column in attribute.columns}


def named(columns: Iterable[sa.Column[Any]]) -> list[sa.Label[Any]]:
    """Return columns for the RETURNING of a CTE, labelled with their keys.

    SQLAlchemy 2.1 refers to a column whose name has more than 57 characters by a shorter name, which the RETURNING of
    an UPDATE or DELETE does not have.
    """
    return [column.label(column.key) for column in columns]


def column_of(rows: sa.FromClause, column: KeyedColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return the column of ``rows`` that stems from ``column`` of the model's table."""
    found = rows.corresponding_column(column)
    if found is None:
        msg = f"{column} is not among the columns of {rows}"
        raise LookupError(msg)
    return found


def numbered(prefix: str, columns: Sequence[sa.Column[Any]]) -> list[sa.Label[Any]]:
    """Return columns labelled ``prefix_0``, ``prefix_1`` and so on."""
    return [column.label(f"{prefix}_{number}") for number, column in enumerate(columns)]


def same(columns: Sequence[sa.ColumnElement[Any]], others: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
    """Return the condition that columns are equal in pairs."""
    return sa.and_(*(column == other for column, other in zip(columns, others, strict=True)))


def named_in(rows: sa.FromClause, columns: Iterable[sa.Column[Any]]) -> list[sa.ColumnElement[Any]]:
    """Return the columns of ``rows`` that stem from ``columns`` of the model's table."""
    return [column_of(rows, column) for column in columns]
