"""The operations of queues in migrations, as ``op`` has them: each with what undoes it.

A migration has to do in two years what it does today, whatever the models and this library have become by then. So an
operation carries everything it writes: the text of a function, columns, conditions.

``schema`` is the schema of all tables and functions that an operation names, None for the default one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import sqlalchemy as sa
from alembic.operations import MigrateOperation, Operations
from alembic.operations.ops import OpContainer

Q = TypeVar("Q", bound="QueueOp")

HIDDEN = {"hidden": True}
"""Marks a field that only serves to undo the operation, and is not written into migrations."""

Rows = dict[str, str]
"""``{"OLD": name, "NEW": name}`` of transition tables."""

TriggerPlan = tuple[str, Rows] | tuple[str, Rows, str]
"""The event of a trigger, its transition tables and, for one that fires for each row, the condition on it as SQL."""


def plan_of(event: str, rows: Rows, when: str | None) -> TriggerPlan:
    """Return what a trigger is, for :class:`CreateTriggers`."""
    return (event, rows) if when is None else (event, rows, when)


class QueueOp(MigrateOperation):
    """Base of the operations: a dataclass whose fields are the arguments that a migration gives."""

    name: ClassVar[str]

    @classmethod
    def invoke(cls, operations: Operations, *args: Any, **kw: Any) -> Any:
        """Run the operation; this is what ``op.name(...)`` calls."""
        return operations.invoke(cls(*args, **kw))

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return what ``alembic check`` prints."""
        return (self.name, *(getattr(self, each.name) for each in self.arguments()))

    @classmethod
    def arguments(cls) -> list[Field[Any]]:
        """Return the fields that a migration gives."""
        return [each for each in fields(cls) if not each.metadata.get("hidden")]  # type: ignore[arg-type] # every subclass is a dataclass


def known_as(name: str) -> Callable[[type[Q]], type[Q]]:
    """Register a class as ``op.<name>``."""

    def register(cls: type[Q]) -> type[Q]:
        cls.name = name
        return Operations.register_operation(name, "invoke")(cls)

    return register


class Steps(OpContainer):
    """Several operations that undo one."""

    def reverse(self) -> Steps:
        """Return the reverse of each, last first."""
        return Steps([op.reverse() for op in reversed(self.ops)])


class OneWay(OpContainer):
    """Something on the way up, and something else, which does not undo it, on the way down."""

    def __init__(self, up: Sequence[MigrateOperation] = (), down: Sequence[MigrateOperation] = ()) -> None:
        super().__init__(up)
        self.down = down

    def reverse(self) -> OneWay:
        """Return what is to be done in the other direction."""
        return OneWay(self.down, self.ops)


@known_as("create_queue_function")
@dataclass(eq=False)
class CreateFunction(QueueOp):
    """Creates a trigger function, or replaces it.

    :param name: the name of the function.
    :param body: its text in PL/pgSQL; ``{key}`` stands for the table of that key in ``tables``.
    :param tables: key to name of a table.
    :param comment: its comment, which holds its version.
    :param definer: whether it runs with the rights of its owner; PUBLIC may not execute it then.
    """

    function: str
    body: str
    tables: dict[str, str] = field(default_factory=dict, kw_only=True)
    comment: str | None = field(default=None, kw_only=True)
    definer: bool = field(default=False, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    previous: MigrateOperation | None = field(default=None, kw_only=True, metadata=HIDDEN)
    """What brings the function back that this one replaces."""

    def reverse(self) -> MigrateOperation:
        """Drop the function, or bring the former one back."""
        return self.previous or DropFunction(self.function, schema=self.schema, previous=self)


@known_as("drop_queue_function")
@dataclass(eq=False)
class DropFunction(QueueOp):
    """Drops a trigger function."""

    function: str
    schema: str | None = field(default=None, kw_only=True)
    previous: MigrateOperation | None = field(default=None, kw_only=True, metadata=HIDDEN)

    def reverse(self) -> MigrateOperation:
        """Create the function again."""
        return self.previous or Steps()


@known_as("create_queue_triggers")
@dataclass(eq=False)
class CreateTriggers(QueueOp):
    """Creates triggers, all or none.

    :param table: the table of the jobs.
    :param function: the function that they call.
    :param triggers: name to event (INSERT, UPDATE, DELETE, TRUNCATE), transition tables and, for a trigger that fires
        for each row, the condition on it.
    :param live: the table is in use. The triggers are then created in a transaction of their own, and their lock is
        waited
        for in many short attempts.
    """

    table: str
    function: str
    triggers: dict[str, TriggerPlan]
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Drop the triggers."""
        return DropTriggers(self.table, [*self.triggers], schema=self.schema, live=self.live, previous=self)


@known_as("drop_queue_triggers")
@dataclass(eq=False)
class DropTriggers(QueueOp):
    """Drops triggers of a table."""

    table: str
    triggers: list[str]
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)
    previous: MigrateOperation | None = field(default=None, kw_only=True, metadata=HIDDEN)

    def reverse(self) -> MigrateOperation:
        """Create the triggers again as they were."""
        return self.previous or Steps()


@known_as("execute_as_written")
@dataclass(eq=False)
class ExecuteAsWritten(QueueOp):
    """Executes SQL in which colons and percent signs mean nothing; it brings back what somebody had changed by hand."""

    sql: str
    previous: MigrateOperation | None = field(default=None, kw_only=True, metadata=HIDDEN)

    def reverse(self) -> MigrateOperation:
        """Return to what this replaced."""
        return self.previous or Steps()


@known_as("set_storage_parameters")
@dataclass(eq=False)
class SetStorageParameters(QueueOp):
    """Sets storage parameters of a table, and resets those that are None."""

    table: str
    parameters: dict[str, str | None]
    schema: str | None = field(default=None, kw_only=True)
    existing: dict[str, str | None] = field(default_factory=dict, kw_only=True, metadata=HIDDEN)

    def reverse(self) -> SetStorageParameters:
        """Set them to what they were."""
        return SetStorageParameters(self.table, self.existing, schema=self.schema, existing=self.parameters)


@known_as("create_queue_enum")
@dataclass(eq=False)
class CreateEnum(QueueOp):
    """Creates the type of a state, for a column that is added to a table."""

    enum: str
    values: list[str]
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> DropEnum:
        """Drop the type."""
        return DropEnum(self.enum, schema=self.schema, values=self.values)


@known_as("drop_queue_enum")
@dataclass(eq=False)
class DropEnum(QueueOp):
    """Drops the type of a state."""

    enum: str
    schema: str | None = field(default=None, kw_only=True)
    values: Sequence[str] = field(default=(), kw_only=True, metadata=HIDDEN)

    def reverse(self) -> CreateEnum:
        """Create the type."""
        return CreateEnum(self.enum, [*self.values], schema=self.schema)


@known_as("add_queue_columns")
@dataclass(eq=False)
class AddColumns(QueueOp):
    """Adds the columns of a queue to a table that may have rows, without rewriting it.

    :param table: the table.
    :param columns: the columns.
    :param status: the name of the column among them that holds the state, if one does.
    :param existing_rows: the state of the rows that are there already. A value of the column, such as ``"completed"``,
        or
        ``sa.text()`` with an expression over the table's columns. There is no default, since it would be a guess about
        your data: ``"pending"`` lets all of them run.
    :param live: the table is in use. The columns are then added in a transaction of their own, their lock is waited
        for in
        many short attempts, and the states of an expression are filled in batches.
    """

    table: str
    columns: list[sa.Column[Any]]
    status: str | None = field(default=None, kw_only=True)
    existing_rows: Any = field(default=None, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)

    def reverse(self) -> DropColumns:
        """Drop the columns."""
        names = [column.name for column in self.columns]
        return DropColumns(self.table, names, schema=self.schema, live=self.live, previous=self)


@known_as("drop_queue_columns")
@dataclass(eq=False)
class DropColumns(QueueOp):
    """Drops the columns of a queue."""

    table: str
    columns: list[str]
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)
    previous: MigrateOperation | None = field(default=None, kw_only=True, metadata=HIDDEN)

    def reverse(self) -> MigrateOperation:
        """Add the columns again; the state of the rows is asked for again, too."""
        return self.previous or Steps()


@known_as("create_queue_index")
@dataclass(eq=False)
class CreateIndex(QueueOp):
    """Creates an index CONCURRENTLY, outside of the migration's transaction.

    An invalid index of the name, which an interrupted attempt leaves behind, is dropped before.

    :param where: the predicate, as SQL.
    :param options: whatever else SQLAlchemy's Index takes, such as ``{"postgresql_using": "gin"}``.
    """

    index: str
    table: str
    columns: list[Any]
    unique: bool = field(default=False, kw_only=True)
    where: str | None = field(default=None, kw_only=True)
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> DropIndex:
        """Drop the index."""
        return DropIndex(self.index, self.table, schema=self.schema, previous=self)


@known_as("drop_queue_index")
@dataclass(eq=False)
class DropIndex(QueueOp):
    """Drops an index CONCURRENTLY, outside of the migration's transaction."""

    index: str
    table: str
    schema: str | None = field(default=None, kw_only=True)
    previous: MigrateOperation | None = field(default=None, kw_only=True, metadata=HIDDEN)

    def reverse(self) -> MigrateOperation:
        """Create the index again."""
        return self.previous or Steps()


@known_as("lock_queue_tables")
@dataclass(eq=False)
class LockTables(QueueOp):
    """Locks tables against everybody until the migration commits, in many short attempts.

    A consumer may hold a batch in an open transaction. Whoever simply waited for it would make everybody else wait as
    well.

    :param lock_timeout: how long one attempt waits, in seconds.
    :param attempts: how many are made before the migration fails.
    """

    tables: list[str]
    schema: str | None = field(default=None, kw_only=True)
    lock_timeout: float = field(default=0.5, kw_only=True)
    attempts: int = field(default=120, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Nothing: the lock goes with the transaction."""
        return Steps()


@known_as("release_queue_runs")
@dataclass(eq=False)
class ReleaseRuns(QueueOp):
    """Puts jobs back that are running under leases, for a strategy that has none and would never rescue them.

    The consumers that hold them can no longer end these runs; what a handler wrote is rolled back.

    :param where: the condition that a job is running under a lease.
    :param values: column to SQL expression.
    """

    table: str
    values: dict[str, str]
    where: str = field(kw_only=True)
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Nothing: a waiting job is a waiting job under every strategy."""
        return Steps()


@known_as("empty_queue_messages")
@dataclass(eq=False)
class EmptyMessages(QueueOp):
    """Removes all messages of a queue, whose table gets other columns; they are written again afterwards."""

    messages: str
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Nothing: the messages are written again in both directions."""
        return Steps()


@known_as("fill_queue_messages")
@dataclass(eq=False)
class FillMessages(QueueOp):
    """Writes a message for each waiting job that has none.

    :param messages: the table of the messages.
    :param keys: the columns of the key.
    :param order: the columns that a claim is ordered by.
    :param where: the condition that a job waits.
    :param live: the table is in use. The messages are then written in batches, each a transaction of its own.
    """

    table: str
    messages: str
    keys: list[str] = field(kw_only=True)
    order: list[str] = field(kw_only=True)
    where: str = field(kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Nothing: the messages go with their table."""
        return Steps()
