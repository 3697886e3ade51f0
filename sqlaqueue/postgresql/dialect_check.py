"""Refuses other databases than PostgreSQL.

SQLAlchemy omits SKIP LOCKED for a database that does not support it, and two workers would claim the same jobs.
"""

from __future__ import annotations

from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import WARN_LINTING
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import HasPrefixes

from sqlaqueue.exc import ConfigurationError

Statement = TypeVar("Statement", bound=HasPrefixes)


class _Marker(FunctionElement[None]):
    """Renders as an empty text on PostgreSQL, and raises an error elsewhere.

    It is a function because SQLAlchemy has no cache key for a bare column element, and would compile each statement
    with one anew each time.
    """

    inherit_cache = True


@compiles(_Marker)
def _refuse(element: _Marker, compiler: Any, **_: Any) -> str:  # noqa: ARG001 - the hook's signature
    # A Connection sets this flag when it compiles a statement to execute it; printing a statement does not.
    if not compiler.linting & WARN_LINTING:
        return ""
    msg = (
        f"this session's engine is for {compiler.dialect.name}, and sqlaqueue needs PostgreSQL; "
        'use create_engine("postgresql+psycopg://...")'
    )
    raise ConfigurationError(msg)


@compiles(_Marker, "postgresql")
def _accept(element: _Marker, compiler: Any, **_: Any) -> str:  # noqa: ARG001 - the hook's signature
    return ""


def guarded(statement: Statement) -> Statement:
    """Return ``statement`` with a marker that refuses its execution on another database; it can be printed for any.

    The error is raised while the statement is compiled, before anything is sent.
    """
    # A prefix is compiled first, before any part for which the other compiler may raise an error of its own.
    return statement.prefix_with(_Marker())


def check_dialect(dialect: sa.Dialect, what: str) -> None:
    """Raise an error for an engine of another database.

    :param what: the user of the engine, for the error's text.
    :raises ConfigurationError: naming the engine's dialect.
    """
    if dialect.name != "postgresql":
        msg = (
            f"{what}: its sessions' engine is for {dialect.name}, and sqlaqueue needs PostgreSQL; "
            'use create_engine("postgresql+psycopg://...")'
        )
        raise ConfigurationError(msg)
