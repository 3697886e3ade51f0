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
from sqlaqueue.cli.output import InputError, TargetArgument
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
    if not isinstance(table, dict):
        raise InputError(f"{path}: [tool.sqlaqueue] is {table!r}; write a table")
    group = context.command
    if table and isinstance(group, click.Group):
        context.default_map = _defaults(table, group, f"{path}: [tool.sqlaqueue")


_Commands = list[tuple[dict[str, Any], click.Command]]
"""Commands, and the values of their parameters."""


def _defaults(table: dict[str, Any], group: click.Group, where: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    sections: dict[str, _Commands] = {}
    for name, command in group.commands.items():
        values = defaults[name] = {}
        if isinstance(command, click.Group):
            # A setting of a group of commands applies to those of its commands that have such an option.
            sections[name] = [(values.setdefault(each, {}), one) for each, one in command.commands.items()]
        else:
            sections[name] = [(values, command)]
    common = [each for name, commands in sections.items() if name not in _OWN_DATABASE for each in commands]
    for key, value in table.items():
        if not isinstance(value, dict) and key in sections:
            raise InputError(
                f"{where}] {key}: it is a command, whose settings are in a table of their own; for its target write "
                f"[tool.sqlaqueue.{key}] and below it target = ..."
            )
        if not isinstance(value, dict):
            _set(common, key, value, f"{where}]")
    for section, values in table.items():
        if isinstance(values, dict):
            if section not in sections:
                raise InputError(f"{where}.{section}]: unknown command; known are {', '.join(sections)}")
            for key, value in values.items():
                _set(sections[section], key, value, f"{where}.{section}]")
    return defaults


def _set(commands: _Commands, key: str, value: Any, where: str) -> None:
    """Set a value for the commands that have such an option."""
    name = key.replace("-", "_")
    found = [(values, each) for values, command in commands for each in command.params if _setting(each) == name]
    if not found:
        known = {_setting(each) for _, command in commands for each in command.params} - {None}
        names = ", ".join(sorted(str(each).replace("_", "-") for each in known))
        raise InputError(f"{where} {key}: unknown setting; known are {names}")
    for values, parameter in found:
        values[str(parameter.name)] = _checked(parameter, value, f"{where} {key}")


def _setting(parameter: click.Parameter) -> str | None:
    if isinstance(parameter, TargetArgument):
        return "target"
    return parameter.name if isinstance(parameter, click.Option) else None


def _checked(parameter: click.Parameter, value: Any, where: str) -> Any:
    """Return the value of a setting. An error does not repeat one of a wrong type, as it may contain a password."""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        if not isinstance(value, bool):
            raise InputError(f"{where}: write true or false")
        return value
    takes_several = isinstance(parameter, TargetArgument) or parameter.multiple
    values = value if isinstance(value, list) and takes_several else [value]
    if not values or not all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in values):
        raise InputError(f"{where}: write {'a text, or a list of texts' if takes_several else 'a text or a number'}")
    # As texts, as they are on the command line: 1.5 is no integer there.
    value = [str(each) for each in values] if takes_several else str(value)
    if isinstance(parameter, click.Option):
        try:
            parameter.type_cast_value(click.Context(click.Command(None)), value)
        except click.UsageError as error:
            raise InputError(f"{where}: {error.message}") from error
    return value


@click.group(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SQLAQUEUE"})
@click.version_option(__version__, prog_name="sqlaqueue")
@click.pass_context
def main(context: click.Context) -> None:
    """Job queues for SQLAlchemy: a job is a row of your own model.

    A TARGET is a queue class, such as app.models:Email, a Consumer of your application, such as app.queues:consumer,
    or a module, such as app.models, for all queues in it. Options can also be set in the environment (SQLAQUEUE_URL,
    SQLAQUEUE_WORKER_CONCURRENCY) and in the table [tool.sqlaqueue] of the nearest pyproject.toml, which may name the
    TARGET as well.

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
