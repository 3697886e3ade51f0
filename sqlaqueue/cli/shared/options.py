"""The options that several commands share, and their types."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sqlaqueue import admin

F = TypeVar("F", bound=Callable[..., Any])

STRATEGIES = ("update_status", "delete_returning", "batch_select")
"""The strategies of the demo and the benchmark."""

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)


# ParamType is generic in recent versions of click only.
if TYPE_CHECKING:
    _ParamType = click.ParamType[timedelta]
else:
    _ParamType = click.ParamType


class DurationType(_ParamType):
    """A duration: seconds, or numbers with units, such as 90, 1.5h or 7d12h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Return the duration that a text or a number of seconds stands for."""
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
        return self.fail(f"{value!r} is not a duration; write seconds, or 500ms, 30s, 5m, 2h, 7d, 1w", param, ctx)


DURATION = DurationType()

url_option = click.option(
    "--url",
    envvar="SQLAQUEUE_URL",
    show_envvar=True,
    help="The database, as postgresql+psycopg://user:password@host/database.",
)
json_option = click.option("--json", is_flag=True, help="Print JSON.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Show how many jobs would be changed, and change none.")
targets_argument = click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
target_argument = click.argument("target", metavar="TARGET")


def filter_options(
    states: tuple[str, ...], *, default: tuple[str, ...] | None = None, age_of: str = "were enqueued"
) -> Callable[[F], F]:
    """Return a decorator that adds the options which select jobs; :func:`job_filter` reads them.

    :param states: the states that can be selected.
    :param default: the states that are selected by default; None for all jobs.
    :param age_of: what the age of a job is counted from, for the help.
    """
    options = [
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
            "--error", metavar="KIND", help="Only jobs with this kind of error, as shown by `sqlaqueue failed`."
        ),
        click.option("--key", multiple=True, help="Only the job with this key; may be repeated."),
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def job_filter(options: dict[str, Any], age_from: Any) -> admin.JobFilter:
    """Return the filter that the options of :func:`filter_options` describe.

    :param age_from: the attribute from which the age of a job is counted.
    """
    return admin.JobFilter(
        states=tuple(dict.fromkeys(options["state"])) or None,
        older_than=options["older_than"],
        newer_than=options["newer_than"],
        since=age_from,
        error=options["error"],
        keys=options["key"] or None,
    )
