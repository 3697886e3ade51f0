"""The schedules that one process fires, by the tables in which they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.schedules.definition import Schedule
from sqlaqueue.schedules.tables import ScheduleTables


@dataclass(eq=False)
class ScheduleGroup:
    """The schedules of all queues in one MetaData and schema, as a process knows them."""

    tables: ScheduleTables
    spec: QueueSpec
    """One of the queues: the sessions send the statements to its engine."""
    declared: dict[str, Schedule[Any]] = field(default_factory=dict)
    """The schedules of the program, by name."""

    @property
    def bind(self) -> dict[str, Any]:
        """The ``bind_arguments`` of statements, as a session may have several engines."""
        return {"mapper": self.spec.mapper}

    @property
    def specs(self) -> Sequence[QueueSpec]:
        """The queues for which the program declares schedules."""
        return list(dict.fromkeys([self.spec, *(each.spec for each in self.declared.values())]))

    @property
    def factories(self) -> dict[str, Callable[..., Any]]:
        """The functions ``make`` of the program, by the names that are stored."""
        return {
            each.factory: each.make
            for each in self.declared.values()
            if each.factory is not None and each.make is not None
        }


def schedule_groups(schedules: Iterable[Any], what: str) -> list[ScheduleGroup]:
    """Return the groups of a program's schedules.

    :param schedules: Schedules; a queue class stands for the schedules of its tables that were added at run time.
    :param what: what was given the schedules, for errors.
    :raises ConfigurationError: for anything else, and for schedules that cannot be told apart.
    """
    if isinstance(schedules, Schedule | str | type) or not isinstance(schedules, Iterable):
        msg = f"{what}: schedules={schedules!r}: give a list of Schedules"
        raise ConfigurationError(msg)
    groups: dict[tuple[int, str | None], ScheduleGroup] = {}
    for each in schedules:
        if not isinstance(each, Schedule | type):
            msg = f"{what}: schedules=[{each!r}]: this is no Schedule, and no queue class"
            raise ConfigurationError(msg)
        spec = each.spec if isinstance(each, Schedule) else spec_of(each)
        tables = ScheduleTables.declare(spec)
        group = groups.setdefault((id(tables.metadata), tables.schema), ScheduleGroup(tables, spec))
        if isinstance(each, Schedule):
            _add(group, each, what)
    return list(groups.values())


def _add(group: ScheduleGroup, schedule: Schedule[Any], what: str) -> None:
    name, other = schedule.name, group.declared.get(schedule.name)
    if other is not None and other is not schedule:
        msg = f"{what}: two schedules have the name {name!r}, which identifies one of them in the database"
        raise ConfigurationError(msg)
    known = None if schedule.factory is None else group.factories.get(schedule.factory)
    if known is not None and known is not schedule.make:
        msg = (
            f"{what}: Schedule({name!r}): make= has the name {schedule.factory} as another schedule's function has; "
            "define it by `def` at the top level of a module"
        )
        raise ConfigurationError(msg)
    group.declared[name] = schedule
