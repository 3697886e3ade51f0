"""The commands that change jobs: ``requeue``, ``cancel``, ``purge``, ``rescue``, ``reconcile``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from sqlalchemy.orm import Session

from sqlaqueue.admin import changes
from sqlaqueue.admin.jobs import JobFilter, count
from sqlaqueue.admin.state import paused
from sqlaqueue.cli.database import load_targets, open_targets
from sqlaqueue.cli.output import (
    dry_run_option,
    echo,
    echo_json,
    filter_options,
    job_filter,
    jobs_text,
    json_option,
    target_argument,
    targets_argument,
    url_option,
    with_options,
)
from sqlaqueue.queue.options import FINISHED, UNFINISHED
from sqlaqueue.queue.run import key_text
from sqlaqueue.statements import verbs


@dataclass(frozen=True)
class _BulkChange:
    infinitive: str
    participle: str
    change: changes.Change
    job_filter: JobFilter
    batch_size: int
    limit: int | None


_Execute = Callable[[Session, type[Any], _BulkChange], tuple[dict[str, Any], str]]
"""Executes a change; returns the result as values for JSON, and as a text."""


_bulk_options = with_options(
    click.option("--limit", type=click.IntRange(min=1), help="Maximum number of jobs."),
    click.option(
        "--batch-size",
        type=click.IntRange(1, 100_000),
        default=1000,
        show_default=True,
        help="Number of jobs that are changed in one transaction.",
    ),
    dry_run_option,
    click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation."),
)


@click.command(short_help="Run finished jobs again.")
@target_argument
@url_option
@filter_options(FINISHED, default=("failed",), age_of="finished")
@_bulk_options
@json_option
def requeue(target: str, **options: Any) -> None:
    """Make finished jobs pending again, with no attempt counted; by default those that failed."""
    _change_jobs(
        target, _bulk_change("requeue", "requeued", changes.requeue_some, options), execute=_requeue, **options
    )


@click.command(short_help="Cancel pending and running jobs.")
@target_argument
@url_option
@filter_options(UNFINISHED, default=UNFINISHED)
@_bulk_options
@json_option
def cancel(target: str, **options: Any) -> None:
    """Cancel pending jobs, and request the cancellation of running ones.

    Under a strategy that holds a transaction a running job is shown as pending; its cancellation is requested as well.
    """
    change = _bulk_change("cancel", "cancelled or asked to stop", changes.cancel_some, options, age_from="created_at")
    _change_jobs(target, change, execute=_cancel, **options)


@click.command(short_help="Delete finished jobs.")
@target_argument
@url_option
@filter_options(FINISHED, default=FINISHED, age_of="finished")
@_bulk_options
@json_option
def purge(target: str, **options: Any) -> None:
    """Delete finished jobs. A failed one that holds back the jobs behind it in its order stays; requeue it."""
    _change_jobs(target, _bulk_change("delete", "deleted", changes.purge_some, options), **options)


@click.command(short_help="Take jobs from dead workers.")
@target_argument
@url_option
@dry_run_option
@json_option
def rescue(target: str, **options: Any) -> None:
    """Make jobs whose lease has expired pending again, as Consumers do regularly."""
    _execute_verb(target, changes.preview_rescue, "rescued", verb=changes.rescue, **options)


@click.command(short_help="Repair the message table.")
@target_argument
@url_option
@dry_run_option
@json_option
def reconcile(target: str, **options: Any) -> None:
    """Insert missing messages and delete superfluous ones, as Consumers do regularly."""

    def preview(session: Session, model: type[Any]) -> int:
        return changes.preview(session, model, verbs.reconcile(model))

    _execute_verb(target, preview, "reconciled", verb=changes.reconcile, **options)


def _bulk_change(
    infinitive: str, participle: str, change: changes.Change, options: dict[str, Any], age_from: Any = "finished_at"
) -> _BulkChange:
    jobs = job_filter(options, age_from)
    return _BulkChange(infinitive, participle, change, jobs, options["batch_size"], options["limit"])


def _change_jobs(
    text: str,
    change: _BulkChange,
    *,
    url: str | None,
    dry_run: bool,
    yes: bool,
    json: bool,
    execute: _Execute | None = None,
    **_: Any,
) -> None:
    """Count the jobs, ask for confirmation, and change them in batches."""
    execute, rows = execute or _execute_change, []
    for target, run in open_targets(load_targets([text], of_a_key=change.job_filter.keys is not None), url):
        counts = run(count, change.job_filter)
        total = sum(counts.values())
        number = total if change.limit is None else min(change.limit, total)
        summary = f"{target.spec.name}: {jobs_text(number)}{_by_state(counts, change.limit)}"
        result: dict[str, Any] = {"changed": 0}
        if dry_run:
            unless = ", unless they have a duplicate" if execute is _requeue and target.spec.config.unique else ""
            _print(f"{summary} would be {change.participle}{unless}", json=json)
        # `cancel` reports keys without a job.
        elif number or (execute is _cancel and change.job_filter.keys):
            if number and not yes:
                # On standard error, as a program may read standard output.
                click.confirm(f"{summary} will be {change.participle}. Continue?", abort=True, err=True)
            result, text_result = run(execute, change)
            _print(f"{target.spec.name}: {text_result}", json=json)
        else:
            _print(f"{target.spec.name}: no jobs to {change.infinitive}", json=json)
        rows.append({"queue": target.spec.name, "found": number, **result})
    if json:
        echo_json(rows)


def _execute_change(session: Session, model: type[Any], change: _BulkChange) -> tuple[dict[str, Any], str]:
    batches = changes.in_batches(
        session, model, change.job_filter, change.change, size=change.batch_size, limit=change.limit
    )
    changed = sum(batches)
    return {"changed": changed}, f"{jobs_text(changed)} {change.participle}"


def _requeue(session: Session, model: type[Any], change: _BulkChange) -> tuple[dict[str, Any], str]:
    done = changes.requeue(session, model, change.job_filter, batch_size=change.batch_size, limit=change.limit)
    text = f"{jobs_text(done)} {change.participle}"
    result: dict[str, Any] = {"changed": int(done)}
    if done.duplicates:
        pairs = ", ".join(f"{key_text(key)} (duplicate {duplicate})" for key, duplicate in done.duplicates.items())
        text += f", {jobs_text(len(done.duplicates))} not, because of a duplicate: {pairs}"
    if done.left:
        keys = " ".join(map(key_text, done.left))
        text += f", {jobs_text(len(done.left))} not, as a duplicate is being enqueued: {keys}"
    text += _refused_text(done.refused)
    if done.refused:
        result["refused"] = _by_text(done.refused)
    if done.duplicates or done.left:
        result |= {"duplicates": _by_text(done.duplicates), "left": done.left}
    return result, text


def _refused_text(refused: Mapping[Any, str]) -> str:
    texts = ", ".join(f"{key_text(key)} ({error})" for key, error in refused.items())
    return f", {jobs_text(len(refused))} not, as the database refuses: {texts}" if refused else ""


def _by_text(found: Mapping[Any, Any]) -> dict[str, Any]:
    return {key_text(key): value for key, value in found.items()}


def _cancel(session: Session, model: type[Any], change: _BulkChange) -> tuple[dict[str, Any], str]:
    done = changes.cancel(session, model, change.job_filter, batch_size=change.batch_size, limit=change.limit)
    text = f"{jobs_text(len(done.cancelled))} cancelled"
    if done.asked:
        text += f", {jobs_text(len(done.asked))} running and asked to stop"
    if done.missing:
        text += f", {jobs_text(len(done.missing))} neither pending nor running: {' '.join(map(key_text, done.missing))}"
    result: dict[str, Any] = {"changed": len(done.cancelled), "asked": done.asked, "missing": done.missing}
    if done.refused:
        result["refused"] = _by_text(done.refused)
    return result, text + _refused_text(done.refused)


def _execute_verb(
    text: str,
    preview: Callable[[Session, type[Any]], int],
    participle: str,
    *,
    verb: Callable[[Session, type[Any]], int],
    url: str | None,
    dry_run: bool,
    json: bool,
) -> None:
    rows = []
    for target, run in open_targets(load_targets([text]), url):
        number = run(preview if dry_run else verb)
        _print(f"{target.spec.name}: {jobs_text(number)} {'would be ' if dry_run else ''}{participle}", json=json)
        rows.append({"queue": target.spec.name, "found": number, "changed": 0 if dry_run else number})
    if json:
        echo_json(rows)


def _by_state(counts: dict[str, int], limit: int | None) -> str:
    total = sum(counts.values())
    if limit is not None and limit < total:
        return f" of {total}"
    return f" ({', '.join(f'{jobs} {state}' for state, jobs in counts.items())})" if counts else ""


def _print(text: str, *, json: bool) -> None:
    if not json:
        echo(text)


@click.command(short_help="Stop claiming jobs of queues.")
@targets_argument
@url_option
@json_option
def pause(targets: Sequence[str], url: str | None, *, json: bool) -> None:
    """Pause queues: no job is claimed until `sqlaqueue resume`. Running jobs finish."""
    _execute(changes.pause, "paused", targets, url, json=json)


@click.command(short_help="Claim jobs of paused queues again.")
@targets_argument
@url_option
@json_option
def resume(targets: Sequence[str], url: str | None, *, json: bool) -> None:
    """Resume paused queues."""
    _execute(changes.resume, "resumed", targets, url, json=json)


def _execute(
    call: Callable[[Session, type[Any]], None], outcome: str, targets: Sequence[str], url: str | None, *, json: bool
) -> None:
    rows = []
    for target, run in open_targets(load_targets(targets), url):
        paused = run(_call, call)
        rows.append({"queue": target.spec.name, "paused": paused})
        if not json:
            echo(f"{target.spec.name} is {outcome}")
    if json:
        echo_json(rows)


def _call(session: Session, model: type[Any], call: Callable[[Session, type[Any]], None]) -> bool:
    call(session, model)
    return paused(session, model)
