"""Refuses databases that the library does not support, and engines that are not prepared.

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
from sqlaqueue.queue.engine import OURS, PREPARED_BY, engine_of

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
    if not compiler.linting & WARN_LINTING or engine_of(compiler.dialect) is not None:
        return ""
    msg = f"this session's engine is for {compiler.dialect.name}, {_fix(compiler.dialect)}"
    raise ConfigurationError(msg)


@compiles(_Marker, "postgresql")
def _accept(element: _Marker, compiler: Any, **_: Any) -> str:  # noqa: ARG001 - the hook's signature
    return ""


def guarded(statement: Statement) -> Statement:
    """Return ``statement`` with a marker that refuses its execution on another database; it can be printed for any.

    The error is raised while the statement is compiled, before anything is sent.
    """
    # A prefix is compiled first, before any part for which the other compiler may raise an error of its own.
    marked: Any = statement.prefix_with(_Marker())
    marked_as_ours: Statement = marked.execution_options(**{OURS: True})
    return marked_as_ours


def _fix(dialect: sa.Dialect) -> str:
    line = PREPARED_BY.get(dialect.name)
    if line is None:
        return 'which sqlaqueue does not support; use create_engine("postgresql+psycopg://...")'
    return f"and is not prepared; call {line} before its first use"


def check_dialect(dialect: sa.Dialect, what: str) -> None:
    """Raise an error for an engine of another database.

    :param what: the user of the engine, for the error's text.
    :raises ConfigurationError: naming the engine's dialect.
    """
    if dialect.name != "postgresql" and engine_of(dialect) is None:
        msg = f"{what}: its sessions' engine is for {dialect.name}, {_fix(dialect)}"
        raise ConfigurationError(msg)
