"""What an error says: that trying again helps, or that the program has to be changed."""

from __future__ import annotations

import traceback

from sqlalchemy import exc

from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.queue.backend import backend

_CONFLICTS = {"40001", "40P01"}
_LOCKS_AND_TIMEOUTS = {"55P03", "57014"}
_LOST = {"57P01", "57P02", "57P03", "57P05", "25P03"}
"""The server ends the connection: an administrator has it ended, it shuts down, or the session was idle too long."""
_READ_ONLY = "25006"
_RESOURCES = {"53", "58"}


def is_transient(error: BaseException) -> bool:
    """Return whether trying again is all there is to do: the connection is gone, or the database asks for it.

    It does at a deadlock, and at a conflict under a strict isolation level.
    """
    return is_connection_lost(error) or is_conflict(error)


def is_connection_lost(error: BaseException) -> bool:
    """Return whether the connection is gone, so that the server has rolled back what was not committed."""
    if not isinstance(error, exc.DBAPIError):
        return _is_of_the_driver(error)
    # A driver that reads the server's last word may not have seen yet that the connection is closed.
    state = backend().sqlstate(error) or ""
    return error.connection_invalidated or state in _LOST or state.startswith("08")


def is_connect_error(error: BaseException) -> bool:
    """Return whether an error came of making a connection, as while the server restarts; not of waiting for the pool.

    A driver may raise any error then, so the traceback is asked.
    """
    frames = traceback.walk_tb(error.__traceback__)
    connecting = any(frame.f_globals.get("__name__") == "sqlalchemy.pool.base" for frame, _ in frames)
    return connecting and not isinstance(error, exc.TimeoutError)


def is_conflict(error: BaseException) -> bool:
    """Return whether two transactions were in each other's way, so that the server has ended one of them."""
    return isinstance(error, exc.DBAPIError) and backend().sqlstate(error) in _CONFLICTS


def is_lock_or_timeout(error: BaseException) -> bool:
    """Return whether a statement was ended that took too long, such as by waiting for a lock."""
    return isinstance(error, exc.DBAPIError) and backend().sqlstate(error) in _LOCKS_AND_TIMEOUTS


def may_settle_later(error: exc.DBAPIError) -> bool:
    """Return whether an error that came of settling runs says nothing of these, so that they are to be settled later.

    Besides what passes, that is a server that lacks the space or the time, or has become a standby, and a connection
    that could not be made: then it is the driver that complains, and not the server, which gives each of its errors a
    state.
    """
    state = backend().sqlstate(error)
    if state is None:
        return is_transient(error) or isinstance(error, exc.OperationalError)
    return is_transient(error) or is_lock_or_timeout(error) or state == _READ_ONLY or state[:2] in _RESOURCES


def may_recover(error: Exception) -> bool:
    """Return whether the database may be there again in a moment, if the same statement has worked before."""
    if isinstance(error, exc.DBAPIError):
        # Not only operational errors: a driver whose connection goes in the middle of something may say anything.
        return error.connection_invalidated or not isinstance(error, exc.ProgrammingError | exc.DataError)
    return isinstance(error, exc.TimeoutError | OSError) or _is_of_the_driver(error)


def is_database_error(error: BaseException) -> bool:
    """Return whether it is the database that says so, its driver, or the way there."""
    return isinstance(error, exc.DBAPIError | exc.TimeoutError | OSError) or _is_of_the_driver(error)


def is_program_error(error: Exception) -> bool:
    """Return whether ``error`` tells of a mistake in the program, such as a missing table, and not of the database."""
    if isinstance(error, exc.DBAPIError):
        return isinstance(error, exc.ProgrammingError)
    own = (SqlaqueueError, exc.SQLAlchemyError, TypeError, AttributeError, LookupError, ValueError)
    return isinstance(error, own) and not isinstance(error, exc.TimeoutError)


def is_savepoint_missing(error: BaseException) -> bool:
    """Return whether a savepoint is not there, because the transaction that it was set in has been ended."""
    return isinstance(error, exc.DBAPIError) and backend().sqlstate(error) in {"3B001", "25P01"}


def _is_of_the_driver(error: BaseException) -> bool:
    # When a connection is ended between two statements, asyncpg may complain of the state that it is in itself, with
    # an error that is none of the DBAPI's, which SQLAlchemy lets through as it is. Nothing has been sent then.
    return type(error).__module__.partition(".")[0] == "asyncpg"
