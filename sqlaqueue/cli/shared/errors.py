"""The errors of commands: one line on standard error, and an exit code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import click
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError

from sqlaqueue.exc import DatabaseNotReadyError, SqlaqueueError
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.engine import checks_of_error
from sqlaqueue.queue.spec import QueueSpec

FAILED, WRONG_INPUT, NO_DATABASE = 1, 2, 3


class FailedError(click.ClickException):
    """The command failed while it ran."""

    exit_code = FAILED


class InputError(click.ClickException):
    """An argument, option or setting is wrong."""

    exit_code = WRONG_INPUT


class DatabaseError(click.ClickException):
    """The database does not answer, or lacks what the queue needs."""

    exit_code = NO_DATABASE


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
        raise InputError(str(error)) from error
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
        if type(error).__module__.partition(".")[0] not in {"psycopg", "psycopg2", "asyncpg"}:
            raise
        # SQLAlchemy does not wrap the errors that asyncpg raises while connecting.
        raise DatabaseError(f"the database does not answer: {first_line(error)}") from error


def _of_database(error: DBAPIError, spec: QueueSpec | None) -> click.ClickException:
    message = first_line(error.orig or error)
    state = backend().sqlstate(error) or ""
    if spec is not None and checks_of_error(error).undefined_object_advice(error, spec) is not None:
        return DatabaseError(
            f"the database lacks what {spec.model.__name__} needs: {message}; {backend().checks.UPDATE_COMMAND} "
            "creates it, if env.py uses the plug-in sqlaqueue.alembic; or is this the wrong database?"
        )
    if state == _INSUFFICIENT_PRIVILEGE:
        return DatabaseError(
            f"{message}; let the owner of the tables GRANT the privileges that this command needs, see the page "
            "Privileges of the documentation"
        )
    if state.startswith(_DATA_EXCEPTION):
        return InputError(message)
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
