"""The commands for whole queues: ``pause`` and ``resume``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.cli.shared.database import Database
from sqlaqueue.cli.shared.errors import command_errors
from sqlaqueue.cli.shared.options import json_option, targets_argument, url_option
from sqlaqueue.cli.shared.output import echo, echo_json
from sqlaqueue.cli.shared.targets import load_targets


@click.command(short_help="Stop claiming jobs of queues.")
@targets_argument
@url_option
@json_option
def pause(targets: Sequence[str], url: str | None, *, json: bool) -> None:
    """Pause queues: no job is claimed until `sqlaqueue resume`. Running jobs finish."""
    _execute(admin.pause, "paused", targets, url, json=json)


@click.command(short_help="Claim jobs of paused queues again.")
@targets_argument
@url_option
@json_option
def resume(targets: Sequence[str], url: str | None, *, json: bool) -> None:
    """Resume paused queues."""
    _execute(admin.resume, "resumed", targets, url, json=json)


def _execute(
    call: Callable[[Session, type[Any]], None], outcome: str, targets: Sequence[str], url: str | None, *, json: bool
) -> None:
    rows = []
    for target in load_targets(targets):
        with Database.of(target, url) as database, command_errors(target.spec):
            paused = database.run(_call, target.model, call)
        rows.append({"queue": target.spec.name, "paused": paused})
        if not json:
            echo(f"{target.spec.name} is {outcome}")
    if json:
        echo_json(rows)


def _call(session: Session, model: type[Any], call: Callable[[Session, type[Any]], None]) -> bool:
    call(session, model)
    return admin.paused(session, model)
