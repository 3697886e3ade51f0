"""How commands end when they cannot do what they should: with one line, and a code that tells scripts why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import click
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError

from sqlaqueue.exc import DatabaseNotReadyError, SqlaqueueError
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec

FAILED, WRONG_INPUT, NO_DATABASE = 1, 2, 3


class FailedError(click.ClickException):
    """Something went wrong while the command was at work."""

    exit_code = FAILED


class InputError(click.ClickException):
    """What the command was given cannot be meant."""

    exit_code = WRONG_INPUT


class DatabaseError(click.ClickException):
    """The database does not answer, or lacks what the queue needs."""

    exit_code = NO_DATABASE


_INSUFFICIENT_PRIVILEGE = "42501"
_WRONG_VALUES = "22"
"""How PostgreSQL's codes for values that a type does not take begin."""

_NO_SESSION = ("08", "28", "3D", "53", "57P")
"""How its codes begin when it does not let anybody in: wrong password, no such database, too many, shutting down."""


@contextmanager
def told_apart(spec: QueueSpec | None = None) -> Iterator[None]:
    """Turn what a database and the library raise into errors of the command line.

    :param spec: the queue that is asked for.
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
        raise  # whoever reads the output has gone
    except OSError as error:
        # asyncpg lets those of the network through.
        raise DatabaseError(f"the database does not answer: {first_line(error)}") from error
    except SQLAlchemyError as error:
        raise FailedError(f"{type(error).__name__}: {first_line(error)}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in {"psycopg", "psycopg2", "asyncpg"}:
            raise
        # What asyncpg raises while it connects has not been wrapped by SQLAlchemy.
        raise DatabaseError(f"the database does not answer: {first_line(error)}") from error


def _of_database(error: DBAPIError, spec: QueueSpec | None) -> click.ClickException:
    said = first_line(error.orig or error)
    state = backend().sqlstate(error) or ""
    if spec is not None and backend().checks.undefined_object_advice(error, spec) is not None:
        return DatabaseError(
            f"the database lacks what {spec.model.__name__} needs: {said}; {backend().checks.UPDATE_COMMAND} makes "
            "it, where env.py has the plug-in sqlaqueue.alembic; is it the right database?"
        )
    if state == _INSUFFICIENT_PRIVILEGE:
        return DatabaseError(
            f"{said}; let the owner of the tables GRANT what the role of this command needs, as the page Privileges of "
            "the documentation lists it"
        )
    if state.startswith(_WRONG_VALUES):
        return InputError(said)
    # Without a code no statement has reached the server.
    if not state or state.startswith(_NO_SESSION):
        return DatabaseError(f"the database does not answer: {said}")
    return FailedError(f"the database failed: {said}")


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {os.fspath(error.filename)!r}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
