"""The tables of schedules, and the classes whose jobs the schedules in them may enqueue."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from sqlaqueue.mapping.mixin import QueueMixin, queue_spec
from sqlaqueue.postgresql.schedule_tables import schedule_tables
from sqlaqueue.queue.spec import QueueSpec


class ScheduleTables(NamedTuple):
    """The tables for the schedules of all queues in one MetaData and schema."""

    schedules: sa.Table
    ticks: sa.Table
    metadata: sa.MetaData
    schema: str | None

    @classmethod
    def declare(cls, spec: QueueSpec) -> ScheduleTables:
        """Return the tables for the schedules of a queue, and add them to its MetaData, so that they are created."""
        metadata, schema = spec.table.metadata, spec.table.schema
        return cls(*schedule_tables(metadata, schema), metadata, schema)

    @classmethod
    def look_up(cls, spec: QueueSpec) -> ScheduleTables:
        """Return these tables for statements, and leave the MetaData as it is: schedules may be another process's."""
        metadata, schema = spec.table.metadata, spec.table.schema
        return cls(*_separate_tables(schema), metadata, schema)

    def classes(self) -> dict[tuple[str, str], type[Any]]:
        """Return the mapped classes that schedules may name, by the names of queue and class.

        An empty name of a class stands for the class of the queue.
        """
        found: dict[tuple[str, str], type[Any]] = {}
        classes: list[type[Any]] = [QueueMixin]
        while classes:
            cls = classes.pop(0)
            classes += cls.__subclasses__()
            spec = queue_spec(cls)
            if spec is None or spec.table.metadata is not self.metadata or spec.table.schema != self.schema:
                continue
            if sa.inspect(cls, raiseerr=False) is not None:
                found.setdefault((spec.name, cls.__name__), cls)
                found.setdefault((spec.name, ""), spec.model)
        return found


def in_utc(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of these tables with its moments in UTC; drivers return them in the time zone of the session."""
    return {name: value.astimezone(UTC) if isinstance(value, datetime) else value for name, value in row.items()}


@functools.cache
def _separate_tables(schema: str | None) -> tuple[sa.Table, sa.Table]:
    return schedule_tables(sa.MetaData(), schema)
