"""A table that was there before its queue: what is refused, and what is done otherwise while the table is in use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops
from alembic.util import CommandError

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.seen import Review, Seen
from sqlaqueue.alembic.tables import text_of
from sqlaqueue.queue.spec import QueueSpec


def refuse_columns_of_others(review: Review) -> None:
    """Refuse to take a column for the queue's that was there before, under the name that the queue's own would have.

    :raises CommandError: naming the class, the attribute and both fixes.
    """
    for seen, found, _ in review.kept:
        spec = seen.spec
        if spec is None or review.was_queue(seen):
            continue
        altered = {
            op.column_name
            for op in seen.modify.ops
            if isinstance(op, alembic_ops.AlterColumnOp) and op.modify_type is not None
        }
        there = {column.name: column for column in found.columns}
        for role, column in spec.columns.items():
            if "sqlaqueue" not in column.info or column.name not in there:
                continue
            if role == "status" or column.name in altered:
                raise CommandError(_taken(spec, role, there[column.name], column))


def _taken(spec: QueueSpec, role: str, there: sa.Column[object], wanted: sa.Column[object]) -> str:
    attribute = spec.attributes[role]
    adopted, moved = (f"QueueConfig(columns={{{role!r}: {name!r}}})" for name in (attribute, f"queue_{role}"))
    return (
        f"{spec.model.__name__}.{attribute}: the table {spec.table.fullname} has a column {there.name} of type "
        f"{there.type!r} already, and it is no queue so far; the queue's {role} would be of type {wanted.type!r}. If "
        f"that column is the queue's {role}, define the attribute in the class and adopt it with {adopted}; if it "
        f"means something else, put the queue's on another attribute with {moved}"
    )


def spare_live_tables(review: Review) -> None:
    """Rewrite what is done to tables that are in use, ``-x live=name``.

    Each step then commits by itself, and may be done again: an interrupted migration is simply run once more.

    :raises CommandError: when there is no such table among the queues.
    """
    live = [seen for seen, *_ in review.kept if review.is_live(seen) and seen.spec is not None]
    unknown = review.live.difference(*(seen.names for seen in review.tables if seen.spec is not None))
    if unknown:
        names = ", ".join(sorted(unknown))
        raise CommandError(f"-x live={names}: no queue of the models has a table of that name; check the spelling")
    if not live:
        return
    for seen in live:
        _refuse_indexes_of_partitions(review, seen)
        spared = _spare(seen, is_queue=review.was_queue(seen))
        if review.was_queue(seen):
            # Before everything else, which remains one transaction: its triggers must match its columns at any time.
            review.front = [*spared, *review.front]
        else:
            review.behind = [*spared, *review.behind]
            _fill_in_steps(review, seen)
    for op in review.upgrade.ops:
        _allow_again(op)


def _refuse_indexes_of_partitions(review: Review, seen: Seen) -> None:
    indexes = [op for op in seen.modify.ops if isinstance(op, alembic_ops.CreateIndexOp)]
    if indexes and review.catalog.is_partitioned(seen.place):
        raise CommandError(
            f"-x live={seen.name}: the table is partitioned, and PostgreSQL creates no index on such a table "
            "CONCURRENTLY. Leave -x live away, and nobody writes while the indexes are created; or use the strategy "
            '"delete_returning", which has its index on the table of messages'
        )


def _fill_in_steps(review: Review, seen: Seen) -> None:
    for op in review.behind:
        if isinstance(op, ops.CreateTriggers | ops.FillMessages) and (op.schema, op.table) == (seen.schema, seen.name):
            op.live = True


def _spare(seen: Seen, *, is_queue: bool) -> list[MigrateOperation]:
    """Take out of a table's changes what can be done beside its users, and return it.

    :param is_queue: the table has triggers, which may need the columns that are dropped.
    """
    spared: list[MigrateOperation] = []
    remaining: list[MigrateOperation] = []
    added: list[sa.Column[object]] = []
    dropped: list[sa.Column[object]] = []
    for op in seen.modify.ops:
        if isinstance(op, ops.AddColumns):
            op.live = True
            spared.insert(0, op)
        elif isinstance(op, alembic_ops.AddColumnOp) and "sqlaqueue" in op.column.info:
            added.append(op.column)
        elif isinstance(op, alembic_ops.DropColumnOp) and not is_queue:
            dropped.insert(0, op.to_column())
        elif isinstance(op, alembic_ops.CreateIndexOp):
            spared.append(_concurrent(op))
        elif isinstance(op, alembic_ops.DropIndexOp):
            name, back = str(op.index_name), _concurrent(op.reverse())
            spared.append(ops.DropIndex(name, seen.name, schema=seen.schema, previous=back))
        else:
            remaining.append(op)
    if added:
        spared.insert(0, ops.AddColumns(seen.name, added, schema=seen.schema, live=True))
    if dropped:
        # Last: the states of the rows may be told from them.
        spared.append(ops.AddColumns(seen.name, dropped, schema=seen.schema, live=True).reverse())
    seen.modify.ops = remaining
    return spared


def _concurrent(op: alembic_ops.CreateIndexOp) -> ops.CreateIndex:
    index = op.to_index()
    options = {
        name: [getattr(each, "name", each) for each in value] if isinstance(value, list | tuple) else value
        for name, value in index.dialect_kwargs.items()
        if name != "postgresql_where" and value
    }
    where = index.dialect_options["postgresql"]["where"]
    columns = [part.name if isinstance(part, sa.Column) else sa.text(text_of(part)) for part in index.expressions]
    return ops.CreateIndex(
        str(index.name),
        op.table_name,
        columns,
        unique=bool(index.unique),
        where=None if where is None else text_of(where),
        options=options,
        schema=op.schema,
    )


def _allow_again(op: MigrateOperation) -> None:
    if isinstance(op, alembic_ops.CreateTableOp | alembic_ops.CreateIndexOp | alembic_ops.AddColumnOp):
        op.if_not_exists = True
    elif isinstance(
        op,
        alembic_ops.DropTableOp | alembic_ops.DropIndexOp | alembic_ops.DropColumnOp | alembic_ops.DropConstraintOp,
    ):
        op.if_exists = True
    elif isinstance(op, alembic_ops.ModifyTableOps):
        for each in op.ops:
            _allow_again(each)
