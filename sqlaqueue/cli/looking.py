"""The commands that look: ``stats``, ``failed``, ``workers``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.cli.database import Database
from sqlaqueue.cli.errors import FAILED, told_apart
from sqlaqueue.cli.options import DURATION, json_option, target_argument, targets_argument, url_option
from sqlaqueue.cli.showing import add_row, ago, console, echo_json, span, table
from sqlaqueue.cli.targets import Target, load_targets
from sqlaqueue.keys import key_text
from sqlaqueue.queue.backend import backend
from sqlaqueue.statements import control
from sqlaqueue.statements.claim import worker_name

_MOST_KEYS = 5
"""How many of the jobs that a Consumer runs are shown to people."""


@click.command(short_help="Jobs by state, what is due, who serves it.")
@targets_argument
@url_option
@click.option(
    "--watch",
    type=DURATION,
    is_flag=False,
    flag_value=timedelta(seconds=2),
    help="Look again every so many seconds, two by default; give it after the targets.",
)
@click.option("--active", is_flag=True, help="Leave out finished jobs: to count them means to read the whole table.")
@json_option
def stats(targets: Sequence[str], url: str | None, watch: timedelta | None, *, active: bool, json: bool) -> None:
    """Show how queues are doing: jobs by state, how many are due and for how long, what has failed, who serves them."""
    loaded = load_targets(targets)
    with contextlib.ExitStack() as stack:
        databases = [stack.enter_context(Database.of(target, url)) for target in loaded]

        def look() -> list[admin.Stats]:
            return [_look(target, database, active=active) for target, database in zip(loaded, databases, strict=True)]

        if watch is None:
            found = look()
            if json:
                echo_json(found)
            else:
                console().print(_shown(found))
            return
        # Ctrl-C is how this ends.
        with contextlib.suppress(KeyboardInterrupt):
            _watch(look, watch.total_seconds(), json=json)


def _look(target: Target, database: Database, *, active: bool) -> admin.Stats:
    with told_apart(target.spec):
        return database.run(admin.stats, target.model, finished=not active)


def _watch(look: Any, seconds: float, *, json: bool) -> None:
    if json:
        while True:
            echo_json(look(), one_line=True)
            time.sleep(seconds)
    screen = console()
    if not screen.is_terminal:
        while True:
            screen.print(_shown(look()))
            time.sleep(seconds)
    with Live(_shown(look()), console=screen, auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(_shown(look()), refresh=True)


def _shown(found: Sequence[admin.Stats]) -> RenderableType:
    states = list(dict.fromkeys(state for one in found for state in one.states))
    if all(one.states.get("processing", 0) in {0, one.running} for one in found):
        states = [state for state in states if state != "processing"]
    numbers = ["pending", "running", *states, "due", "consumers"]
    shown = table("queue", *states, "running", "due", "oldest due", "consumers", right=numbers)
    notes = []
    for one in found:
        counts = [one.states.get(state, "-") for state in states]
        add_row(shown, one.queue, *counts, one.running, one.due, span(one.oldest_due), one.consumers)
        if one.paused:
            notes.append(Text(f"{one.queue} is paused"))
        if one.missing_indexes:
            names = ", ".join(one.missing_indexes)
            fix = backend().checks.UPDATE_COMMAND
            notes.append(Text(f"{one.queue}: claims may read the whole table, missing indexes: {names}; {fix}"))
        if one.failed_by_attempts:
            parts = (f"{jobs} after {attempts}" for attempts, jobs in one.failed_by_attempts.items())
            notes.append(Text(f"{one.queue}: failed by attempts: {', '.join(parts)}"))
    return Group(shown, *notes)


@click.command(short_help="What has failed, by kind of error.")
@target_argument
@url_option
@click.option(
    "--examples", type=click.IntRange(0, 100), default=3, show_default=True, help="How many keys to show for each kind."
)
@json_option
def failed(target: str, url: str | None, examples: int, *, json: bool) -> None:
    """Show what has failed, grouped by kind of error: its class, or what Fail(kind=...) has said.

    Errors whose text begins with neither are of the kind "other".
    """
    for one in load_targets([target]):
        with Database.of(one, url) as database, told_apart(one.spec):
            groups = database.run(admin.failures, one.model, examples=examples)
        if json:
            echo_json([{**vars(group), "keys": [key_text(key) for key in group.keys]} for group in groups])
            continue
        if not groups:
            click.echo(f"{one.spec.name}: nothing has failed")
            continue
        shown = table("kind", "jobs", "newest", "keys", "last error", right=["jobs"])
        for group in groups:
            text = (group.error or "").splitlines()[:1]
            keys = " ".join(map(key_text, group.keys))
            add_row(shown, group.kind or "(no error)", group.count, ago(group.newest), keys, *text)
        console().print(shown)


@click.command(short_help="The Consumers that serve queues now.")
@targets_argument
@url_option
@click.option("--here", is_flag=True, help="Only those of this machine.")
@json_option
def workers(targets: Sequence[str], url: str | None, *, here: bool, json: bool) -> None:
    """Show the Consumers that are alive, in whatever process: those that have checked in lately.

    The exit code is 1 if one of the queues has none.
    """
    rows: list[dict[str, Any]] = []
    served = True
    for target in load_targets(targets):
        with Database.of(target, url) as database, told_apart(target.spec):
            found = database.run(_consumers, target.model, here=here)
        rows.extend({"queue": target.spec.name, **row} for row in found)
        served = served and bool(found)
    if json:
        echo_json(rows)
    elif not rows:
        click.echo("nobody" + (" on this machine" if here else "") + " serves it")
    else:
        shown = table(
            "queue",
            "host",
            "pid",
            "name",
            "since",
            "heartbeat",
            "listening",
            "version",
            "claimed",
            "running",
            right=["pid", "claimed"],
        )
        for row in rows:
            running = " ".join(map(key_text, row["running"][:_MOST_KEYS]))
            if len(row["running"]) > _MOST_KEYS:
                running += f" ... ({len(row['running'])})"
            since, heartbeat = ago(row["created_at"]), ago(row["heartbeat_at"])
            listening = "yes" if row["listening"] else "no, it polls"
            who = (row["queue"], row["host"], row["pid"], row["name"], since, heartbeat, listening, row["version"])
            add_row(shown, *who, row["claimed"], running)
        console().print(shown)
    if not served:
        click.get_current_context().exit(FAILED)


def _consumers(session: Session, model: type[Any], *, here: bool) -> list[dict[str, Any]]:
    found = session.execute(control.consumers(model), bind_arguments={"mapper": model})
    host, _, _ = worker_name().rpartition(":")
    return [dict(row._mapping) for row in found if not here or row.host == host]  # noqa: SLF001 - SQLAlchemy's public name
