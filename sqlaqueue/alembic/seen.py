"""What one run of autogenerate has before it: the tables that Alembic compares, and what the database has of queues."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops

from sqlaqueue.alembic import operations as queue_ops
from sqlaqueue.alembic.catalog import PREFIX, Catalog, Place
from sqlaqueue.postgresql import wake_triggers
from sqlaqueue.postgresql.ddl import Trigger, TriggerFunction, objects_of, queue_of
from sqlaqueue.postgresql.identifiers import object_name
from sqlaqueue.queue.spec import QueueSpec

_TABLES = "_sqlaqueue_tables"


@dataclass
class Seen:
    """A table that passed the filters of ``env.py``."""

    place: Place
    found: sa.Table | None
    """As the database has it."""
    wanted: sa.Table | None
    """As the models have it."""
    modify: alembic_ops.ModifyTableOps
    """What Alembic does about it."""

    @property
    def name(self) -> str:
        """The name of the table."""
        return self.place[1]

    @property
    def schema(self) -> str | None:
        """The schema, as operations name it: as the model does."""
        return self.place[0] if self.wanted is None else self.wanted.schema

    @property
    def names(self) -> set[str]:
        """What the table may be called, with its schema or without."""
        return {self.name, ".".join(filter(None, (self.schema, self.name)))}

    @property
    def spec(self) -> QueueSpec | None:
        """The queue of the table, if it is one in the models."""
        return None if self.wanted is None else queue_of(self.wanted)

    @property
    def objects(self) -> Sequence[Any]:
        """What belongs to the table in the models, beside columns, indexes and constraints."""
        return () if self.wanted is None else objects_of(self.wanted)

    @property
    def functions(self) -> dict[str, TriggerFunction]:
        """The wanted functions by name."""
        return {each.name: each for each in self.objects if isinstance(each, TriggerFunction)}

    @property
    def triggers(self) -> dict[str, Trigger]:
        """The wanted triggers by name."""
        return {each.name: each for each in self.objects if isinstance(each, Trigger)}

    @property
    def of_queue(self) -> bool:
        """Whether the table is a queue, or one that this library keeps for itself."""
        return self.spec is not None or self.name.startswith(PREFIX)

    def triggers_in(self, op: MigrateOperation) -> list[str]:
        """Return the triggers of this table that an operation creates or drops."""
        if not isinstance(op, queue_ops.CreateTriggers | queue_ops.DropTriggers):
            return []
        return [*op.triggers] if (op.schema, op.table) == (self.schema, self.name) else []

    def messages_in(self, op: MigrateOperation) -> bool:
        """Tell whether an operation creates or drops triggers of this table that do more than wake consumers."""
        return any(not name.startswith(wake_triggers.PREFIX) for name in self.triggers_in(op))


def seen_by(context: AutogenContext) -> list[Seen]:
    """Return the tables seen so far in this run."""
    seen: list[Seen] = context.__dict__.setdefault(_TABLES, [])
    return seen


def take_seen(context: AutogenContext) -> list[Seen]:
    """Return the tables seen in this run, and forget them: the plug-in may have been set up twice."""
    seen: list[Seen] = context.__dict__.pop(_TABLES, [])
    return seen


class Review:
    """A run of autogenerate after Alembic has compared the tables: ``front`` and ``behind`` go around what it found."""

    def __init__(
        self, context: AutogenContext, upgrade: alembic_ops.UpgradeOps, tables: Sequence[Seen], catalog: Catalog
    ) -> None:
        self.context = context
        self.upgrade = upgrade
        self.tables = tables
        self.catalog = catalog
        self.front: list[MigrateOperation] = []
        self.behind: list[MigrateOperation] = []
        self.last: list[MigrateOperation] = []
        """What has to be the first on the way down."""
        self.live = _live_tables(context)

    @property
    def kept(self) -> Iterator[tuple[Seen, sa.Table, sa.Table]]:
        """The tables that are there and remain, as the database and as the models have them."""
        for seen in self.tables:
            if seen.found is not None and seen.wanted is not None:
                yield seen, seen.found, seen.wanted

    def is_live(self, seen: Seen) -> bool:
        """Tell whether a table is in use, by ``-x live=name``."""
        return bool(seen.names & self.live)

    def found_table(self, place: Place) -> sa.Table | None:
        """Return a table as the database has it."""
        return next((seen.found for seen in self.tables if seen.place == place), None)

    def messages_of(self, seen: Seen) -> Place:
        """Return where the messages of a table are, if it has any."""
        return seen.place[0], object_name("sqlaqueue_message", seen.name)

    def was_queue(self, seen: Seen) -> bool:
        """Tell whether a table is a queue in the database."""
        return self.catalog.is_queue(seen.place) or self.found_table(self.messages_of(seen)) is not None

    def condition(self, seen: Seen) -> str:
        """Return what indexes or triggers in the database say of when a job of a table waits; "" for nothing."""
        index = object_name("ix", seen.name, "queue", "claim")
        _, predicate = self.catalog.index(seen.place, index) or (True, None)
        return predicate or self.waiting_of_triggers(seen) or ""

    def waiting_of_triggers(self, seen: Seen) -> str | None:
        """Return the condition under which the triggers of a table write a message."""
        for trigger in self.catalog.triggers_of(seen.place).values():
            function = self.catalog.function(seen.place, trigger.function)
            if trigger.name.startswith(PREFIX) and function is not None:
                found = re.search(r"FROM new_rows WHERE (.+)$", function.source, re.MULTILINE)
                if found:
                    return found[1]
        return None

    def change(self, seen: Seen, *ops: MigrateOperation) -> None:
        """Add operations to what Alembic does about a table.

        They come after columns are added and before columns are dropped, which take indexes and constraints along.
        """
        if not any(op is seen.modify for op in self.upgrade.ops):
            self.upgrade.ops.append(seen.modify)
        there = seen.modify.ops
        drops = [number for number, op in enumerate(there) if isinstance(op, alembic_ops.DropColumnOp)]
        first = drops[0] if drops else len(there)
        there[first:first] = ops


def _live_tables(context: AutogenContext) -> set[str]:
    environment = context.migration_context.environment_context
    if environment is None:
        return set()
    given = [each.partition("=") for each in environment.get_x_argument()]
    return {name.strip() for key, _, value in given if key == "live" for name in value.split(",")}
