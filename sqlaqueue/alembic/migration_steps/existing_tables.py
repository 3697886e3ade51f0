"""Tables with rows that become queues: ambiguous columns are refused, and the status of the rows is asked for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import ops as alembic_ops
from alembic.util import CommandError

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext, is_queue_column
from sqlaqueue.queue.spec import QueueSpec


def refuse_taken_columns(diff: DiffContext) -> None:
    """Refuse an existing column that has the name of a column of the queue and may have another meaning.

    :raises CommandError: naming the class, the attribute and both fixes.
    """
    for table, database_table, _ in diff.remaining_tables:
        spec = table.spec
        if spec is None or diff.was_queue(table):
            continue
        retyped = {
            op.column_name
            for op in table.modify_ops.ops
            if isinstance(op, alembic_ops.AlterColumnOp) and op.modify_type is not None
        }
        existing = {column.name: column for column in database_table.columns}
        for role, column in spec.columns.items():
            if not is_queue_column(column) or column.name not in existing:
                continue
            if role == "status" or column.name in retyped:
                raise CommandError(_column_is_taken(spec, role, existing[column.name], column))


def _column_is_taken(spec: QueueSpec, role: str, existing: sa.Column[object], wanted: sa.Column[object]) -> str:
    attribute = spec.attributes[role]
    adopted, renamed = (f"QueueConfig(columns={{{role!r}: {name!r}}})" for name in (attribute, f"queue_{role}"))
    return (
        f"{spec.model.__name__}.{attribute}: the table {spec.table.fullname} has a column {existing.name} of type "
        f"{existing.type!r} already, and is not a queue yet; the queue's {role} would have the type {wanted.type!r}. "
        f"If that column is the queue's {role}, define the attribute in the class and adopt it with {adopted}; if it "
        f"has another meaning, give the queue another attribute with {renamed}"
    )


def ask_for_status(diff: DiffContext) -> None:
    """Add ``existing_rows=...`` to the migration wherever existing rows become jobs, in either direction."""
    for table, *_ in diff.remaining_tables:
        spec = table.spec
        if spec is None or not spec.has("status"):
            _ask_in_downgrade(diff, table)
        if spec is None:
            continue
        additions = [
            op for op in table.modify_ops.ops if isinstance(op, alembic_ops.AddColumnOp) and is_queue_column(op.column)
        ]
        if spec.has("status"):
            status = spec.columns["status"].name
            if any(op.column.name == status for op in additions):
                _combine(table, additions, status)
        elif _rows_become_messages(diff, table):
            _combine(table, additions, None)
            if not additions:
                diff.before.append(ops.AddColumns(table.name, [], existing_rows=..., schema=table.schema))


def _combine(table: ComparedTable, additions: list[alembic_ops.AddColumnOp], status: str | None) -> None:
    """Replace the columns that Alembic adds by one operation that asks for the status of existing rows."""
    if not additions:
        return
    columns = [op.column for op in additions]
    add = ops.AddColumns(table.name, columns, status=status, existing_rows=..., schema=table.schema)
    first = table.modify_ops.ops.index(additions[0])
    table.modify_ops.ops = [op for op in table.modify_ops.ops if op not in additions]
    table.modify_ops.ops.insert(first, add)


def _rows_become_messages(diff: DiffContext, table: ComparedTable) -> bool:
    """Return whether all rows become jobs: the queue loses its status, or is new."""
    if diff.pending_condition(table):
        return True
    additions = (alembic_ops.AddColumnOp, alembic_ops.CreateIndexOp)
    return not diff.was_queue(table) and any(isinstance(op, additions) for op in table.modify_ops.ops)


def _ask_in_downgrade(diff: DiffContext, table: ComparedTable) -> None:
    """Let the downgrade ask as well if it adds the status column again."""
    condition = diff.pending_condition(table)
    for number, op in enumerate(table.modify_ops.ops):
        if isinstance(op, alembic_ops.DropColumnOp) and _names(condition, op.column_name):
            undo = ops.AddColumns(
                table.name, [op.to_column()], status=op.column_name, existing_rows=..., schema=table.schema
            )
            table.modify_ops.ops[number] = ops.DropColumns(table.name, [op.column_name], schema=table.schema, undo=undo)


def _names(condition: str, column: str) -> bool:
    quoted = '"' + column.replace('"', '""') + '"'
    tokens = condition.replace("(", " ").replace(")", " ").split()
    return column in tokens or quoted in condition
