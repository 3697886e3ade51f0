"""Leaves the partitions of queue tables alone: they belong to the application, and to no model.

Alembic reads a partition as a table of its own. It would drop every one that the models lack, with all of its jobs, and
the triggers of the queue, which a partition has because its parent has them, would be dropped before.
"""

from __future__ import annotations

from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext


def leave_out_partitions(diff: DiffContext) -> None:
    """Compare no partition of a queue's table, and remove the operations that drop those which no model has."""
    partitions = [table for table in diff.tables if _is_partition_of_queue(diff, table)]
    diff.tables = [table for table in diff.tables if table not in partitions]
    unknown = [table for table in partitions if table.model_table is None]
    diff.upgrade.ops[:] = [op for op in diff.upgrade.ops if not any(table.is_dropped_by(op) for table in unknown)]


def _is_partition_of_queue(diff: DiffContext, table: ComparedTable) -> bool:
    root = diff.catalog.root_of_partition(table.qualified_name)
    if root is None:
        return False
    for other in diff.tables:
        if diff.catalog.resolve(other.qualified_name) == root:
            return other.belongs_to_queue or diff.was_queue(other)
    # The filters of env.py leave the queue's table out, or its schema.
    return diff.catalog.is_queue(root)
