"""The commands that show the state of queues: ``stats``, ``failed``, ``workers``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.cli.shared.database import Database
from sqlaqueue.cli.shared.errors import FAILED, command_errors
from sqlaqueue.cli.shared.options import DURATION, json_option, target_argument, targets_argument, url_option
from sqlaqueue.cli.shared.output import add_row, ago, console, echo, echo_json, plain, table
from sqlaqueue.cli.shared.targets import Target, load_targets
from sqlaqueue.cli.shared.worst_finding import worst_finding, worst_finding_text, worst_of
from sqlaqueue.postgresql.faults import UPDATE_COMMAND
from sqlaqueue.queue.run import key_text
from sqlaqueue.statements import verbs
from sqlaqueue.statements.claim import worker_name
from sqlaqueue.texts import duration_text

_SHOWN_KEYS = 5
"""Number of running jobs whose keys the table of Consumers shows."""


@click.command(short_help="Show jobs by state, due jobs, and Consumers.")
@targets_argument
@url_option
@click.option(
    "--watch",
    type=DURATION,
    is_flag=False,
    flag_value=timedelta(seconds=2),
    help="Repeat at this interval, every two seconds by default; give it after the targets.",
)
@click.option("--active", is_flag=True, help="Do not count finished jobs, as that reads the whole table.")
@json_option
def stats(targets: Sequence[str], url: str | None, watch: timedelta | None, *, active: bool, json: bool) -> None:
    """Show for each queue the number of jobs by state, how many are due and since when, and the number of Consumers."""
    loaded = load_targets(targets)
    with contextlib.ExitStack() as stack:
        databases = [stack.enter_context(Database.of(target, url)) for target in loaded]

        def query() -> list[admin.Stats]:
            return [_stats(target, database, active=active) for target, database in zip(loaded, databases, strict=True)]

        if watch is None:
            rows = query()
            if json:
                echo_json(rows)
            else:
                console().print(_stats_table(rows, _worst_finding(loaded, databases)))
            return
        # Ctrl-C ends it.
        with contextlib.suppress(KeyboardInterrupt):
            _watch(query, watch.total_seconds(), json=json)


def _stats(target: Target, database: Database, *, active: bool) -> admin.Stats:
    with command_errors(target.spec):
        return database.run(admin.stats, target.model, finished=not active)


def _worst_finding(targets: Sequence[Target], databases: Sequence[Database]) -> str | None:
    """Return the worst that is wrong with any of the queues or their server."""
    models = [target.spec.model for target in targets]
    worst = worst_of(
        (database.run(worst_finding, model), model) for model, database in zip(models, databases, strict=True)
    )
    return None if worst is None else worst_finding_text(*worst)


def _watch(query: Callable[[], list[admin.Stats]], seconds: float, *, json: bool) -> None:
    if json:
        while True:
            echo_json(query(), one_line=True)
            time.sleep(seconds)
    screen = console()
    if not screen.is_terminal:
        while True:
            screen.print(_stats_table(query()))
            time.sleep(seconds)
    with Live(_stats_table(query()), console=screen, auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(_stats_table(query()), refresh=True)


def _stats_table(rows: Sequence[admin.Stats], finding: str | None = None) -> RenderableType:
    states = list(dict.fromkeys(state for row in rows for state in row.states))
    if all(row.states.get("processing", 0) in {0, row.running} for row in rows):
        states = [state for state in states if state != "processing"]
    numbers = ["pending", "running", *states, "due", "consumers"]
    shown = table("queue", *states, "running", "due", "oldest due", "consumers", right=numbers)
    notes = []
    for row in rows:
        counts = [row.states.get(state, "-") for state in states]
        add_row(shown, row.queue, *counts, row.running, row.due, duration_text(row.oldest_due), row.consumers)
        if row.paused:
            notes.append(plain(f"{row.queue} is paused"))
        if row.at_limit:
            notes.append(plain(f"{row.queue}: at their limit: {', '.join(map(str, row.at_limit))}"))
        if row.expired_leases:
            leases, have = ("lease", "has") if row.expired_leases == 1 else ("leases", "have")
            notes.append(
                plain(
                    f"{row.queue}: {row.expired_leases} {leases} of running jobs {have} expired; Consumers rescue the "
                    "jobs, or `sqlaqueue rescue`"
                )
            )
        if row.missing_indexes:
            names = ", ".join(row.missing_indexes)
            fix = UPDATE_COMMAND
            what = "claims may read the whole table, or jobs are not unique"
            notes.append(plain(f"{row.queue}: {what}, missing or invalid indexes: {names}; {fix}"))
        if row.failed_by_attempts:
            parts = (f"{jobs} after {attempts}" for attempts, jobs in row.failed_by_attempts.items())
            notes.append(plain(f"{row.queue}: failed by attempts: {', '.join(parts)}"))
    if finding is not None:
        notes.append(plain(finding))
    return Group(shown, *notes)


@click.command(short_help="Show failed jobs by kind of error.")
@target_argument
@url_option
@click.option(
    "--examples", type=click.IntRange(0, 100), default=3, show_default=True, help="Number of keys shown for each kind."
)
@json_option
def failed(target: str, url: str | None, examples: int, *, json: bool) -> None:
    """Show failed jobs, grouped by kind of error: the name of its class, or the kind given to Fail(kind=...).

    An error whose text starts with neither is of the kind "other".
    """
    loaded, found = load_targets([target]), list[dict[str, Any]]()
    for each in loaded:
        queue = each.spec.name
        with Database.of(each, url) as database, command_errors(each.spec):
            groups = database.run(admin.failures, each.model, examples=examples)
        if json:
            found += [{"queue": queue, **vars(one), "keys": [key_text(key) for key in one.keys]} for one in groups]
            continue
        if not groups:
            echo(f"{queue}: no failed jobs")
            continue
        if len(loaded) > 1:
            echo(f"{queue}:")
        shown = table("kind", "jobs", "newest", "keys", "last error", right=["jobs"])
        for group in groups:
            text = (group.error or "").splitlines()[:1]
            keys = " ".join(map(key_text, group.keys))
            add_row(shown, group.kind or "(no error)", group.count, ago(group.newest), keys, *text)
        console().print(shown)
    if json:
        echo_json(found)


@click.command(short_help="Show the Consumers of queues.")
@targets_argument
@url_option
@click.option("--here", is_flag=True, help="Only those of this machine.")
@json_option
def workers(targets: Sequence[str], url: str | None, *, here: bool, json: bool) -> None:
    """Show the Consumers, on all machines, that have sent a heartbeat recently.

    The exit code is 1 if one of the queues has none.
    """
    rows: list[dict[str, Any]] = []
    all_served = True
    for target in load_targets(targets):
        with Database.of(target, url) as database, command_errors(target.spec):
            found = database.run(_consumers, target.model, here=here)
        rows.extend({"queue": target.spec.name, **row} for row in found)
        all_served = all_served and bool(found)
    if json:
        echo_json(rows)
    elif not rows:
        echo("no Consumers" + (" on this machine" if here else ""))
    else:
        console().print(_consumers_table(rows))
    if not all_served:
        click.get_current_context().exit(FAILED)


def _consumers_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    columns = ("queue", "host", "pid", "name", "started", "heartbeat", "listening", "version", "claimed", "running")
    shown = table(*columns, right=["pid", "claimed"])
    for row in rows:
        running = " ".join(map(key_text, row["running"][:_SHOWN_KEYS]))
        if len(row["running"]) > _SHOWN_KEYS:
            running += f" ... ({len(row['running'])})"
        started, heartbeat = ago(row["created_at"]), ago(row["heartbeat_at"])
        listening = "yes" if row["listening"] else "no, polling"
        process = (row["queue"], row["host"], row["pid"], row["name"])
        add_row(shown, *process, started, heartbeat, listening, row["version"], row["claimed"], running)
    return shown


def _consumers(session: Session, model: type[Any], *, here: bool) -> list[dict[str, Any]]:
    found = session.execute(verbs.consumers(model), bind_arguments={"mapper": model})
    host, _, _ = worker_name().rpartition(":")
    return [dict(row._mapping) for row in found if not here or row.host == host]  # noqa: SLF001 - SQLAlchemy's public name
