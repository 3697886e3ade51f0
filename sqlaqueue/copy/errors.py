"""Conversion of driver errors to those of SQLAlchemy, for statements that bypass SQLAlchemy."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

_ASYNCPG = {
    "IntegrityConstraintViolationError": "IntegrityError",
    "SyntaxOrAccessError": "ProgrammingError",
    "PostgresError": "Error",
}
"""Classes of asyncpg whose names differ in SQLAlchemy's DBAPI for asyncpg."""


def raise_as_sqlalchemy(connection: sa.Connection, statement: str, error: Exception) -> None:
    """Raise the error that SQLAlchemy raises for an error of the driver; return for other errors.

    A disconnect invalidates the connection.

    :raises sqlalchemy.exc.DBAPIError: of the matching subclass.
    """
    dialect = connection.dialect
    dbapi: Any = dialect.loaded_dbapi
    known = _adapted(dbapi, error)
    if known is None:
        return
    is_lost = dialect.is_disconnect(known, connection.connection, None)
    wrapped = DBAPIError.instance(
        statement,
        None,
        known,
        dbapi.Error,
        hide_parameters=connection.engine.hide_parameters,
        connection_invalidated=is_lost,
        dialect=dialect,
    )
    if is_lost:
        connection.invalidate(error)
    raise wrapped from error


def _adapted(dbapi: Any, error: Exception) -> Any:
    """Return an error as one of SQLAlchemy's DBAPI, None if it is not an error of the driver."""
    if isinstance(error, dbapi.Error):
        return error
    if not type(error).__module__.startswith("asyncpg."):
        return None
    for base in type(error).__mro__:
        kind = getattr(dbapi, _ASYNCPG.get(base.__name__, base.__name__), None)
        if isinstance(kind, type) and issubclass(kind, dbapi.Error):
            adapted: Any = kind(f"{type(error)}: {error}")
            for name in ("sqlstate", "detail"):
                setattr(adapted, name, getattr(error, name, None))
            adapted.pgcode = adapted.sqlstate
            return adapted
    return None
