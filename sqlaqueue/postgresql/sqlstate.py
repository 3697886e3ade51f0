"""The SQLSTATE of a database error, whichever driver raised it."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

INSUFFICIENT_PRIVILEGE = "42501"
UNDEFINED_TABLE = "42P01"
UNDEFINED_COLUMN = "42703"


def sqlstate(error: DBAPIError) -> str | None:
    """Return the SQLSTATE of an error, None if the error did not come from the server."""
    # psycopg and asyncpg name it sqlstate, psycopg2 names it pgcode.
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
