"""Types of PostgreSQL: how values are written and columns compared in SQL that is kept as text."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import CITEXT
from sqlalchemy.types import UserDefinedType

_make_dialect: Any = postgresql.dialect
NEUTRAL: sa.Dialect = _make_dialect(paramstyle="named")
"""Renders SQL that is kept as text. It belongs to no driver, so it doubles no percent sign."""


def plain_type(column: sa.Column[Any]) -> Any:
    """Return the type that a column has in PostgreSQL, without an application's TypeDecorator."""
    plain = column.type.dialect_impl(NEUTRAL)
    return getattr(plain, "impl_instance", plain)


def equals(column: sa.Column[Any]) -> str:
    """Return the operator that compares a column, schema-qualified where it is one of PostgreSQL's own.

    The types of extensions have operators of their own, in the schema in which the extension is installed.
    """
    plain = plain_type(column)
    own = type(plain).__module__.startswith("sqlalchemy.") and not isinstance(plain, CITEXT | UserDefinedType)
    return "OPERATOR(pg_catalog.=)" if own else "="
