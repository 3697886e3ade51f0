"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
import sqlalchemy as sa
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError

from sqlaqueue.admin.jobs import JobFilter
from sqlaqueue.exc import DatabaseNotReadyError, HandlerNotStopped, SqlaqueueError
from sqlaqueue.postgresql.checks_of import OutdatedError, checks_of_error
from sqlaqueue.postgresql.ddl import UPDATE_COMMAND
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import sqlstate
from sqlaqueue.texts import duration_text, printable

_PIPE_WIDTH = 200
"""Columns of a file or a pipe, where nothing is to be cut off."""

_WIDE_TERMINAL = 100
"""Columns from which there is room for wider gaps."""


def console() -> Console:
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    gap = 2 if console().width >= _WIDE_TERMINAL else 1
    result = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return result


def add_row(to: Table, *cells: object) -> None:
    """Add a row of plain texts, as the text of an error may look like markup."""
    to.add_row(*(plain("" if cell is None else str(cell)) for cell in cells))


def plain(text: str) -> Text:
    """Return a text for a console, without what a terminal would obey."""
    return Text(printable(text))


def echo(*lines: str) -> None:
    """Print lines without what a terminal would obey, or that would begin a line of its own.

    Keys, errors and names are input of others. What a command prints for people goes through this or :func:`plain`.
    """
    for line in lines:
        click.echo(printable(line))


def echo_json(value: object, *, one_line: bool = False) -> None:
    click.echo(json.dumps(value, default=_to_json, indent=None if one_line else 2))


def _to_json(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


@contextmanager
def progress(queue: str, total: int | None, *, json: bool) -> Iterator[Callable[[int], object]]:
    """Show how far a change has come, on standard error if that is a terminal.

    :param total: the number of jobs to be changed; None if it is not known.
    :return: yields what is called with the number of further jobs.
    """
    if json or not sys.stderr.isatty():
        yield int
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - it takes long to import

    name = TextColumn("{task.description}", markup=False)
    known = [MofNCompleteColumn()] if total is not None else []
    columns = (name, BarColumn(), *known, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(printable(queue), total=total)
        yield lambda number: shown.advance(task, number)


def ago(moment: datetime | None) -> str:
    """Return the time since a moment, such as ``5 min ago``, by this machine's clock."""
    if moment is None:
        return "-"
    now = datetime.now(UTC) if moment.tzinfo is not None else datetime.now()  # noqa: DTZ005 - the column has no zone
    return f"{duration_text((now - moment).total_seconds())} ago"


def jobs_text(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


# -- errors ------------------------------------------------------------------------------------------------------------

FAILED, WRONG_INPUT, NO_DATABASE, NOT_STOPPED = 1, 2, 3, 4


class _PlainError(click.ClickException):
    """An error whose text may contain input of others."""

    def format_message(self) -> str:
        """Return the text without what a terminal would obey."""
        return "\n".join(map(printable, self.message.split("\n")))


class FailedError(_PlainError):
    exit_code = FAILED


class InputError(_PlainError):
    exit_code = WRONG_INPUT


class DatabaseError(_PlainError):
    """The database does not answer, or lacks what the queue needs."""

    exit_code = NO_DATABASE


class OutdatedWorkerError(DatabaseError):
    """The database was migrated for newer workers: another start would end in the same way."""


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
    """Translate errors of the database and the library into errors of the command line."""
    try:
        yield
    except SqlaqueueError as error:
        kinds = {
            OutdatedError: OutdatedWorkerError,
            DatabaseNotReadyError: DatabaseError,
            HandlerNotStopped: NotStoppedError,
            SqlaqueueError: InputError,
        }
        raise next(kind for base, kind in kinds.items() if isinstance(error, base))(str(error)) from error
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
        if spec is not None and _lacks_status(message, spec):
            return DatabaseError(
                f"the type of the status column of {spec.model.__name__} lacks a value: {message}; `sqlaqueue doctor` "
                "prints the ALTER TYPE that adds it"
            )
        whose = "its column" if spec is None else f"its column of {spec.model.__name__}"
        return InputError(f"a key or another value does not fit the type of {whose}: {message}")
    # Without an SQLSTATE no statement has reached the server.
    if not state or state.startswith(_CONNECTION_REFUSED):
        return DatabaseError(f"the database does not answer: {message}")
    return FailedError(f"the database failed: {message}")


def _lacks_status(message: str, spec: QueueSpec) -> bool:
    """Return whether the server refuses a value of the status column that the model names, not the user."""
    if not spec.has("status") or not isinstance(spec.columns["status"].type, sa.Enum) or "enum" not in message:
        return False
    states = [state for state, value in spec.config.states.items() if value is not None]
    return any(message.endswith('"' + str(spec.literal(state)).strip("'") + '"') for state in states)


def first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {os.fspath(error.filename)!r}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def signals_handled(numbers: Sequence[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def clean_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at SIGINT, SIGTERM or SIGHUP, and ignore further ones during clean-up."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]

    def interrupt(_: int, __: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    with signals_handled(numbers, interrupt):
        yield


F = TypeVar("F", bound=Callable[..., Any])

STRATEGIES = ("update_status", "delete_returning", "batch_select")
"""The strategies of the demo and the benchmark."""

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)
_PARTS = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)


# ParamType is generic in recent versions of click only.
if TYPE_CHECKING:
    _ParamType = click.ParamType[timedelta]
    _SizeParamType = click.ParamType[int]
else:
    _ParamType = _SizeParamType = click.ParamType


class DurationType(_ParamType):
    """A duration: seconds, or numbers with units, such as 90, 1.5h or 7d12h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        text = str(value).strip().lower()
        try:
            # As a whole first: to look for parts at each place of many digits takes a second.
            if _PARTS.fullmatch(text):
                return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)))
            if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
                return timedelta(seconds=float(text))
        except OverflowError:
            pass
        return self.fail(f"{value!r} is not a duration; write seconds, or 500ms, 30s, 5m, 2h, 7d, 1w", param, ctx)


DURATION = DurationType()

_SIZES = {"k": 2**10, "m": 2**20, "g": 2**30}


class SizeType(_SizeParamType):
    """An amount of memory with its unit, such as 512M or 1.5G, in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])(i?b)?", str(value).strip().lower(), re.ASCII)
        amount = 0.0 if found is None else float(found[1]) * _SIZES[found[2]]
        size = int(amount) if math.isfinite(amount) else 0
        return size or self.fail(f"{value!r} is no amount of memory; write a number with a unit, as 512M or 2G")


SIZE = SizeType()

url_option = click.option(
    "--url",
    envvar="SQLAQUEUE_URL",
    show_envvar=True,
    help="The database, as postgresql+psycopg://user:password@host/database.",
)
json_option = click.option("--json", is_flag=True, help="Print JSON.")
log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    help="Lowest level to log; info by default. The logging configuration of an application is kept.",
)
log_format_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"], case_sensitive=False),
    help="Log lines of text, colored on a terminal, or a JSON object in each line; text by default.",
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Show how many jobs would be changed, and change none.")


def with_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds options to a command, in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def filter_options(
    states: tuple[str, ...], *, default: tuple[str, ...] | None = None, age_of: str = "were enqueued"
) -> Callable[[F], F]:
    """Return a decorator that adds the options which select jobs; :func:`job_filter` reads them."""
    return with_options(
        click.option(
            "--state",
            multiple=True,
            type=click.Choice(states),
            default=default,
            show_default=default is not None,
            help="Only jobs in this state; may be repeated.",
        ),
        click.option("--older-than", type=DURATION, help=f"Only jobs that {age_of} longer ago than this, such as 7d."),
        click.option("--newer-than", type=DURATION, help=f"Only jobs that {age_of} less long ago, such as 1h."),
        click.option(
            "--kind",
            "error",
            metavar="KIND",
            help="Only jobs with this kind of error, as shown by `sqlaqueue failed`.",
        ),
        click.option("--key", multiple=True, help="Only the job with this key; may be repeated."),
    )


def job_filter(options: dict[str, Any], age_from: Any) -> JobFilter:
    return JobFilter(
        states=tuple(dict.fromkeys(options["state"])) or None,
        older_than=options["older_than"],
        newer_than=options["newer_than"],
        since=age_from,
        error=options["error"],
        keys=options["key"] or None,
    )
