"""The command ``doctor``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import click
from click.core import ParameterSource
from sqlalchemy.orm import Session

from sqlaqueue import admin
from sqlaqueue.admin.doctor.doctor import cheap_checks, examine
from sqlaqueue.admin.doctor.examination import SEVERITIES, target_of
from sqlaqueue.cli.database import Target, TargetDatabase, load_targets, parse_url, shown_url, targets_argument
from sqlaqueue.cli.output import DURATION, FAILED, InputError, command_errors, echo, echo_json, json_option, url_option
from sqlaqueue.log import fields as log_fields
from sqlaqueue.log import logger
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.facts import Severity


def _epilog() -> str:
    """Return the thresholds with their defaults, one a line; the mark before them keeps click from joining them."""
    listed = [
        f"{each.name}={_duration(each.default)}"
        if isinstance(each.default, timedelta)
        else f"{each.name}={each.default} ({each.metadata['unit']})"
        for each in fields(admin.Thresholds)
    ]
    lines = "\n".join(f"  {text}" for text in listed)
    return f"\b\nThresholds with their defaults; durations are written as 500ms, 30s, 5m, 2h or 7d:\n{lines}"


def _duration(value: timedelta) -> str:
    milliseconds = round(value.total_seconds() * 1000)
    for size, unit in ((3600_000, "h"), (60_000, "m"), (1000, "s")):
        if milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms"


@click.command(epilog=_epilog(), short_help="Say what is wrong with queues and their server, and how to repair it.")
@targets_argument
@url_option
@click.option("--deep", is_flag=True, help="Read all jobs and messages as well, which takes long for a large table.")
@json_option
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    default="warning",
    show_default=True,
    help="Exit with 1 if something as bad as this is found, or worse.",
)
@click.option(
    "--threshold",
    metavar="NAME=VALUE",
    multiple=True,
    help="From which value on something is a finding, such as oldest_due=10m; may be repeated. The names are below.",
)
@click.pass_context
def doctor(
    context: click.Context,
    targets: Sequence[str],
    url: str | None,
    threshold: Sequence[str],
    fail_on: Severity,
    *,
    deep: bool,
    json: bool,
) -> None:
    """Say what is wrong with queues and their server, the worst first, and how to repair it. It changes nothing.

    Exit codes: 0 nothing as bad as --fail-on is found, 1 something is, 2 wrong input, 3 the database does not answer.
    """
    with command_errors():
        limits = admin.Thresholds(**dict(map(_threshold, threshold)))
    loaded = load_targets(targets)
    found: list[admin.Finding] = []
    clients: set[str] = set()
    for group in _by_database(loaded, url):
        models = [target.model for target in group]
        with TargetDatabase.of(group[0], url) as database, command_errors(group[0].spec):
            found += database.run(admin.doctor, *models, deep=deep, thresholds=limits)
            clients.update(database.run(_client, model) for model in models)
    given = url if context.get_parameter_source("url") is ParameterSource.COMMANDLINE else None
    found = [_concrete(finding, loaded, given) for finding in found]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    if json:
        echo_json(found)
    else:
        printed: set[str] = set()
        for number, finding in enumerate(found):
            echo(*([""] if number else []), *_lines(finding, printed, " or ".join(sorted(clients))))
        if not found:
            names = ", ".join(dict.fromkeys(target.spec.name for target in loaded))
            more = "" if deep else " With --deep all jobs and messages are read as well."
            echo(f"Nothing is wrong with {names}.{more}")
    if any(SEVERITIES.index(finding.severity) <= SEVERITIES.index(fail_on) for finding in found):
        context.exit(FAILED)


def _by_database(targets: Sequence[Target], url: str | None) -> list[list[Target]]:
    groups: dict[Any, list[Target]] = {}
    for target in targets:
        user = target.consumer or target.scheduler
        key = None if url is not None or user is None else id(user.session_factory)
        groups.setdefault(key, []).append(target)
    return list(groups.values())


def _concrete(finding: admin.Finding, targets: Sequence[Target], url: str | None) -> admin.Finding:
    """Return a finding whose commands name the Consumer that the user has named, and the database."""
    named = {target_of(each.spec): each.text for each in reversed(targets) if each.consumer is not None}
    return replace(finding, fixes=tuple(_command(fix, named, url) for fix in finding.fixes))


def _command(fix: str, named: Mapping[str, str], url: str | None) -> str:
    if not fix.startswith("sqlaqueue "):
        return fix
    words = []
    for word in fix.split(" "):
        queue, _, handler = word.partition("=")
        # A Consumer has its handler.
        words.append(named[queue] if queue in named and handler in {"", _HANDLER} else word)
    if url is not None:
        words += ["--url", shlex.quote(shown_url(parse_url(url)))]
    return " ".join(words)


_HANDLER = "MODULE:HANDLER"


def _client(session: Session, model: type[Any]) -> str:
    """Return the program that executes SQL in the database of a queue."""
    name = session.get_bind(spec_of(model).mapper).dialect.name
    return {"sqlite": "sqlite3", "mariadb": "mariadb", "mysql": "mariadb"}.get(name, "psql")


def _lines(finding: admin.Finding, printed: set[str], client: str) -> Iterator[str]:
    """Yield the lines of a finding; several may have one cause, whose fix is ``printed`` once.

    :param client: the program that executes SQL.
    """
    yield f"{finding.severity}: {finding.queue or 'the server'}"
    yield f"  {finding.summary}"
    if finding.consequence:
        yield f"  {finding.consequence}"
    if finding.fixes and finding.fixes[0] in printed:
        yield "  Fix: as above."
        return
    for number, fix in enumerate(finding.fixes):
        printed.add(fix)
        where = client if fix.endswith(";") else "a shell"
        yield f"  {'Or' if number else 'Fix'}, in {where}:"
        # SQLAlchemy indents columns with tabs, which would be printed escaped, and psql would read as its command \t.
        yield from (f"    {line}" for line in fix.expandtabs(4).splitlines())
        if _HANDLER in fix:
            yield f"    # {_HANDLER} is the module and the name of the handler, such as app.tasks:send"


def _threshold(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    defaults = {each.name: each.default for each in fields(admin.Thresholds)}
    if not equals or name not in defaults:
        raise InputError(f"--threshold {text}: give NAME=VALUE; the names are {', '.join(sorted(defaults))}")
    default: Any = defaults[name]
    try:
        return name, DURATION.convert(value, None, None) if isinstance(default, timedelta) else type(default)(value)
    except ValueError:
        kind = "an integer" if isinstance(default, int) else "a number"
        raise InputError(f"--threshold {text}: the value has to be {kind}") from None
    except click.BadParameter as error:
        raise InputError(f"--threshold {text}: {error.message}") from None


_HURRIED = admin.Thresholds(statement_timeout=timedelta(seconds=0.25), lock_timeout=timedelta(seconds=0.1))


def worst_finding(session: Session, model: type[Any]) -> admin.Finding | None:
    """Return the worst finding, no notice, of checks that take next to no time; None if they fail."""
    try:
        found = examine(session, [model], cheap_checks, thresholds=_HURRIED)
    except Exception:
        extra = log_fields("doctor_failed", queue=spec_of(model).name)
        logger.debug("doctor: the queue could not be examined", exc_info=True, extra=extra)
        return None
    return next((one for one in found if one.severity != "notice"), None)


def worst_of(findings: Iterable[tuple[admin.Finding | None, type[Any]]]) -> tuple[admin.Finding, type[Any]] | None:
    found = [(finding, model) for finding, model in findings if finding is not None]
    return min(found, key=lambda each: SEVERITIES.index(each[0].severity), default=None)


def worst_finding_text(finding: admin.Finding, model: type[Any]) -> str:
    return (
        f"doctor: {finding.severity}: {finding.summary.rstrip('.')}; run `sqlaqueue doctor {target_of(spec_of(model))}`"
    )
