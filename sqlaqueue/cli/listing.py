"""The commands for single jobs: ``jobs`` and ``job``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click

from sqlaqueue import admin
from sqlaqueue.cli.database import Database
from sqlaqueue.cli.errors import FailedError, told_apart
from sqlaqueue.cli.options import DURATION, json_option, target_argument, url_option
from sqlaqueue.cli.showing import add_row, ago, console, echo_json, span, table
from sqlaqueue.cli.targets import load_targets
from sqlaqueue.keys import key_text
from sqlaqueue.queue.config import STATES


@click.command(short_help="List single jobs.")
@target_argument
@url_option
@click.option("--state", multiple=True, type=click.Choice(STATES), help="Only jobs in this state; may be repeated.")
@click.option("--older-than", type=DURATION, help="Only jobs that were enqueued longer ago, such as 7d.")
@click.option("--newer-than", type=DURATION, help="Only jobs that were enqueued since then, such as 1h.")
@click.option("--error", metavar="KIND", help="Only jobs with this kind of error, as `sqlaqueue failed` shows it.")
@click.option("--key", multiple=True, help="Only the job with this key; may be repeated.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most so many jobs.")
@json_option
def jobs(
    target: str,
    url: str | None,
    *,
    state: tuple[str, ...],
    older_than: timedelta | None,
    newer_than: timedelta | None,
    error: str | None,
    key: tuple[str, ...],
    limit: int,
    json: bool,
) -> None:
    """List single jobs: those that ended or were enqueued last come first."""
    which = admin.JobFilter(
        states=state or None,
        older_than=older_than,
        newer_than=newer_than,
        since="created_at",
        error=error,
        keys=key or None,
    )
    found: list[admin.JobInfo] = []
    for one in load_targets([target]):
        with Database.of(one, url) as database, told_apart(one.spec):
            found += database.run(admin.jobs, one.model, which, limit=limit)
    if json:
        echo_json([_plain(info) for info in found])
        return
    if not found:
        click.echo("there are no such jobs")
        return
    shown = table("key", "state", "enqueued", "waited", "ran", "ended", "attempts", "last error", right=["attempts"])
    for info in found:
        attempts = "-" if info.attempts is None else info.attempts
        error_line = (info.last_error or "").splitlines()[:1]
        waited, ran = _times(info)
        enqueued, ended = ago(info.created_at), ago(info.finished_at)
        add_row(shown, key_text(info.key), info.state, enqueued, span(waited), span(ran), ended, attempts, *error_line)
    console().print(shown)


@click.command(short_help="Show one job.")
@target_argument
@click.argument("key")
@url_option
@json_option
def job(target: str, key: str, url: str | None, *, json: bool) -> None:
    """Show all that is known of one job; the parts of a composite KEY are separated by commas.

    The exit code is 1 if there is no such job.
    """
    for one in load_targets([target]):
        with Database.of(one, url) as database, told_apart(one.spec):
            found = database.run(admin.job, one.model, key)
        if found is None:
            raise FailedError(f"{one.spec.name}: there is no job {key}")
        info, values = found
        if json:
            echo_json({**_plain(info), "row": values})
            continue
        waited, ran = _times(info)
        click.echo(f"{info.queue} {key_text(info.key)} is {info.state}")
        if ran is not None:
            click.echo(f"waited for {span(waited)}, ran for {span(ran)}")
        width = max(map(len, values), default=0)
        for name, value in values.items():
            lines = "-" if value is None else str(value).replace("\n", f"\n  {'':{width}}  ")
            click.echo(f"  {name:{width}}  {lines}")


def _times(info: admin.JobInfo) -> tuple[float | None, float | None]:
    """Return for how many seconds a job waited before its last run, and how long this took."""
    due = max((moment for moment in (info.run_at, info.created_at) if moment is not None), default=None)
    began, ended = info.started_at, info.finished_at
    waited = None if began is None or due is None else (began - due).total_seconds()
    return waited, None if began is None or ended is None else (ended - began).total_seconds()


def _plain(info: admin.JobInfo) -> dict[str, Any]:
    return {**vars(info), "key": key_text(info.key)}
