"""The SQLSTATE of a database error, whichever driver raised it."""

from __future__ import annotations

from typing import Any

from sqlalchemy.exc import DBAPIError

INSUFFICIENT_PRIVILEGE = "42501"
UNIQUE_VIOLATION = "23505"
UNDEFINED_TABLE = "42P01"
UNDEFINED_COLUMN = "42703"


def sqlstate(error: DBAPIError) -> str | None:
    """Return the SQLSTATE of an error, None if the error did not come from the server."""
    # psycopg and asyncpg name it sqlstate, psycopg2 names it pgcode.
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)


def violated_constraint(error: DBAPIError) -> str | None:
    """Return the name of the constraint or unique index that a statement has violated; None for other errors."""
    driver: Any = error.orig
    # psycopg and psycopg2 have a diag. SQLAlchemy wraps the error of asyncpg, which has the name itself.
    for place in (getattr(driver, "diag", None), getattr(driver, "__cause__", None)):
        name = getattr(place, "constraint_name", None)
        if isinstance(name, str):
            return name
    return None
