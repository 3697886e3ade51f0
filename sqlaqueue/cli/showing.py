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

_WIDE = 200
"""Columns where nobody has said how many there are: into a file or a pipe nothing is cut off."""

_ROOMY = 100
"""Columns from which on there is room for wider gaps."""

_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def console() -> Console:
    """Return where tables go."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _WIDE)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table."""
    gap = 2 if console().width >= _ROOMY else 1
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def add_row(to: Table, *cells: object) -> None:
    """Add a row of texts as they are: an error may look like markup."""
    to.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))


def echo_json(found: object, *, one_line: bool = False) -> None:
    """Print something as JSON."""
    click.echo(json.dumps(found, default=_plain, indent=None if one_line else 2))


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.isoformat() if isinstance(value, datetime) else str(value)


def span(seconds: float | None) -> str:
    """Return a span of time in its two largest units."""
    if seconds is None:
        return "-"
    left = int(max(seconds, 0))
    parts: list[str] = []
    for unit, size in _UNITS:
        number, left = divmod(left, size)
        if number or (unit == "s" and not parts):
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])


def ago(moment: datetime | None) -> str:
    """Return how long ago a moment of the database was, by this machine's clock."""
    if moment is None:
        return "-"
    now = datetime.now(UTC) if moment.tzinfo is not None else datetime.now()  # noqa: DTZ005 - a column without a zone
    return f"{span((now - moment).total_seconds())} ago"
