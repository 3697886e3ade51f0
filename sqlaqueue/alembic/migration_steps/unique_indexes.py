"""The unique index of a queue is created by an operation that names the jobs which prevent it (twins)."""

from __future__ import annotations

from collections.abc import Sequence

from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext
from sqlaqueue.alembic.migration_steps.index_arguments import columns_of, options_of, predicate_of

_NULLS = "postgresql_nulls_not_distinct"


def search_for_twins(diff: DiffContext) -> None:
    """Replace the operations on the unique indexes of tables that may have rows, in both directions.

    An index that is created and dropped is replaced by one operation, so that twins are found before it is dropped.
    """
    for table, database_table, _ in diff.remaining_tables:
        live = diff.is_live(table) and table.spec is not None
        create, drop = _find(table, alembic_ops.CreateIndexOp), _find(table, alembic_ops.DropIndexOp)
        former = None
        if isinstance(drop, alembic_ops.DropIndexOp) and drop.to_index().unique:
            keys = [column.name for column in database_table.primary_key]
            former = _create(table, drop.reverse(), keys, live=live)
        if isinstance(create, alembic_ops.CreateIndexOp) and table.spec is not None:
            new = _create(table, create, [column.name for column in table.spec.keys], live=live)
            new.former, new.replace = former, former is not None
            _replace(table, create, new)
            if former is not None:
                _replace(table, drop)
        elif former is not None:
            _replace(table, drop, _drop(former))


def _find(table: ComparedTable, kind: type[MigrateOperation]) -> MigrateOperation | None:
    found = (op for op in table.modify_ops.ops if isinstance(op, kind))
    return next((op for op in found if str(getattr(op, "index_name", "")) == table.unique_index), None)


def _create(
    table: ComparedTable, op: alembic_ops.CreateIndexOp, keys: Sequence[str], *, live: bool
) -> ops.CreateUniqueIndex:
    index = op.to_index()
    return ops.CreateUniqueIndex(
        table.unique_index,
        table.name,
        columns_of(index),
        where=predicate_of(index),
        # A table without a primary key has the address of each row.
        keys=[*keys] or ["ctid"],
        nulls_distinct=not index.dialect_kwargs.get(_NULLS),
        options={name: value for name, value in options_of(index).items() if name != _NULLS},
        schema=table.schema,
        live=live,
    )


def _drop(former: ops.CreateUniqueIndex) -> MigrateOperation:
    if former.live:
        return former.reverse()
    return ops.PerDirection([former.reverse()], down=[former])


def _replace(table: ComparedTable, old: MigrateOperation | None, *new: MigrateOperation) -> None:
    table.modify_ops.ops = [each for op in table.modify_ops.ops for each in (new if op is old else (op,))]
