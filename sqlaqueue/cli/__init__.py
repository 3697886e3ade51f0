"""The command line ``sqlaqueue``: a click group with a command for each operation."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

try:
    import click
    import rich  # noqa: F401 - the commands need it
except ModuleNotFoundError as missing:
    raise SystemExit(f"The command line needs {missing.name}: pip install 'sqlaqueue[cli]'") from None

from sqlaqueue import __version__
from sqlaqueue.cli.database import TargetArgument
from sqlaqueue.cli.output import InputError

_MODULES = {
    "worker": "worker",
    "scheduler": "worker",
    "schedules": "schedules",
    "stats": "inspect",
    "failed": "inspect",
    "jobs": "inspect",
    "job": "inspect",
    "why": "inspect",
    "doctor": "doctor",
    "workers": "inspect",
    "health": "http",
    "metrics": "inspect",
    "web": "worker",
    "requeue": "change",
    "cancel": "change",
    "purge": "change",
    "rescue": "change",
    "reconcile": "change",
    "pause": "change",
    "resume": "change",
    "bench": "bench",
    "demo": "bench",
    "alembic-template": "bench",
}
"""The modules of the commands, by the names of these."""

_OWN_DATABASE = ("demo",)
"""Commands that the settings of all commands do not apply to: the demo must not run in an application's database."""


class Commands(click.Group):
    """Commands whose modules are imported when they are needed: some import Consumers, servers or the benchmark."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # If it is not known, all are imported: the error proposes one with a similar name, which click looks for there.
        for name in (cmd_name,) if cmd_name in _MODULES else _MODULES:
            if name not in self.commands:
                module = import_module(f"sqlaqueue.cli.{_MODULES[name]}")
                self.add_command(getattr(module, name.replace("-", "_")), name)
        return self.commands.get(cmd_name)


def _complete_targets_in_bash() -> None:
    """Let click complete ``app:Em``, which is three words to bash, of which it replaces the last one."""
    from click.shell_completion import BashComplete, CompletionItem, add_completion_class  # noqa: PLC0415 - see below

    class TargetComplete(BashComplete):
        def get_completion_args(self) -> tuple[list[str], str]:
            before, incomplete = super().get_completion_args()
            words: list[str] = []
            for word in [*before, incomplete]:
                if words and word and (word == ":" or words[-1].endswith(":")):
                    words[-1] += word
                elif words and not word and words[-1].endswith(":"):
                    pass  # after the colon nothing is typed yet
                else:
                    words.append(word)
            return words[:-1], words[-1]

        def format_completion(self, item: CompletionItem[Any]) -> str:
            return f"{item.type},{item.value.rpartition(':')[2]}"

    add_completion_class(TargetComplete)


if os.environ.get("_SQLAQUEUE_COMPLETE", "").startswith("bash"):
    _complete_targets_in_bash()


def apply_settings(context: click.Context) -> None:
    here = Path.cwd()
    candidates = (directory / "pyproject.toml" for directory in (here, *here.parents))
    path = next((each for each in candidates if each.is_file()), None)
    if path is None:
        return
    import tomllib  # noqa: PLC0415 - an installed application has no such file

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("sqlaqueue", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(table, dict):
        raise InputError(f"{path}: [tool.sqlaqueue] is {table!r}; write a table")
    if table and context.invoked_subcommand is not None:
        context.default_map = _defaults(table, context, context.invoked_subcommand, f"{path}: [tool.sqlaqueue")


_Command = list[tuple[dict[str, Any], click.Command]]
"""A command, or those of a group, and the values of their parameters."""


def _defaults(table: dict[str, Any], context: click.Context, name: str, where: str) -> dict[str, Any]:
    """Return the settings of a command. Those of other commands are checked when these run, which imports them."""
    values, command = dict[str, Any](), _command(context, name)
    # A setting of a group of commands applies to those of its commands that have such an option.
    group = command.commands if isinstance(command, click.Group) else None
    commands = [(values, command)] if group is None else [(values.setdefault(one, {}), group[one]) for one in group]
    for key, value in table.items():
        if isinstance(value, dict):
            if key not in _MODULES:
                raise InputError(f"{where}.{key}]: unknown command; known are {', '.join(_MODULES)}")
        elif key in _MODULES:
            raise InputError(
                f"{where}] {key}: it is a command, whose settings are in a table of their own; for its target write "
                f"[tool.sqlaqueue.{key}] and below it target = ..."
            )
        elif name in _OWN_DATABASE or not _set(commands, key, value, f"{where}]"):
            others = [_command(context, each) for each in _MODULES if each not in _OWN_DATABASE]
            _check_known(key, others, f"{where}]")
    for key, value in table.get(name, {}).items():
        if not _set(commands, key, value, f"{where}.{name}]"):
            _check_known(key, [command], f"{where}.{name}]")
    return {name: values}


def _command(context: click.Context, name: str) -> click.Command:
    group = context.command
    found = group.get_command(context, name) if isinstance(group, click.Group) else None
    assert found is not None, name  # noqa: S101 - click has resolved it, or it is in the list above
    return found


def _set(commands: _Command, key: str, value: Any, where: str) -> bool:
    """Set a value for the commands that have such an option; return whether one has."""
    name = key.replace("-", "_")
    found = [(values, each) for values, command in commands for each in command.params if _setting(each) == name]
    for values, parameter in found:
        values[str(parameter.name)] = _checked(parameter, value, f"{where} {key}")
    return bool(found)


def _check_known(key: str, commands: Iterable[click.Command], where: str) -> None:
    """Raise an error unless one of the commands has such an option."""
    single = [one for each in commands for one in (each.commands.values() if isinstance(each, click.Group) else [each])]
    known = {_setting(each) for command in single for each in command.params} - {None}
    if key.replace("-", "_") not in known:
        names = ", ".join(sorted(str(each).replace("_", "-") for each in known))
        raise InputError(f"{where} {key}: unknown setting; known are {names}")


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


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SQLAQUEUE"})
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
