"""Options and types of values that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)


# Click has made it generic only lately.
if TYPE_CHECKING:
    _ParamType = click.ParamType[timedelta]
else:
    _ParamType = click.ParamType


class DurationType(_ParamType):
    """A span of time: seconds, or numbers with units, such as 90, 1.5h or 7d12h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Return the span that a text, or a number of seconds, means."""
        if isinstance(value, timedelta):
            return value
        text = str(value).strip().lower()
        parts = _PART.findall(text)
        try:
            if parts and _PART.sub("", text) == "":
                return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in parts))
            if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
                return timedelta(seconds=float(text))
        except OverflowError:
            pass
        return self.fail(f"{value!r} is no span of time; write seconds, or 500ms, 30s, 5m, 2h, 7d, 1w", param, ctx)


DURATION = DurationType()

url_option = click.option(
    "--url",
    envvar="SQLAQUEUE_URL",
    show_envvar=True,
    help="The database, as postgresql+psycopg://user:password@host/database.",
)
json_option = click.option("--json", is_flag=True, help="Print JSON.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Change nothing, and say how many jobs would be changed.")
targets_argument = click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
target_argument = click.argument("target", metavar="TARGET")


def which_options(default: tuple[str, ...], allowed: tuple[str, ...], since: str) -> Callable[[F], F]:
    """Return the options that say which jobs are meant.

    :param default: the states that are meant when nobody says.
    :param since: from when the age of a job counts, as the help has it.
    """
    options = [
        click.option(
            "--state",
            multiple=True,
            type=click.Choice(allowed),
            default=default,
            show_default=True,
            help="Only jobs in this state; may be repeated.",
        ),
        click.option("--older-than", type=DURATION, help=f"Only jobs that {since} longer ago, such as 7d."),
        click.option("--newer-than", type=DURATION, help=f"Only jobs that {since} since then, such as 1h."),
        click.option(
            "--error", metavar="KIND", help="Only jobs with this kind of error, as `sqlaqueue failed` shows it."
        ),
        click.option("--key", multiple=True, help="Only the job with this key; may be repeated."),
        click.option("--limit", type=click.IntRange(min=1), help="At most so many jobs."),
        click.option(
            "--batch-size",
            type=click.IntRange(1, 100_000),
            default=1000,
            show_default=True,
            help="How many jobs are changed in one transaction.",
        ),
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate
