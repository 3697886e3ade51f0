"""Parts of a page that are read one by one, so that one that fails does not hide the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.errors import is_connection_lost
from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.sql.errors import sqlstate

T = TypeVar("T")

WITHOUT_SAVEPOINTS = "sqlaqueue_without_savepoints"
"""The key in ``session.info`` of a session that reads its parts without savepoints, as long as none fails.

The two statements of a savepoint take as long as many of the parts."""

_PROBLEMS = {
    "0A000": "The server does not execute this statement. Citus does not if a table is distributed by a column.",
    "57014": "Reading this took too long, so it was cancelled.",
    "55P03": "A table is locked by another session, so this cannot be read.",
    "42P01": "A table is missing. Run the migrations of the application: alembic upgrade head.",
    "42703": "A column is missing. Run the migrations of the application: alembic upgrade head.",
    "42501": "The role of the dashboard has no right to read this.",
    "25006": "The role of the dashboard may only read, and this needs to lock a row for a moment.",
}


@dataclass(frozen=True)
class Part(Generic[T]):
    """A part of a page: its value; or the problem because of which there is none."""

    value: T | None = None
    problem: str = ""


class PartFailedError(Exception):
    """A part cannot be read, in a session without savepoints: all of them are to be read again with savepoints."""


def attempt_part(session: Session, operation: Callable[..., T], *args: Any) -> Part[T]:
    """Return ``operation(session, *args)``, executed in a savepoint; or the problem.

    :raises DBAPIError: if the connection is lost, as nothing else can be read then.
    :raises PartFailedError: instead of returning the problem, in a session that tries without savepoints.
    """
    is_tried = WITHOUT_SAVEPOINTS in session.info
    try:
        with session.no_autoflush, nullcontext() if is_tried else session.begin_nested():
            return Part(operation(session, *args))
    except (DBAPIError, SqlaqueueError) as error:
        if is_connection_lost(error):
            raise
        if is_tried:
            raise PartFailedError from error
        return Part(problem=problem_text(error))


def problem_text(error: Exception) -> str:
    """Return in one sentence why something cannot be read, and what to do about it."""
    if isinstance(error, SqlaqueueError):
        return f"{error}"
    state = sqlstate(error) if isinstance(error, DBAPIError) else None
    if state in _PROBLEMS:
        return _PROBLEMS[state]
    # Not the text of the error: it may contain values of redacted columns.
    return f"This cannot be read (SQLSTATE {state})." if state else "This cannot be read; the log says why."
