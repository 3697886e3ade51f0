"""Operations on the columns, indexes, storage parameters and enum types of queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from alembic.operations import MigrateOperation

from sqlaqueue.alembic.operations.base import NOT_RENDERED, OperationList, QueueOp, registered_as


@registered_as("set_storage_parameters")
@dataclass(eq=False)
class SetStorageParameters(QueueOp):
    """Sets storage parameters of a table, and resets those that are None."""

    table: str
    parameters: dict[str, str | None]
    schema: str | None = field(default=None, kw_only=True)
    existing: dict[str, str | None] = field(default_factory=dict, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> SetStorageParameters:
        """Set the former parameters."""
        return SetStorageParameters(self.table, self.existing, schema=self.schema, existing=self.parameters)


@registered_as("create_queue_enum")
@dataclass(eq=False)
class CreateEnum(QueueOp):
    """Creates the enum type of a status column that is added to a table."""

    enum: str
    values: list[str]
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> DropEnum:
        """Drop the type."""
        return DropEnum(self.enum, schema=self.schema, values=self.values)


@registered_as("drop_queue_enum")
@dataclass(eq=False)
class DropEnum(QueueOp):
    """Drops the enum type of a status column."""

    enum: str
    schema: str | None = field(default=None, kw_only=True)
    values: Sequence[str] = field(default=(), kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> CreateEnum:
        """Create the type."""
        return CreateEnum(self.enum, [*self.values], schema=self.schema)


@registered_as("add_queue_columns")
@dataclass(eq=False)
class AddColumns(QueueOp):
    """Adds the columns of a queue to a table with rows, without rewriting the table.

    :param table: the table.
    :param columns: the columns.
    :param status: the name of the status column, if it is among them.
    :param existing_rows: the status of the existing rows: a value of the column, such as ``"completed"``, or
        ``sa.text()`` with an expression over the table's columns. There is no default, since it would be a guess about
        the data: ``"pending"`` makes all existing rows run.
    :param live: the table is in use. Add the columns in a transaction of their own, wait for their lock in many short
        attempts, and write the status of an expression in batches.
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
        return DropColumns(self.table, names, schema=self.schema, live=self.live, undo=self)


@registered_as("drop_queue_columns")
@dataclass(eq=False)
class DropColumns(QueueOp):
    """Drops the columns of a queue."""

    table: str
    columns: list[str]
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Add the columns again; the migration asks for the status of the existing rows again as well."""
        return self.undo or OperationList()


@registered_as("create_queue_index")
@dataclass(eq=False)
class CreateIndex(QueueOp):
    """Creates an index CONCURRENTLY, outside of the migration's transaction.

    An invalid index of the same name, left behind by an interrupted attempt, is dropped first.

    :param where: the predicate, as SQL.
    :param options: further arguments of SQLAlchemy's Index, such as ``{"postgresql_using": "gin"}``.
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
        return DropIndex(self.index, self.table, schema=self.schema, undo=self)


@registered_as("drop_queue_index")
@dataclass(eq=False)
class DropIndex(QueueOp):
    """Drops an index CONCURRENTLY, outside of the migration's transaction."""

    index: str
    table: str
    schema: str | None = field(default=None, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Create the index again."""
        return self.undo or OperationList()
