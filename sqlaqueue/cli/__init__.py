"""The command line ``sqlaqueue``: a click group with a command for each operation."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

try:
    import click
    import rich  # noqa: F401 - the commands need it
except ModuleNotFoundError as missing:
    raise SystemExit(f"The command line needs {missing.name}: pip install 'sqlaqueue[cli]'") from None

from sqlaqueue import __version__
from sqlaqueue.cli.bench import alembic_template, bench, demo
from sqlaqueue.cli.change import cancel, pause, purge, reconcile, requeue, rescue, resume
from sqlaqueue.cli.doctor import doctor
from sqlaqueue.cli.http import health
from sqlaqueue.cli.inspect import failed, job, jobs, metrics, stats, why, workers
from sqlaqueue.cli.output import InputError
from sqlaqueue.cli.schedules import schedules
from sqlaqueue.cli.worker import scheduler, web, worker

_OWN_DATABASE = ("demo",)
"""Commands that the settings of all commands do not apply to: the demo must not run in an application's database."""


def apply_settings(context: click.Context) -> None:
    here = Path.cwd()
    candidates = (directory / "pyproject.toml" for directory in (here, *here.parents))
    path = next((each for each in candidates if each.is_file()), None)
    if path is None:
        return
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("sqlaqueue", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: {error}") from error
    group = context.command
    if table and isinstance(group, click.Group):
        context.default_map = _defaults(table, group, f"{path}: [tool.sqlaqueue")


def _defaults(table: dict[str, Any], group: click.Group, where: str) -> dict[str, Any]:
    # A setting of a group of commands applies to those of its commands that have such an option.
    options = {
        name: set[str]().union(*map(_options, command.commands.values()))
        if isinstance(command, click.Group)
        else _options(command)
        for name, command in group.commands.items()
    }
    common = {key: value for key, value in table.items() if not isinstance(value, dict)}
    defaults: dict[str, Any] = {name: {} for name in options}
    known = set().union(*(names for each, names in options.items() if each not in _OWN_DATABASE))
    for key, value in common.items():
        name = _checked(key, known, f"{where}]")
        for each, names in options.items():
            if name in names and each not in _OWN_DATABASE:
                defaults[each][name] = value
    for section, values in table.items():
        if not isinstance(values, dict):
            continue
        if section not in options:
            raise InputError(f"{where}.{section}]: unknown command; known are {', '.join(options)}")
        defaults[section] |= {
            _checked(key, options[section], f"{where}.{section}]"): value for key, value in values.items()
        }
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            defaults[name] = {
                each: {key: value for key, value in defaults[name].items() if key in _options(one)}
                for each, one in command.commands.items()
            }
    return defaults


def _options(command: click.Command) -> set[str]:
    return {each.name for each in command.params if isinstance(each, click.Option) and each.name is not None}


def _checked(key: str, known: set[str], where: str) -> str:
    name = key.replace("-", "_")
    if name not in known:
        names = ", ".join(sorted(each.replace("_", "-") for each in known))
        raise InputError(f"{where} {key}: unknown setting; known are {names}")
    return name


@click.group(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SQLAQUEUE"})
@click.version_option(__version__, prog_name="sqlaqueue")
@click.pass_context
def main(context: click.Context) -> None:
    """Job queues for SQLAlchemy: a job is a row of your own model.

    A TARGET is a queue class, such as app.models:Email, a Consumer of your application, such as app.queues:consumer,
    or a module, such as app.models, for all queues in it. Options can also be set in the environment (SQLAQUEUE_URL,
    SQLAQUEUE_WORKER_CONCURRENCY) and in the table [tool.sqlaqueue] of the nearest pyproject.toml.

    Exit codes: 0 success, 1 failure, 2 wrong input, 3 the database does not answer or lacks what the queue needs, 4 a
    worker was stopped and had to end a handler.
    """
    apply_settings(context)


for command in (
    worker,
    scheduler,
    schedules,
    stats,
    failed,
    jobs,
    job,
    why,
    doctor,
    workers,
    health,
    metrics,
    web,
    requeue,
    cancel,
    purge,
    rescue,
    reconcile,
    pause,
    resume,
    bench,
    demo,
    alembic_template,
):
    main.add_command(command)
