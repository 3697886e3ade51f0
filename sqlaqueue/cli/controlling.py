"""The commands for a queue as a whole: ``pause`` and ``resume``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.cli.database import Database
from sqlaqueue.cli.errors import told_apart
from sqlaqueue.cli.options import json_option, targets_argument, url_option
from sqlaqueue.cli.showing import echo_json
from sqlaqueue.cli.targets import load_targets


@click.command(short_help="Hand out no more jobs.")
@targets_argument
@url_option
@json_option
def pause(targets: Sequence[str], url: str | None, *, json: bool) -> None:
    """Let queues pause: nobody is handed a job until `sqlaqueue resume`. What is running goes on to its end."""
    _carry_out(admin.pause, "paused", targets, url, json=json)


@click.command(short_help="Hand out jobs again.")
@targets_argument
@url_option
@json_option
def resume(targets: Sequence[str], url: str | None, *, json: bool) -> None:
    """Let paused queues go on."""
    _carry_out(admin.resume, "not paused", targets, url, json=json)


def _carry_out(
    call: Callable[[Session, type[Any]], None], outcome: str, targets: Sequence[str], url: str | None, *, json: bool
) -> None:
    done = []
    for target in load_targets(targets):
        with Database.of(target, url) as database, told_apart(target.spec):
            paused = database.run(_call, target.model, call)
        done.append({"queue": target.spec.name, "paused": paused})
        if not json:
            click.echo(f"{target.spec.name} is {outcome}")
    if json:
        echo_json(done)


def _call(session: Session, model: type[Any], call: Callable[[Session, type[Any]], None]) -> bool:
    call(session, model)
    return admin.paused(session, model)
