"""The errors of commands: one line on standard error, and an exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError

from sqlaqueue.exc import DatabaseNotReadyError, HandlerNotStopped, SqlaqueueError
from sqlaqueue.postgresql.checks_of import checks_of_error
from sqlaqueue.postgresql.faults import UPDATE_COMMAND
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.errors import sqlstate
from sqlaqueue.texts import printable

FAILED, WRONG_INPUT, NO_DATABASE, NOT_STOPPED = 1, 2, 3, 4


class _PlainError(click.ClickException):
    """An error whose text may contain input of others."""

    def format_message(self) -> str:
        """Return the text without what a terminal would obey."""
        return "\n".join(map(printable, self.message.split("\n")))


class FailedError(_PlainError):
    """The command failed while it ran."""

    exit_code = FAILED


class InputError(_PlainError):
    """An argument, option or setting is wrong."""

    exit_code = WRONG_INPUT


class DatabaseError(_PlainError):
    """The database does not answer, or lacks what the queue needs."""

    exit_code = NO_DATABASE


class NotStoppedError(click.ClickException):
    """A handler goes on after the grace period; only the end of the process ends it."""

    exit_code = NOT_STOPPED


def end_process(error: NotStoppedError) -> NoReturn:
    """Print an error and end this process, without waiting for threads that may never end."""
    error.show()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(error.exit_code)


_INSUFFICIENT_PRIVILEGE = "42501"
_DATA_EXCEPTION = "22"
"""The class of the SQLSTATEs for invalid values."""

_CONNECTION_REFUSED = ("08", "28", "3D", "53", "57P")
"""The classes of connection failures: wrong password, no such database, too many connections, shutdown."""


@contextmanager
def command_errors(spec: QueueSpec | None = None) -> Iterator[None]:
    """Translate errors of the database and the library into errors of the command line.

    :param spec: the queue of the statements in the block.
    """
    try:
        yield
    except DatabaseNotReadyError as error:
        raise DatabaseError(str(error)) from error
    except SqlaqueueError as error:
        kind = NotStoppedError if isinstance(error, HandlerNotStopped) else InputError
        raise kind(str(error)) from error
    except NoSuchModuleError as error:
        raise InputError(f"--url: {first_line(error)}; give postgresql+psycopg://...") from error
    except DBAPIError as error:
        raise _of_database(error, spec) from error
    except BrokenPipeError:
        raise  # the reader of the output has closed it
    except OSError as error:
        # asyncpg does not wrap errors of the network.
        raise DatabaseError(f"the database does not answer: {first_line(error)}") from error
    except SQLAlchemyError as error:
        raise FailedError(f"{type(error).__name__}: {first_line(error)}") from error
    except Exception as error:
        translated = _of_driver(error)
        if translated is None:
            raise
        raise translated from error


def _of_driver(error: Exception) -> click.ClickException | None:
    """Return the error for one that a driver has raised and SQLAlchemy does not wrap; None for others."""
    if isinstance(error, TypeError) and _is_of_connect(error):
        # A driver that is written in Python has its options as arguments of a function.
        return InputError(f"--url: the driver does not know an option: {first_line(error)}")
    if type(error).__module__.partition(".")[0] in {"psycopg", "psycopg2", "asyncpg"}:
        # As asyncpg does while connecting.
        return DatabaseError(f"the database does not answer: {first_line(error)}")
    return None


def _is_of_connect(error: BaseException) -> bool:
    """Return whether SQLAlchemy has called the driver's ``connect()`` with what the URL says."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        frame.f_code.co_name == "connect" and frame.f_globals.get("__name__") == "sqlalchemy.engine.default"
        for frame in frames
    )


def _of_database(error: DBAPIError, spec: QueueSpec | None) -> click.ClickException:
    message = first_line(error.orig or error)
    state = sqlstate(error) or ""
    if spec is not None and checks_of_error(error).undefined_object_advice(error, spec) is not None:
        return DatabaseError(
            f"the database lacks what {spec.model.__name__} needs: {message}; {UPDATE_COMMAND} "
            "creates it, if env.py uses the plug-in sqlaqueue.alembic; or is this the wrong database?"
        )
    if state == _INSUFFICIENT_PRIVILEGE:
        return DatabaseError(
            f"{message}; let the owner of the tables GRANT the privileges that this command needs, see the page "
            "Privileges of the documentation"
        )
    if state.startswith(_DATA_EXCEPTION):
        whose = "its column" if spec is None else f"its column of {spec.model.__name__}"
        return InputError(f"a key or another value does not fit the type of {whose}: {message}")
    # Without an SQLSTATE no statement has reached the server.
    if not state or state.startswith(_CONNECTION_REFUSED):
        return DatabaseError(f"the database does not answer: {message}")
    return FailedError(f"the database failed: {message}")


def first_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {os.fspath(error.filename)!r}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
