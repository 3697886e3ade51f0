"""Import what the commands for schedules name: Schedules and Schedulers, beside queue classes and Consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlaqueue.cli.shared.errors import command_errors
from sqlaqueue.cli.shared.targets import Target, load, load_targets
from sqlaqueue.scheduler import SchedulerBase
from sqlaqueue.schedules.schedule import Schedule, schedule_groups


def load_schedule_targets(texts: Sequence[str]) -> list[Target]:
    """Return a queue for each pair of tables with schedules that the targets name.

    :raises InputError: if a target names no queue.
    """
    found: dict[tuple[int, str | None], Target] = {}
    for target in (target for text in texts for target in _targets(text)):
        table = target.spec.table
        found.setdefault((id(table.metadata), table.schema), target)
    return list(found.values())


def _targets(text: str) -> list[Target]:
    found = load(text)
    if isinstance(found, SchedulerBase):
        return [Target(text, group.spec.model, scheduler=found) for group in found.groups]
    listed: list[Any] = list(found) if isinstance(found, list | tuple) else [found]
    if any(isinstance(each, Schedule) for each in listed):
        with command_errors():
            return [Target(text, group.spec.model) for group in schedule_groups(listed, text)]
    return load_targets([text])
