"""The commands that change jobs: ``requeue``, ``cancel``, ``purge``, ``rescue``, ``reconcile``; and ``job --set``."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Mapper, Session, lazyload

from sqlaqueue.admin import changes
from sqlaqueue.admin.jobs import JobFilter, JobInfo, count, job_info
from sqlaqueue.admin.state import paused
from sqlaqueue.cli.database import load_targets, open_targets, target_argument, targets_argument
from sqlaqueue.cli.output import (
    FailedError,
    InputError,
    dry_run_option,
    echo,
    echo_json,
    filter_options,
    first_line,
    job_filter,
    jobs_text,
    json_option,
    progress,
    url_option,
    with_options,
)
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.options import FINISHED, STATES, UNFINISHED
from sqlaqueue.queue.run import key_text, key_tuple
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements import verbs

if TYPE_CHECKING:
    from sqlaqueue.web.data.edit_fields import EditableField
    from sqlaqueue.web.data.job_columns import JobColumn


@dataclass(frozen=True)
class _BulkChange:
    infinitive: str
    participle: str
    change: changes.Change
    job_filter: JobFilter
    batch_size: int
    limit: int | None
    progress: changes.Progress = int


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
            with progress(target.spec.name, number, json=json) as advance:
                result, text_result = run(execute, replace(change, progress=advance))
            _print(f"{target.spec.name}: {text_result}", json=json)
        else:
            _print(f"{target.spec.name}: no jobs to {change.infinitive}", json=json)
        rows.append({"queue": target.spec.name, "found": number, **result})
    if json:
        echo_json(rows)


def _execute_change(session: Session, model: type[Any], change: _BulkChange) -> tuple[dict[str, Any], str]:
    batches = changes.in_batches(
        session,
        model,
        change.job_filter,
        change.change,
        size=change.batch_size,
        limit=change.limit,
        progress=change.progress,
    )
    changed = sum(batches)
    return {"changed": changed}, f"{jobs_text(changed)} {change.participle}"


def _requeue(session: Session, model: type[Any], change: _BulkChange) -> tuple[dict[str, Any], str]:
    options: dict[str, Any] = {"batch_size": change.batch_size, "limit": change.limit, "progress": change.progress}
    done = changes.requeue(session, model, change.job_filter, **options)
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
    options: dict[str, Any] = {"batch_size": change.batch_size, "limit": change.limit, "progress": change.progress}
    done = changes.cancel(session, model, change.job_filter, **options)
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
        # One statement, of which it is not known how far it is.
        with progress(target.spec.name, None, json=json):
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


# -- the columns of one job --------------------------------------------------------------------------------------------

_INSTEAD = {
    "status": "`sqlaqueue requeue` and `sqlaqueue cancel` change it",
    "attempts": "`sqlaqueue requeue` sets it to 0",
    "lease_expires_at": "`sqlaqueue rescue` ends the claims of dead workers",
    "claimed_by": "`sqlaqueue rescue` ends the claims of dead workers",
}
"""The commands for columns that the queue itself writes, by their roles."""


def set_columns(
    text: str, key: str, given: Sequence[str], url: str | None, *, dry_run: bool, yes: bool, json: bool
) -> None:
    """Change columns of one job, with the parser of the dashboard's page and what it allows.

    :param given: texts ``COLUMN=VALUE``.
    """
    for target, run in open_targets(load_targets([text], of_a_key=True), url):
        job = f"{target.spec.name} {key}"
        changes: Sequence[_Changed] = run(_change_columns, key, given)
        summary = ", ".join(f"{each.name} from {_shown(each.before)} to {_shown(each.after)}" for each in changes)
        if not changes:
            _print(f"{job}: nothing to change", json=json)
        elif dry_run:
            _print(f"{job}: {summary} would be changed", json=json)
        else:
            if not yes:
                click.confirm(f"{job}: {summary} will be changed. Continue?", abort=True, err=True)
            run(_change_columns, key, given, agreed=changes)
            _print(f"{job}: {summary} changed", json=json)
        if json:
            changed = {} if dry_run else {each.name: each.text for each in changes}
            echo_json({"queue": target.spec.name, "key": key, "changed": changed})


@dataclass(frozen=True)
class _Changed:
    name: str
    before: Any
    after: Any
    text: str | None


def _change_columns(
    session: Session, model: type[Any], key: str, given: Sequence[str], *, agreed: Sequence[_Changed] | None = None
) -> Sequence[_Changed]:
    """Return the columns whose values differ from the given ones.

    :param agreed: what was returned before; if it still holds, it is written. The row is locked then, and not waited
        for, so that an edit never stands against a worker.
    """
    from sqlaqueue.web.data.edit_fields import field_value, violation_of  # noqa: PLC0415 - most commands do without it

    spec, row = spec_of(model), None
    found = job_info(session, model, key)
    bind = {"mapper": spec.mapper}
    if found is not None:
        of_job = spec.key_in(spec.keys, [key_tuple(found.key)])
        rows = sa.select(*spec.keys).where(of_job)
        if agreed is not None and session.execute(spec.strategy.lock(spec, rows), bind_arguments=bind).first() is None:
            raise FailedError(f"{spec.name} {key}: it is locked: a worker runs it, or a program changes it; try again")
        found = job_info(session, model, key)  # between the two statements it may have been claimed
        row = session.scalars(sa.select(model).where(of_job).options(lazyload("*")), bind_arguments=bind).one_or_none()
    _check_state(found, spec, key, has_row=row is not None)
    state: Any = sa.inspect(row)
    texts, mapper = _texts(given), state.mapper
    fields = _fields(spec, mapper, texts)
    changes = []
    for name, text in texts.items():
        field = fields[name]
        value = text if text or field.kind == "text" else None
        with _wrong_values(f"--set {name}={text}", field):
            after = field_value(field, value)
        before = getattr(row, field.attribute)
        if (None if value is None else after) != before:
            changes.append(_Changed(name, before, None if value is None else after, value))
            if agreed is not None:
                with _wrong_values(f"--set {name}={text}", field):
                    setattr(row, field.attribute, after)
    if agreed is None:
        return changes
    if changes != list(agreed):
        raise FailedError(f"{spec.name} {key}: it was changed meanwhile, so nothing was written; look at it, try again")
    try:
        session.commit()
    except DBAPIError as error:
        violation = violation_of(error, spec)
        if violation is None and not isinstance(error, IntegrityError):
            raise
        problem = violation[1] if violation is not None else first_line(error.orig or error)
        raise InputError(f"{spec.name} {key}: {problem}") from error
    return changes


def _check_state(found: JobInfo | None, spec: QueueSpec, key: str, *, has_row: bool) -> None:
    if found is None:
        raise FailedError(f"{spec.name}: there is no job {key}")
    if not has_row:
        raise FailedError(
            f"{spec.name} {key}: it is {found.state}, and its row is kept as a dead letter; requeue it, then change it"
        )
    if found.state == "processing":
        raise FailedError(f"{spec.name} {key}: it is running; wait for its end, or cancel it first")
    if found.state not in STATES:
        raise FailedError(f"{spec.name} {key}: its status is not one that the queue uses")


def _texts(given: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or name in texts:
            raise InputError(f"--set {each}: {'it is given twice' if equals else 'write COLUMN=VALUE'}")
        texts[name] = text
    return texts


def _fields(spec: QueueSpec, mapper: Mapper[Any], names: Iterable[str]) -> Mapping[str, EditableField]:
    from sqlaqueue.web.data.edit_fields import fields_of  # noqa: PLC0415 - as above
    from sqlaqueue.web.data.job_columns import columns_of  # noqa: PLC0415 - as above

    columns = columns_of(spec, lambda *_: False)
    fields = {each.name: each for each in fields_of(columns, mapper)}
    for name in names:
        if name not in fields:
            why = _why_fixed(columns.get(name), ", ".join(fields))
            raise InputError(f"--set {name}=...: {spec.name}.{name} {why}")
    return fields


def _why_fixed(column: JobColumn | None, names: str) -> str:
    can = f"those that can be changed are {names}" if names else "none of its columns can be changed"
    if column is None:
        return f"does not exist; {can}"
    if column.is_key:
        return f"is the key of the job; {can}"
    if column.role in _INSTEAD:
        return f"is written by the queue; {_INSTEAD[column.role]}"
    return f"{'cannot be changed by a text' if column.role is None else 'says what has happened'}; {can}"


@contextmanager
def _wrong_values(given: str, field: EditableField) -> Iterator[None]:
    """Translate what the field, or a validator of the application, says about a value."""
    try:
        yield
    except Exception as error:
        hint = field.hint or ", ".join(field.column.choices)
        problem = str(error) or type(error).__name__
        raise InputError(f"{given}: {problem.rstrip('.')}{f' ({hint})' if hint else ''}") from error


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value) if isinstance(value, str) else str(value)


@click.command(short_help="Stop claiming jobs of queues.")
@targets_argument
@url_option
@click.option("--reason", default="", metavar="TEXT", help="Why, for those who look at the dashboard.")
@json_option
def pause(targets: Sequence[str], url: str | None, reason: str, *, json: bool) -> None:
    """Pause queues: no job is claimed until `sqlaqueue resume`. Running jobs finish.

    The reason and the name of your account are shown by the dashboard.
    """
    call = partial(changes.pause, reason=reason, author=_account()) if reason else changes.pause
    _execute(call, "paused", targets, url, json=json)


def _account() -> str:
    try:
        return getpass.getuser()[:50]
    except (KeyError, OSError):  # there is no such account, as in some containers
        return ""


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
