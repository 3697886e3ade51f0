"""The state of one run of autogenerate: the tables that Alembic compares, the catalog, and the operations found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops

from sqlaqueue.alembic import operations as ops
from sqlaqueue.postgresql import triggers as triggers_module
from sqlaqueue.postgresql.catalog_schemas import PREFIX, CatalogReader, QualifiedName, ResolvedName
from sqlaqueue.postgresql.ddl import Function, Trigger, objects_of, queue_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import object_name

_TABLES = "_sqlaqueue_tables"


@dataclass
class ComparedTable:
    """A table that passed the filters of ``env.py``."""

    qualified_name: QualifiedName
    database_table: sa.Table | None
    """The table in the database, None if there is none."""
    model_table: sa.Table | None
    """The table in the models, None if there is none."""
    modify_ops: alembic_ops.ModifyTableOps
    """The changes that Alembic has found."""

    @property
    def name(self) -> str:
        """The name of the table."""
        return self.qualified_name[1]

    @property
    def schema(self) -> str | None:
        """The schema as operations name it: that of the model."""
        return self.qualified_name[0] if self.model_table is None else self.model_table.schema

    @property
    def names(self) -> set[str]:
        """The name of the table with and without its schema."""
        return {self.name, ".".join(filter(None, (self.schema, self.name)))}

    @property
    def spec(self) -> QueueSpec | None:
        """The queue of the table in the models, None if it is no queue."""
        return None if self.model_table is None else queue_of(self.model_table)

    @property
    def objects(self) -> Sequence[Any]:
        """The functions, triggers and storage parameters of the table in the models."""
        return () if self.model_table is None else objects_of(self.model_table)

    @property
    def functions(self) -> dict[str, Function]:
        """The functions in the models by signature."""
        return {each.signature: each for each in self.objects if isinstance(each, Function)}

    @property
    def triggers(self) -> dict[str, Trigger]:
        """The triggers in the models by name."""
        return {each.name: each for each in self.objects if isinstance(each, Trigger)}

    @property
    def unique_index(self) -> str:
        """The name of the index of unique jobs, whether or not it exists."""
        return object_name("ix", self.name, "queue", "unique")

    @property
    def belongs_to_queue(self) -> bool:
        """Whether the table is a queue in the models, or a table of this library."""
        return self.spec is not None or self.name.startswith(PREFIX)

    def is_dropped_by(self, op: MigrateOperation) -> bool:
        """Return whether an operation that Alembic found drops this table, or its indexes before it."""
        if isinstance(op, alembic_ops.DropTableOp):
            return (op.schema, op.table_name) == self.qualified_name
        return op is self.modify_ops

    def triggers_in(self, op: MigrateOperation) -> list[str]:
        """Return the triggers of this table that an operation creates or drops."""
        if not isinstance(op, ops.CreateTriggers | ops.DropTriggers):
            return []
        return [*op.triggers] if (op.schema, op.table) == (self.schema, self.name) else []

    def has_message_triggers(self, op: MigrateOperation) -> bool:
        """Return whether an operation creates or drops triggers of this table that write messages."""
        return any(not name.startswith(triggers_module.PREFIX) for name in self.triggers_in(op))


def is_queue_column(column: sa.Column[Any]) -> bool:
    """Return whether this library added a column to the model."""
    return "sqlaqueue" in column.info


def remembered_tables(context: AutogenContext) -> list[ComparedTable]:
    """Return the tables that were compared so far in this run."""
    tables: list[ComparedTable] = context.__dict__.setdefault(_TABLES, [])
    return tables


def take_tables(context: AutogenContext) -> list[ComparedTable]:
    """Return and remove the tables of this run: with two plug-ins set up, only the first one compares them."""
    tables: list[ComparedTable] = context.__dict__.pop(_TABLES, [])
    return tables


class DiffContext:
    """A run of autogenerate after Alembic has compared the tables.

    The migration consists of ``before``, the operations that Alembic found, ``after`` and ``last``. The downgrade has
    the reverse operations in the reverse order.
    """

    def __init__(
        self,
        context: AutogenContext,
        upgrade: alembic_ops.UpgradeOps,
        tables: Sequence[ComparedTable],
        catalog: CatalogReader,
    ) -> None:
        self.context = context
        self.upgrade = upgrade
        self.tables = tables
        self.catalog = catalog
        self.before: list[MigrateOperation] = []
        self.after: list[MigrateOperation] = []
        self.last: list[MigrateOperation] = []
        """What the downgrade does first."""
        self.kept_functions: set[ResolvedName] = set()
        """Functions that are not dropped, although no table of the models has them."""
        self.live = _live_tables(context)

    @property
    def remaining_tables(self) -> Iterator[tuple[ComparedTable, sa.Table, sa.Table]]:
        """The tables that are both in the database and in the models: each with both of its forms, in that order."""
        for table in self.tables:
            if table.database_table is not None and table.model_table is not None:
                yield table, table.database_table, table.model_table

    def is_live(self, table: ComparedTable) -> bool:
        """Return whether a table is in use, according to ``-x live=name``."""
        return bool(table.names & self.live)

    def database_table(self, name: QualifiedName) -> sa.Table | None:
        """Return a compared table as the database has it."""
        return next((table.database_table for table in self.tables if table.qualified_name == name), None)

    def message_table_name(self, table: ComparedTable) -> QualifiedName:
        """Return the name that the message table of a table has, whether or not it exists."""
        return table.qualified_name[0], object_name("sqlaqueue_message", table.name)

    def was_queue(self, table: ComparedTable) -> bool:
        """Return whether a table is a queue in the database."""
        has_messages = self.database_table(self.message_table_name(table)) is not None
        return self.catalog.is_queue(table.qualified_name) or has_messages

    def pending_condition(self, table: ComparedTable) -> str:
        """Return the condition under which a job is pending in the database; "" if no object contains one."""
        index = object_name("ix", table.name, "queue", "claim")
        _, predicate = self.catalog.index(table.qualified_name, index) or (True, None)
        return predicate or self.pending_condition_of_triggers(table) or ""

    def pending_condition_of_triggers(self, table: ComparedTable) -> str | None:
        """Return the condition under which the triggers of a table write a message."""
        for trigger in self.catalog.triggers_of(table.qualified_name).values():
            function = self.catalog.function(table.qualified_name, f"{trigger.function}()")
            if trigger.name.startswith(PREFIX) and function is not None:
                match = re.search(r"FROM new_rows WHERE (.+)$", function.source, re.MULTILINE)
                if match:
                    return match[1]
        return None

    def modify(self, table: ComparedTable, *operations: MigrateOperation) -> None:
        """Add operations to the changes that Alembic has found in a table.

        They come after the columns that are added, and before those that are dropped: a dropped column takes its
        indexes and constraints with it.
        """
        if not any(op is table.modify_ops for op in self.upgrade.ops):
            self.upgrade.ops.append(table.modify_ops)
        changes = table.modify_ops.ops
        drops = [number for number, op in enumerate(changes) if isinstance(op, alembic_ops.DropColumnOp)]
        first = drops[0] if drops else len(changes)
        changes[first:first] = operations


def _live_tables(context: AutogenContext) -> set[str]:
    environment = context.migration_context.environment_context
    if environment is None:
        return set()
    given = [each.partition("=") for each in environment.get_x_argument()]
    return {name.strip() for key, _, value in given if key == "live" for name in value.split(",")}
