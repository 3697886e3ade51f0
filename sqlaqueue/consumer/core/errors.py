"""Errors, classified and as texts: lost connections, conflicts, database errors, mistakes of the program. No I/O."""

from __future__ import annotations

import re
import traceback
from types import CodeType, TracebackType

from sqlalchemy import exc
from sqlalchemy.exc import DBAPIError

from sqlaqueue.exc import Fail, HandlerSignal, Retry, SqlaqueueError
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of_error, sqlstate, violated_constraint
from sqlaqueue.statements.verbs import error_text, storable
from sqlaqueue.strategies.unique_key import names_unique_index
from sqlaqueue.texts import TRACEBACK_HEAD

_CONFLICTS = {"40001", "40P01"}
_LOCKS_AND_TIMEOUTS = {"55P03", "57014"}
_CONNECTION_ENDED = {"57P01", "57P02", "57P03", "57P05", "25P03"}
"""The server ended the connection: on an administrator's command, at its shutdown, or because it was idle too long."""
_READ_ONLY = "25006"
_FILE = {_READ_ONLY, "58P01"}
_RESOURCES = {"53", "58"}
_SAVEPOINT_MISSING = {"3B001", "25P01"}
_CONNECTING = {"_checkout", "__connect"}
_REFUSED_BY_POLICY = "42501"
_OUT_OF_RANGE = "22003"
_OF_NO_ROW = {"08", "0A", "25", "26", "28", "2D", "34", "3B", "3D", "3F", "40", "42", "53", "55", "57", "58"}
"""The classes of SQLSTATE that say something of the statement, the connection or the server."""


def is_transient(error: BaseException) -> bool:
    """Return whether the same statement is likely to succeed when repeated: after a lost connection or a conflict."""
    return is_connection_lost(error) or is_conflict(error)


def is_connection_lost(error: BaseException) -> bool:
    """Return whether the connection is gone, so that the server has rolled back what was not committed."""
    if not isinstance(error, exc.DBAPIError):
        return _is_driver_error(error)
    # A driver may report the server's last message before it notices that the connection is closed.
    state = sqlstate(error) or ""
    return error.connection_invalidated or state in _CONNECTION_ENDED or state.startswith("08")


def is_connect_error(error: BaseException) -> bool:
    """Return whether connecting to the server failed. A driver may raise any error then: the traceback decides."""
    codes = [
        (frame.f_globals.get("__name__"), frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    # Other functions of the pool pass statements on.
    connecting = any(module == "sqlalchemy.pool.base" and name in _CONNECTING for module, name in codes)
    # A relationship that a coroutine loads by reading it: the mistake of a handler, before anything is sent.
    return connecting and not isinstance(error, exc.TimeoutError | exc.MissingGreenlet)


def is_conflict(error: BaseException) -> bool:
    """Return whether the server aborted a transaction because of another one, by a deadlock or a serialization."""
    return isinstance(error, exc.DBAPIError) and sqlstate(error) in _CONFLICTS


def is_lock_or_timeout(error: BaseException) -> bool:
    """Return whether a statement was cancelled, or waited too long for a lock."""
    return isinstance(error, exc.DBAPIError) and sqlstate(error) in _LOCKS_AND_TIMEOUTS


def is_duplicate(error: BaseException, spec: QueueSpec) -> bool:
    """Return whether a statement met a duplicate that was committed after it had begun; repeated, it sees that job."""
    if not isinstance(error, exc.DBAPIError):
        return False
    # A migration that replaces the index builds the new one under a longer name.
    return names_unique_index(spec, violated_constraint(error) or "")


def may_settle_later(error: exc.DBAPIError) -> bool:
    """Return whether an error from settling runs has another cause than the runs, so that they are settled later.

    Such causes are transient errors, locks, timeouts, a server without disk space or memory, a server that became a
    standby, and a connection that could not be made: that error is the driver's, and only the server's have a SQLSTATE.
    """
    state = sqlstate(error)
    if state is None:
        return is_transient(error) or isinstance(error, exc.OperationalError)
    return is_transient(error) or is_lock_or_timeout(error) or state == _READ_ONLY or state[:2] in _RESOURCES


def may_be_of_a_row(error: BaseException) -> bool:
    """Return whether an error of reading or changing several rows may be caused by a single one.

    A type of the program that cannot load a value raises anything; so may a trigger that refuses a row.
    """
    if is_connect_error(error):
        return False
    if not isinstance(error, exc.DBAPIError):
        others = (
            exc.TimeoutError,
            OSError,
            exc.ArgumentError,
            exc.CompileError,
            exc.InvalidRequestError,
            SqlaqueueError,
        )
        return isinstance(error, Exception) and not (isinstance(error, others) or _is_driver_error(error))
    if may_settle_later(error):
        return False
    state = sqlstate(error)
    if state is None:
        # The driver's own error about a value, such as a date that Python does not know.
        return isinstance(error, exc.DataError) or type(error) is exc.DBAPIError
    return state[:2] not in _OF_NO_ROW or state == _REFUSED_BY_POLICY


def may_be_of_a_run(error: BaseException) -> bool:
    """Return whether an error from settling runs may have one of them as its cause."""
    if isinstance(error, exc.DBAPIError) and not is_connect_error(error):
        return not may_settle_later(error)
    return may_be_of_a_row(error)


def is_out_of_range(error: BaseException) -> bool:
    """Return whether the server refuses a number that a statement computes, as it is too large for its column."""
    return isinstance(error, exc.DBAPIError) and sqlstate(error) == _OUT_OF_RANGE


def may_recover(error: Exception) -> bool:
    """Return whether a statement that worked before may work again later, as after an outage of the database."""
    if isinstance(error, exc.DBAPIError):
        # Not only OperationalError: a driver whose connection ends in the middle of something raises others as well.
        return error.connection_invalidated or not isinstance(error, exc.ProgrammingError | exc.DataError)
    return isinstance(error, exc.TimeoutError | OSError) or _is_driver_error(error)


def is_database_error(error: BaseException) -> bool:
    """Return whether an error comes from the database, its driver, the pool or the network."""
    return isinstance(error, exc.DBAPIError | exc.TimeoutError | OSError) or _is_driver_error(error)


def is_program_error(error: Exception) -> bool:
    """Return whether an error is a mistake in the program, such as a missing table."""
    if isinstance(error, exc.DBAPIError):
        # A server may become writable or come up; a file of another mode or path does not.
        other = engine_of_error(error)
        is_of_file = other is not None and other.name == "sqlite" and sqlstate(error) in _FILE
        return is_of_file or isinstance(error, exc.ProgrammingError)
    own = (SqlaqueueError, exc.SQLAlchemyError, TypeError, AttributeError, LookupError, ValueError)
    return isinstance(error, own) and not isinstance(error, exc.TimeoutError)


def is_savepoint_missing(error: BaseException) -> bool:
    """Return whether a savepoint does not exist, because its transaction has been ended."""
    return isinstance(error, exc.DBAPIError) and sqlstate(error) in _SAVEPOINT_MISSING


def _is_driver_error(error: BaseException) -> bool:
    # If a connection is ended between two statements, asyncpg may raise an error about its own state. It is no DBAPI
    # error, so SQLAlchemy does not wrap it. Nothing was sent then.
    return type(error).__module__.partition(".")[0] == "asyncpg"


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


# -- tracebacks --------------------------------------------------------------------------------------------------------

STACK_LIMIT = 4000
"""The length of the traceback in ``last_error``, in characters; of a longer one the middle is left out."""

_SHORTEST_STACK = 200
"""If a column has no room for so many characters of a traceback, it has none: the rest would say nothing."""

_CALLERS = (
    "sqlaqueue.cli.supervised_worker",
    "sqlaqueue.consumer.",
    "sqlaqueue.functions",
    "sqlaqueue.sessions",
    "sqlaqueue.telemetry.",
)
"""The modules whose functions call handlers."""


def drop_callers(error: BaseException) -> None:
    """Remove the frames of the library that called the handler from an error's traceback, for logs and rows.

    A traceback without other frames is left as it is, as the error is one of the call itself, unless the library
    raised it to end the run.
    """
    first: TracebackType | None = BaseException.__getattribute__(error, "__traceback__")
    while first is not None and _is_caller(first):
        first = first.tb_next
    if first is not None or isinstance(error, SqlaqueueError):
        BaseException.with_traceback(error, first)


def _is_caller(frame: TracebackType) -> bool:
    # Not __name__, which is "__main__" in a process of --isolate.
    spec = frame.tb_frame.f_globals.get("__spec__")
    return str(getattr(spec, "name", None)).startswith(_CALLERS)


def stack_text(error: BaseException, limit: int | None = None) -> str | None:
    """Return the traceback of an error as it is stored below its text, with its causes and notes; None if it has none.

    The message of the error itself is left out, as the text above has it. Values of variables are never part of it.

    :param limit: the room for it in characters, if that is less than :data:`STACK_LIMIT`.
    """
    limit = STACK_LIMIT if limit is None else min(limit, STACK_LIMIT)
    if limit < _SHORTEST_STACK:
        return None
    try:
        follows = error.__cause__ if error.__suppress_context__ else error.__context__
        # Where a signal is raised says nothing; what it was raised for does.
        if follows is None and (error.__traceback__ is None or isinstance(error, HandlerSignal)):
            return None
        if follows is None and not (isinstance(error, BaseExceptionGroup) or getattr(error, "__notes__", None)):
            return _fitting(_frames_text(error.__traceback__), limit)
        found = traceback.TracebackException.from_exception(error)
        if isinstance(error, DBAPIError) and error.__cause__ is error.orig:
            # It has the message of the driver's error, and its frames.
            found.__cause__ = None
        notes, found.__notes__ = found.__notes__, None
        message = "".join(found.format_exception_only())
        text = "".join(found.format()).removesuffix(message) + "\n".join(map(str, notes or ()))
        text = storable(text.strip("\n"))
    except BaseException:  # noqa: BLE001 - the error's own code may raise anything, and the run has to end
        return None
    return _fitting(text if _STARTS.match(text) else f"{TRACEBACK_HEAD}\n{text}", limit)


_known = dict[tuple[tuple[CodeType, int], ...], str]()
"""The texts of tracebacks by their frames: many jobs fail at the same line, and the source is parsed for each text."""

_MOST_KNOWN = 100


def _frames_text(first: TracebackType | None) -> str:
    frames = []
    each = first
    while each is not None:
        frames.append((each.tb_frame.f_code, each.tb_lasti))
        each = each.tb_next
    text = _known.get(key := tuple(frames))
    if text is None:
        text = storable(f"{TRACEBACK_HEAD}\n{''.join(traceback.format_tb(first))}".rstrip("\n"))
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = text
    return text


def _fitting(text: str, limit: int) -> str:
    """Return a traceback of at most ``limit`` characters: what the handler called, and where the error was raised."""
    if len(text) > limit:
        text = _MARKERS.sub("", text)
    if len(text) <= limit:
        return text
    first = text[: limit // 4].rpartition("\n")[0]
    # 40 characters are more than the line between the two takes.
    last = text[-(limit - limit // 4 - 40) :].partition("\n")[2]
    return f"{first}\n... ({len(text) - len(first) - len(last)} characters left out)\n{last}"


_MARKERS = re.compile(r"^[ |]*[~^][ ~^]*\n", re.MULTILINE)
"""Lines below a line of source, which mark a part of it."""

_STARTS = re.compile(rf"(?:[ ]*\+ Exception Group )?{re.escape(TRACEBACK_HEAD)}")
