"""Migrations of tables that are in use (``-x live=name``): each step commits by itself and can be run again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops
from alembic.util import CommandError

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext, is_queue_column
from sqlaqueue.alembic.migration_steps.index_arguments import columns_of, options_of, predicate_of


def split_into_steps(diff: DiffContext) -> None:
    """Replace the operations on live tables by operations that do not block other transactions.

    An interrupted migration can be run again from its beginning.

    :raises CommandError: when ``-x live`` names no queue of the models.
    """
    live = [table for table, *_ in diff.remaining_tables if diff.is_live(table) and table.spec is not None]
    unknown = diff.live.difference(*(table.names for table in diff.tables if table.spec is not None))
    if unknown:
        names = ", ".join(sorted(unknown))
        raise CommandError(f"-x live={names}: no queue of the models has a table of that name; check the spelling")
    if not live:
        return
    for table in live:
        _refuse_indexes_of_partitioned_tables(diff, table)
        steps = _take_steps(table, is_queue=diff.was_queue(table))
        if diff.was_queue(table):
            # Before the rest, which stays one transaction: triggers must match the columns at any time.
            diff.before = [*steps, *diff.before]
        else:
            diff.after = [*steps, *diff.after]
            for op in diff.after:
                if isinstance(op, ops.CreateTriggers | ops.FillMessages) and op.table == table.name:
                    op.live = op.live or op.schema == table.schema
    for op in diff.upgrade.ops:
        _make_repeatable(op)


def _refuse_indexes_of_partitioned_tables(diff: DiffContext, table: ComparedTable) -> None:
    creations = (alembic_ops.CreateIndexOp, ops.CreateUniqueIndex)
    indexes = [op for op in table.modify_ops.ops if isinstance(op, creations)]
    if indexes and diff.catalog.is_partitioned(table.qualified_name):
        raise CommandError(
            f"-x live={table.name}: the table is partitioned, and PostgreSQL cannot create an index on such a table "
            "CONCURRENTLY. Omit -x live, which blocks writes while the indexes are created; or use the strategy "
            '"delete_returning", whose index is on the message table'
        )


def _take_steps(table: ComparedTable, *, is_queue: bool) -> list[MigrateOperation]:
    """Remove the operations from a table's changes that can be steps of their own, and return these steps.

    :param is_queue: the table has triggers, which may need the columns that are dropped.
    """
    steps: list[MigrateOperation] = []
    remaining: list[MigrateOperation] = []
    added: list[sa.Column[object]] = []
    dropped: list[sa.Column[object]] = []
    needed = {name for op in table.modify_ops.ops for name in _indexed_columns(op)} if is_queue else set()
    for op in table.modify_ops.ops:
        if isinstance(op, ops.AddColumns):
            op.live = True
            steps.insert(0, op)
        elif isinstance(op, alembic_ops.AddColumnOp) and (is_queue_column(op.column) or op.column.name in needed):
            added.append(op.column)
        elif isinstance(op, alembic_ops.DropColumnOp) and not is_queue:
            dropped.insert(0, op.to_column())
        elif isinstance(op, ops.CreateUniqueIndex | ops.DropIndex):
            steps.append(op)
        elif isinstance(op, alembic_ops.CreateIndexOp):
            steps.append(_concurrent(op))
        elif isinstance(op, alembic_ops.DropIndexOp):
            undo = _concurrent(op.reverse())
            steps.append(ops.DropIndex(str(op.index_name), table.name, schema=table.schema, undo=undo))
        else:
            remaining.append(op)
    if added:
        steps.insert(0, ops.AddColumns(table.name, added, schema=table.schema, live=True))
    if dropped:
        # Last: the expression for the status of existing rows may read them.
        steps.append(ops.AddColumns(table.name, dropped, schema=table.schema, live=True).reverse())
    table.modify_ops.ops = remaining
    return steps


def _indexed_columns(op: MigrateOperation) -> set[str]:
    """Return the columns of an index that is created."""
    if isinstance(op, alembic_ops.CreateIndexOp):
        return {column.name for column in op.to_index().columns}
    return {each for each in op.columns if isinstance(each, str)} if isinstance(op, ops.CreateUniqueIndex) else set()


def _concurrent(op: alembic_ops.CreateIndexOp) -> ops.CreateIndex:
    index = op.to_index()
    return ops.CreateIndex(
        str(index.name),
        op.table_name,
        columns_of(index),
        unique=bool(index.unique),
        where=predicate_of(index),
        options=options_of(index),
        schema=op.schema,
    )


def _make_repeatable(op: MigrateOperation) -> None:
    """Add IF EXISTS or IF NOT EXISTS, or let an operation replace its earlier result."""
    if isinstance(op, alembic_ops.CreateTableOp | alembic_ops.CreateIndexOp | alembic_ops.AddColumnOp):
        op.if_not_exists = True
    elif isinstance(
        op,
        alembic_ops.DropTableOp | alembic_ops.DropIndexOp | alembic_ops.DropColumnOp | alembic_ops.DropConstraintOp,
    ):
        op.if_exists = True
    elif isinstance(op, ops.CreateUniqueIndex):
        op.replace = True
    elif isinstance(op, alembic_ops.OpContainer):
        for each in op.ops:
            _make_repeatable(each)
