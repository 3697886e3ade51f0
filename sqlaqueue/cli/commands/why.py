"""The command that says why a job, or a queue, does not run: ``why``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.admin.changes import across_shards
from sqlaqueue.admin.explain_job import MISSING
from sqlaqueue.cli.shared.database import Database
from sqlaqueue.cli.shared.errors import FAILED, command_errors
from sqlaqueue.cli.shared.options import json_option, target_argument, url_option
from sqlaqueue.cli.shared.output import echo, echo_json, jobs_text
from sqlaqueue.cli.shared.targets import load_targets
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import key_text
from sqlaqueue.texts import duration_text, moment_text


@click.command(short_help="Say why a job, or a queue, does not run.")
@target_argument
@click.argument("key", required=False)
@url_option
@json_option
def why(target: str, key: str | None, url: str | None, *, json: bool) -> None:
    """Say why a job does not run: its twin, a pause, its time, a lock, no Consumer, and what to do about it.

    Separate the parts of a composite KEY by commas. Without KEY: what keeps the jobs of the queue from running. The
    exit code is 1 if there is no such job.
    """
    exists = True
    for each in load_targets([target]):
        with Database.of(each, url) as database, command_errors(each.spec):
            if key is None:
                _echo_queue(*database.run(_queue, each.model), json=json)
                continue
            explanation = database.run(admin.explain_job, each.model, key)
        exists = exists and explanation.state != MISSING
        if json:
            shown = explanation.key
            echo_json({**asdict(explanation), "key": key_text(shown) if isinstance(shown, tuple) else str(shown)})
        else:
            echo(*str(explanation).split("\n"))
    if not exists:
        click.get_current_context().exit(FAILED)


def _queue(session: Session, model: type[Any]) -> tuple[admin.Stats, datetime | None]:
    """Return the statistics of a queue, and when its next job will be due."""
    spec = spec_of(model)
    moment = None
    if spec.has("run_at"):
        upcoming = across_shards(session, spec, spec.strategy.upcoming(spec, 1))
        moment = session.scalar(upcoming, bind_arguments={"mapper": spec.mapper})
    return admin.stats(session, model), None if moment is None else datetime.fromtimestamp(float(moment), UTC)


def _echo_queue(stats: admin.Stats, next_due: datetime | None, *, json: bool) -> None:
    if json:
        shown = ("queue", "paused", "consumers", "running", "due", "oldest_due")
        values = {name: getattr(stats, name) for name in shown}
        full = [asdict(each) for each in stats.at_limit]
        echo_json({**values, "next_due": next_due, "at_limit": full, "failed": stats.states.get("failed", 0)})
        return
    echo(stats.queue)
    for line in _lines(stats, next_due):
        echo(f"  {line}")


def _lines(stats: admin.Stats, next_due: datetime | None) -> Iterator[str]:
    if stats.paused:
        yield "It is paused, so no job is claimed; `sqlaqueue resume` ends that."
    if stats.consumers:
        number = "1 live Consumer serves" if stats.consumers == 1 else f"{stats.consumers} live Consumers serve"
        yield f"{number} it; {jobs_text(stats.running)} running."
    else:
        yield "No live Consumer serves it; start one, for instance with `sqlaqueue worker`."
    since = "" if stats.oldest_due is None else f", the oldest of them for {duration_text(stats.oldest_due)}"
    then = "" if next_due is None else f"; the next one is due at {moment_text(next_due)}"
    yield f"Due: {jobs_text(stats.due)}{since}{then}."
    if stats.at_limit:
        yield f"At their limit: {', '.join(map(str, stats.at_limit))}; the end of a run makes room."
    failed = stats.states.get("failed", 0)
    if failed:
        yield f"Failed: {jobs_text(failed)}; `sqlaqueue failed` shows why."
