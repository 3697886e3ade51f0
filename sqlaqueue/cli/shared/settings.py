"""Defaults of options from ``[tool.sqlaqueue]`` in the nearest pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

from sqlaqueue.cli.shared.errors import InputError

_OWN_DATABASE = ("demo",)
"""Commands that the settings of all commands do not apply to: the demo must not run in an application's database."""


def apply_settings(context: click.Context) -> None:
    """Make the project's settings the defaults of the commands of this group.

    :raises InputError: if the file cannot be read, or a setting is unknown.
    """
    path = next((each for each in _candidates() if each.is_file()), None)
    if path is None:
        return
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("sqlaqueue", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: {error}") from error
    group = context.command
    if table and isinstance(group, click.Group):
        context.default_map = _defaults(table, group, f"{path}: [tool.sqlaqueue")


def _candidates() -> list[Path]:
    here = Path.cwd()
    return [directory / "pyproject.toml" for directory in (here, *here.parents)]


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
