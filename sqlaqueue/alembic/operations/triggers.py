"""Operations on functions and triggers."""

from __future__ import annotations

from dataclasses import dataclass, field

from alembic.operations import MigrateOperation

from sqlaqueue.alembic.operations.base import NOT_RENDERED, OperationList, QueueOp, registered_as

TransitionTables = dict[str, str]
"""``{"OLD": name, "NEW": name}``."""

TriggerDefinition = tuple[str, TransitionTables] | tuple[str, TransitionTables, str]
"""The event of a trigger, its transition tables and, for a row trigger, its condition as SQL."""


def trigger_definition(event: str, transition_tables: TransitionTables, when: str | None) -> TriggerDefinition:
    """Return the definition of a trigger for :class:`CreateTriggers`."""
    return (event, transition_tables) if when is None else (event, transition_tables, when)


@registered_as("create_queue_function")
@dataclass(eq=False)
class CreateFunction(QueueOp):
    """Creates or replaces a function.

    :param function: the name of the function.
    :param body: its text in PL/pgSQL; ``{key}`` is replaced by the table of that key in ``tables``.
    :param arguments: the names and types of its arguments in SQL; a trigger function has none.
    :param returns: the type of its result in SQL.
    :param tables: key to name of a table.
    :param comment: its comment, which contains its version.
    :param definer: make it SECURITY DEFINER, and revoke EXECUTE from PUBLIC.
    """

    function: str
    body: str
    arguments: str = field(default="", kw_only=True)
    returns: str = field(default="trigger", kw_only=True)
    tables: dict[str, str] = field(default_factory=dict, kw_only=True)
    comment: str | None = field(default=None, kw_only=True)
    definer: bool = field(default=False, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)
    """Creates the function again that this one replaces."""

    def reverse(self) -> MigrateOperation:
        """Drop the function, or restore the former one."""
        return self.undo or DropFunction(self.function, arguments=self.arguments, schema=self.schema, undo=self)


@registered_as("drop_queue_function")
@dataclass(eq=False)
class DropFunction(QueueOp):
    """Drops a function."""

    function: str
    arguments: str = field(default="", kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Create the function again."""
        return self.undo or OperationList()


@registered_as("create_queue_triggers")
@dataclass(eq=False)
class CreateTriggers(QueueOp):
    """Creates triggers, all or none.

    :param table: the table of the jobs.
    :param function: the function that the triggers call.
    :param triggers: name to event (INSERT, UPDATE, DELETE, TRUNCATE), transition tables and, for a row trigger, its
        condition.
    :param live: the table is in use. Create the triggers in a transaction of their own, and wait for their lock in
        many short attempts.
    """

    table: str
    function: str
    triggers: dict[str, TriggerDefinition]
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Drop the triggers."""
        return DropTriggers(self.table, [*self.triggers], schema=self.schema, live=self.live, undo=self)


@registered_as("drop_queue_triggers")
@dataclass(eq=False)
class DropTriggers(QueueOp):
    """Drops triggers of a table."""

    table: str
    triggers: list[str]
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Create the triggers again as they were."""
        return self.undo or OperationList()


@registered_as("execute_verbatim")
@dataclass(eq=False)
class ExecuteVerbatim(QueueOp):
    """Executes SQL without interpreting colons or percent signs; it restores objects that were changed by hand."""

    sql: str
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Restore what this replaced."""
        return self.undo or OperationList()
