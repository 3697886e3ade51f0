"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sqlaqueue.texts import duration_text, printable

_PIPE_WIDTH = 200
"""Columns of a file or a pipe, where nothing is to be cut off."""

_WIDE_TERMINAL = 100
"""Columns from which there is room for wider gaps."""


def console() -> Console:
    """Return the console to which tables are printed."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table.

    :param right: the columns to align to the right.
    """
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
    """Print a value as JSON."""
    click.echo(json.dumps(value, default=_to_json, indent=None if one_line else 2))


def _to_json(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


def ago(moment: datetime | None) -> str:
    """Return the time since a moment, such as ``5 min ago``, by this machine's clock."""
    if moment is None:
        return "-"
    now = datetime.now(UTC) if moment.tzinfo is not None else datetime.now()  # noqa: DTZ005 - the column has no zone
    return f"{duration_text((now - moment).total_seconds())} ago"


def jobs_text(number: int) -> str:
    """Return a number of jobs, such as ``1 job`` or ``2 jobs``."""
    return "1 job" if number == 1 else f"{number} jobs"
