"""The SQLSTATE of a database error, whichever driver raised it."""

from __future__ import annotations

from typing import Any

from sqlalchemy.exc import DBAPIError

from sqlaqueue.sql.engine import engine_of_error

INSUFFICIENT_PRIVILEGE = "42501"
NOT_NULL_VIOLATION = "23502"
UNIQUE_VIOLATION = "23505"
UNDEFINED_TABLE = "42P01"
UNDEFINED_COLUMN = "42703"


def sqlstate(error: DBAPIError) -> str | None:
    """Return the SQLSTATE of an error, None if the error did not come from the server."""
    other = engine_of_error(error)
    if other is not None:
        return other.sqlstate(error)
    # psycopg and asyncpg name it sqlstate, psycopg2 names it pgcode.
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


def violated_constraint(error: DBAPIError) -> str | None:
    """Return the name of the constraint or unique index that a statement has violated; None for other errors."""
    other = engine_of_error(error)
    if other is not None:
        return other.violated_constraint(error)
    return _said(error, "constraint_name")


def violated_table(error: DBAPIError) -> str | None:
    """Return the name of the table whose constraint was violated, by a statement or at a commit; None otherwise."""
    other = engine_of_error(error)
    if other is not None:
        return other.violated_table(error)
    is_violation = violated_constraint(error) is not None or violated_column(error) is not None
    return _said(error, "table_name") if is_violation else None


def violated_column(error: DBAPIError) -> str | None:
    """Return the name of the column that a statement has set to NULL and that may not be; None for other errors."""
    other = engine_of_error(error)
    if other is not None:
        return other.violated_column(error)
    return _said(error, "column_name") if sqlstate(error) == NOT_NULL_VIOLATION else None


def _said(error: DBAPIError, what: str) -> str | None:
    driver: Any = error.orig
    # psycopg and psycopg2 have a diag. SQLAlchemy wraps the error of asyncpg, which has the names itself.
    for place in (getattr(driver, "diag", None), getattr(driver, "__cause__", None)):
        name = getattr(place, what, None)
        if isinstance(name, str):
            return name
    return None
