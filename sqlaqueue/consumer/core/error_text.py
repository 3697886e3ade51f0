"""Errors as texts: the kind of an error, and the text that is stored in ``last_error`` and logged."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from sqlaqueue.exc import Fail, Retry
from sqlaqueue.statements.verbs import error_text


def kind_of(error: BaseException) -> str:
    """Return the kind of an error, by which failed jobs are counted: its class, or that of ``Fail(kind=...)``."""
    return error.kind if isinstance(error, Fail) else type(error).__name__


def text_with_kind(error: Fail | Retry, text: object) -> str | None:
    """Return the text of a signal as it is stored: behind its kind, as the text of any exception is."""
    if text is None or isinstance(text, BaseException):
        return text_of(text)
    return f"{kind_of(error)}: {text_of(text)}"


def error_line(error: BaseException) -> str:
    """Return an error as one line, without the statement and its parameters."""
    its = error.orig or error if isinstance(error, DBAPIError) else error
    first, *_ = (text_of(its) or "").splitlines() or [""]
    return first


def ascii_text(text: str) -> str:
    """Return a text that a database in any encoding can store: other characters are written as escapes."""
    return text.encode("ascii", "backslashreplace").decode()


def text_of(error: object) -> str | None:
    """Return an error as text that can be stored, whatever its ``__str__`` does; None for None."""
    if error is None:
        return None
    try:
        return error_text(error if isinstance(error, BaseException) else str(error))
    except Exception:  # noqa: BLE001 - the job must be settled all the same
        return f"{type(error).__name__}: its text could not be made"
