"""Which databases a queue runs on: PostgreSQL. On another one its statements say so instead of misbehaving.

SQLAlchemy leaves SKIP LOCKED out where a database does not know it: two workers would claim the same jobs.
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
    """Renders as nothing, or not at all.

    A function, since of a bare column element SQLAlchemy does not know how to make a key for its cache: each statement
    with it would be compiled anew, each time.
    """

    inherit_cache = True


@compiles(_Marker)
def _refuse(element: _Marker, compiler: Any, **_: Any) -> str:  # noqa: ARG001 - the hook's signature
    # A Connection compiles what it is about to execute with this flag, and what is only printed is compiled without.
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


def for_postgresql(statement: Statement) -> Statement:
    """Return ``statement`` such that its execution on another database is refused; it can be printed for any.

    The engine's dialect is asked while the statement is compiled, before anything is sent.
    """
    # A prefix is compiled before anything that the other compiler may stumble over with an error of its own.
    return statement.prefix_with(_Marker())


def check_dialect(dialect: sa.Dialect, what: str) -> None:
    """Refuse an engine for another database.

    :param what: who is going to use it, for the error's text.
    :raises ConfigurationError: naming the engine's dialect.
    """
    if dialect.name != "postgresql":
        msg = (
            f"{what}: its sessions' engine is for {dialect.name}, and sqlaqueue needs PostgreSQL; "
            'use create_engine("postgresql+psycopg://...")'
        )
        raise ConfigurationError(msg)
