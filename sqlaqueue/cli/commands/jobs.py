"""The commands that show single jobs: ``jobs`` and ``job``."""

from __future__ import annotations

from typing import Any

import click

from sqlaqueue import admin
from sqlaqueue.cli.shared.database import Database
from sqlaqueue.cli.shared.errors import FailedError, command_errors
from sqlaqueue.cli.shared.options import filter_options, job_filter, json_option, target_argument, url_option
from sqlaqueue.cli.shared.output import add_row, ago, console, echo, echo_json, table
from sqlaqueue.cli.shared.targets import load_targets
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.run import key_text
from sqlaqueue.texts import duration_text


@click.command(short_help="List jobs.")
@target_argument
@url_option
@filter_options(STATES)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of jobs.")
@json_option
def jobs(target: str, url: str | None, *, limit: int, json: bool, **options: Any) -> None:
    """List jobs, newest first, by the time when they finished or, if they have not, when they were enqueued."""
    selected = job_filter(options, "created_at")
    loaded, found = load_targets([target]), list[admin.JobInfo]()
    for each in loaded:
        with Database.of(each, url) as database, command_errors(each.spec):
            found += database.run(admin.jobs, each.model, selected, limit=limit)
    if json:
        echo_json([_json(info) for info in found])
        return
    if not found:
        echo("no such jobs")
        return
    several = len(loaded) > 1
    queue = ["queue"] if several else []
    shown = table(
        *queue, "key", "state", "enqueued", "waited", "ran", "finished", "attempts", "last error", right=["attempts"]
    )
    for info in found:
        attempts = "-" if info.attempts is None else info.attempts
        first_line = (info.last_error or "").splitlines()[:1]
        waited, ran = _durations(info)
        add_row(
            shown,
            *([info.queue] if several else []),
            key_text(info.key),
            info.state,
            ago(info.created_at),
            duration_text(waited),
            duration_text(ran),
            ago(info.finished_at),
            attempts,
            *first_line,
        )
    console().print(shown)


@click.command(short_help="Show one job.")
@target_argument
@click.argument("key")
@url_option
@json_option
def job(target: str, key: str, url: str | None, *, json: bool) -> None:
    """Show one job with all columns of its row, and its attempts if the queue has an attempt history.

    Separate the parts of a composite KEY by commas. The exit code is 1 if there is no such job, nor attempts of it.
    """
    for each in load_targets([target]):
        with Database.of(each, url) as database, command_errors(each.spec):
            found = database.run(admin.job, each.model, key)
            kept = each.spec.config.attempt_history is not None
            history = database.run(admin.attempts, each.model, key) if kept else []
        more = {"history": [{**vars(one), "seconds": one.seconds} for one in history]} if kept else {}
        if found is None:
            if not history:
                raise FailedError(f"{each.spec.name}: there is no job {key}")
            if json:
                echo_json({"queue": each.spec.name, "key": key, "row": None, **more})
                continue
            echo(f"{each.spec.name} {key} does not exist any more")
            _show_attempts(history)
            continue
        info, values = found
        if json:
            echo_json({**_json(info), "row": values, **more})
            continue
        waited, ran = _durations(info)
        echo(f"{info.queue} {key_text(info.key)} is {info.state}")
        if ran is not None:
            echo(f"waited for {duration_text(waited)}, ran for {duration_text(ran)}")
        width = max(map(len, values), default=0)
        for name, value in values.items():
            first, *others = ("-" if value is None else str(value)).split("\n")
            echo(f"  {name:{width}}  {first}", *(f"  {'':{width}}  {line}" for line in others))
        if history:
            _show_attempts(history)


def _show_attempts(history: list[admin.Attempt]) -> None:
    """Show ended attempts; their tracebacks are in the JSON."""
    shown = table("attempt", "outcome", "started", "ran", "worker", "error", right=["attempt"])
    for one in history:
        first_line = (one.error or "").splitlines()[:1]
        ran = duration_text(one.seconds)
        add_row(shown, one.attempt, one.outcome, ago(one.started_at), ran, one.worker or "-", *first_line)
    console().print(shown)


def _durations(info: admin.JobInfo) -> tuple[float | None, float | None]:
    """Return the seconds that a job waited before its last run, and those that the run took."""
    due = max((moment for moment in (info.run_at, info.created_at) if moment is not None), default=None)
    started, finished = info.started_at, info.finished_at
    waited = None if started is None or due is None else (started - due).total_seconds()
    return waited, None if started is None or finished is None else (finished - started).total_seconds()


def _json(info: admin.JobInfo) -> dict[str, Any]:
    return {**vars(info), "key": key_text(info.key)}
