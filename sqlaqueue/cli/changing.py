"""The commands that change jobs: ``requeue``, ``cancel``, ``purge``, ``rescue``, ``reconcile``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.admin.changes import Change
from sqlaqueue.cli.database import Database
from sqlaqueue.cli.errors import told_apart
from sqlaqueue.cli.options import dry_run_option, json_option, target_argument, url_option, which_options
from sqlaqueue.cli.showing import echo_json
from sqlaqueue.cli.targets import Target, load_targets
from sqlaqueue.queue.config import FINISHED
from sqlaqueue.statements import manage

yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


_Do = Callable[[Session, Target, "_Order"], tuple[dict[str, Any], str]]
"""Carries an order out; returns what it did, for programs and in words."""


@dataclass(frozen=True)
class _Order:
    """What is to be done to which jobs."""

    word: str
    done: str
    change: Change
    which: admin.JobFilter
    batch_size: int
    limit: int | None


@click.command(short_help="Let failed jobs run again.")
@target_argument
@url_option
@which_options(("failed",), FINISHED, "ended")
@dry_run_option
@yes_option
@json_option
def requeue(target: str, **options: Any) -> None:
    """Let finished jobs run again, by default those that failed, with no attempt counted."""
    _carry_out(target, _order("requeue", "requeued", admin.requeue_some, options), **options)


@click.command(short_help="Cancel waiting jobs.")
@target_argument
@url_option
@which_options(("pending", "processing"), ("pending", "processing"), "were enqueued")
@dry_run_option
@yes_option
@json_option
def cancel(target: str, **options: Any) -> None:
    """Cancel jobs that wait, and ask those that run to stop.

    Under a strategy that holds a transaction a running job shows as pending, and is asked as well.
    """
    order = _order("cancel", "cancelled or asked to stop", admin.cancel_some, options, since="created_at")
    _carry_out(target, order, do=_cancel, **options)


@click.command(short_help="Delete finished jobs.")
@target_argument
@url_option
@which_options(FINISHED, FINISHED, "ended")
@dry_run_option
@yes_option
@json_option
def purge(target: str, **options: Any) -> None:
    """Delete finished jobs."""
    _carry_out(target, _order("delete", "deleted", admin.purge_some, options), **options)


@click.command(short_help="Take jobs back from workers that died.")
@target_argument
@url_option
@dry_run_option
@json_option
def rescue(target: str, **options: Any) -> None:
    """Take back jobs whose lease has expired, as Consumers do every few seconds."""
    _at_once(target, manage.rescue, "rescued", **options)


@click.command(short_help="Mend what bypassed the triggers.")
@target_argument
@url_option
@dry_run_option
@json_option
def reconcile(target: str, **options: Any) -> None:
    """Give waiting jobs a message that have none, and consume messages in vain, as Consumers do now and then."""
    _at_once(target, manage.reconcile, "mended", **options)


def _order(word: str, done: str, change: Change, options: dict[str, Any], since: Any = "finished_at") -> _Order:
    keys: tuple[str, ...] = options["key"]
    which = admin.JobFilter(
        states=tuple(dict.fromkeys(options["state"])),
        older_than=options["older_than"],
        newer_than=options["newer_than"],
        since=since,
        error=options["error"],
        keys=keys or None,
    )
    return _Order(word, done, change, which, options["batch_size"], options["limit"])


def _carry_out(
    text: str, order: _Order, *, url: str | None, dry_run: bool, yes: bool, json: bool, do: _Do | None = None, **_: Any
) -> None:
    """Count, ask, and change batch by batch."""
    do, result = do or _change, []
    for target in load_targets([text]):
        with Database.of(target, url) as database, told_apart(target.spec):
            counts = database.run(admin.count, target.model, order.which)
            number = sum(counts.values()) if order.limit is None else min(order.limit, sum(counts.values()))
            said = f"{target.spec.name}: {_jobs(number)}{_by_state(counts, order.limit)}"
            told: dict[str, Any] = {"changed": 0}
            if dry_run:
                _say(f"{said} would be {order.done}", json=json)
            # Of jobs that were named it is told as well that there is none.
            elif (do is _cancel and order.which.keys and not number) or (
                number and (yes or _agreed(f"{said} will be {order.done}. Go on?"))
            ):
                told, words = database.run(do, target, order)
                _say(f"{target.spec.name}: {words}", json=json)
            elif not number:
                _say(f"{target.spec.name}: there is nothing to {order.word}", json=json)
        result.append({"queue": target.spec.name, "found": number, **told})
    if json:
        echo_json(result)


def _change(session: Session, target: Target, order: _Order) -> tuple[dict[str, Any], str]:
    batches = admin.in_batches(
        session, target.model, order.which, order.change, size=order.batch_size, limit=order.limit
    )
    changed = sum(batches)
    return {"changed": changed}, f"{_jobs(changed)} {order.done}"


def _cancel(session: Session, target: Target, order: _Order) -> tuple[dict[str, Any], str]:
    done = admin.cancel(session, target.model, order.which, batch_size=order.batch_size, limit=order.limit)
    words = f"{_jobs(len(done.cancelled))} cancelled"
    if done.asked:
        words += f", {_jobs(len(done.asked))} running and asked to stop"
    if done.missing:
        words += f", {_jobs(len(done.missing))} not found waiting or running: {' '.join(map(str, done.missing))}"
    return {"changed": len(done.cancelled), "asked": done.asked, "missing": done.missing}, words


def _at_once(
    text: str, verb: Callable[[type[Any]], Any], done: str, *, url: str | None, dry_run: bool, json: bool
) -> None:
    result = []
    for target in load_targets([text]):
        with Database.of(target, url) as database, told_apart(target.spec):
            run = admin.preview if dry_run else admin.execute
            number = database.run(run, target.model, verb(target.model))
        _say(f"{target.spec.name}: {_jobs(number)} {'would be ' if dry_run else ''}{done}", json=json)
        result.append({"queue": target.spec.name, "found": number, "changed": 0 if dry_run else number})
    if json:
        echo_json(result)


def _agreed(question: str) -> bool:
    # On standard error, so that what a program reads stays what it is.
    click.confirm(question, abort=True, err=True)
    return True


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _by_state(counts: dict[str, int], limit: int | None) -> str:
    total = sum(counts.values())
    if limit is not None and limit < total:
        return f" of {total}"
    return f" ({', '.join(f'{jobs} {state}' for state, jobs in counts.items())})" if counts else ""


def _say(text: str, *, json: bool) -> None:
    if not json:
        click.echo(text)
