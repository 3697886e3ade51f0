"""Compares the enum types of status columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import sqlalchemy as sa
from alembic.operations import ops as alembic_ops

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext
from sqlaqueue.postgresql.catalog_schemas import PREFIX


class EnumType(NamedTuple):
    """A named enum type of the database."""

    schema: str | None
    name: str
    values: tuple[str, ...]


def compare_enums(diff: DiffContext) -> None:
    """Create types before the columns that are added to queues, and drop types with their last column.

    Alembic creates the types of new tables only.
    """
    created, dropped = set(), set()
    for table in diff.tables:
        if table.database_table is None and table.spec is not None and table.model_table is not None:
            for enum in (enum_type(column.type) for column in table.model_table.columns):
                if enum is not None and enum not in created and not _exists(diff, enum):
                    created.add(enum)
                    drop = ops.DropEnum(enum.name, schema=enum.schema, values=[*enum.values])
                    diff.before.insert(0, ops.PerDirection(down=[drop]))
        for op in table.modify_ops.ops:
            if not isinstance(op, alembic_ops.AddColumnOp) or not table.belongs_to_queue:
                continue
            enum = enum_type(op.column.type)
            if enum is not None and enum not in created and not _exists(diff, enum):
                created.add(enum)
                diff.before.append(ops.CreateEnum(enum.name, [*enum.values], schema=enum.schema))
        for enum in _unused_types(diff, table):
            if enum not in dropped:
                dropped.add(enum)
                drop = ops.DropEnum(enum.name, schema=enum.schema, values=[*enum.values])
                # The downgrade of a dropped table creates its types with it.
                diff.last.append(drop if table.model_table is not None else ops.PerDirection([drop]))


def enum_type(type_: Any) -> EnumType | None:
    """Return the enum type that a column of ``type_`` needs in the database, None if it needs none."""
    plain = getattr(type_, "impl_instance", type_)
    plain = getattr(plain, "item_type", plain)
    if isinstance(plain, sa.Enum) and plain.native_enum and plain.name:
        return EnumType(plain.schema, str(plain.name), tuple(plain.enums))
    return None


def _exists(diff: DiffContext, enum: EnumType) -> bool:
    return diff.catalog.tables_with_enum((enum.schema, enum.name)) is not None


def _unused_types(diff: DiffContext, table: ComparedTable) -> Iterator[EnumType]:
    """Yield the types that no column has any more after this migration."""
    if table.database_table is None or not (diff.was_queue(table) or table.name.startswith(PREFIX)):
        return
    dropped = {op.column_name for op in table.modify_ops.ops if isinstance(op, alembic_ops.DropColumnOp)}
    removed = [each for each in table.database_table.columns if table.model_table is None or each.name in dropped]
    kept = {enum_type(each.type) for each in table.database_table.columns if each not in removed}
    for column in removed:
        enum = enum_type(column.type)
        if enum is None or enum in kept:
            continue
        users = diff.catalog.tables_with_enum((enum.schema, enum.name))
        schema = table.qualified_name[0]
        dropped_tables = {
            other.name for other in diff.tables if other.model_table is None and other.qualified_name[0] == schema
        }
        if users is not None and not set(users) - dropped_tables - {table.name}:
            yield enum
