"""A table that was there before its queue: what is refused, and what is done otherwise while the table is in use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops
from alembic.util import CommandError

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.catalog import PREFIX
from sqlaqueue.alembic.seen import Review, Seen
from sqlaqueue.alembic.tables import text_of
from sqlaqueue.spec import QueueSpec


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
        later = _spare(seen)
        review.behind = [*later, *review.behind]
        _let_triggers_wait(review, seen)
    for op in review.upgrade.ops:
        _allow_again(op)


def _let_triggers_wait(review: Review, seen: Seen) -> None:
    """Let what is done to the triggers of a table commit by itself, and the filling of its messages as well."""
    for op in review.behind:
        fills = isinstance(op, ops.FillMessages) and (op.schema, op.table) == (seen.schema, seen.name)
        if fills or seen.triggers_in(op):
            op.live = True  # type: ignore[attr-defined] # each of these has it
    for op in review.front:
        # Triggers of messages go with their table, under one lock.
        if isinstance(op, ops.DropTriggers) and seen.triggers_in(op) and not seen.messages_in(op):
            op.live = True
            for back in op.previous.ops if isinstance(op.previous, ops.Steps) else [op.previous]:
                if isinstance(back, ops.CreateTriggers):
                    back.live = True


def _spare(seen: Seen) -> list[MigrateOperation]:
    """Take out of a table's changes what can be done beside its users, and return it."""
    spared: list[MigrateOperation] = []
    remaining: list[MigrateOperation] = []
    plain: list[sa.Column[object]] = []
    for op in seen.modify.ops:
        if isinstance(op, ops.AddColumns):
            op.live = True
            spared.insert(0, op)
        elif isinstance(op, alembic_ops.AddColumnOp) and "sqlaqueue" in op.column.info:
            plain.append(op.column)
        elif isinstance(op, alembic_ops.CreateIndexOp):
            spared.append(_concurrent(op))
        else:
            remaining.append(op)
    if plain:
        spared.insert(0, ops.AddColumns(seen.name, plain, schema=seen.schema, live=True))
    seen.modify.ops = remaining
    return spared


def _concurrent(op: alembic_ops.CreateIndexOp) -> ops.CreateIndex:
    index = op.to_index()
    where = index.dialect_options["postgresql"]["where"]
    columns = [part.name if isinstance(part, sa.Column) else sa.text(text_of(part)) for part in index.expressions]
    return ops.CreateIndex(
        str(index.name),
        op.table_name,
        columns,
        unique=bool(index.unique),
        where=None if where is None else text_of(where),
        schema=op.schema,
    )


def _allow_again(op: MigrateOperation) -> None:
    if isinstance(op, alembic_ops.CreateTableOp | alembic_ops.CreateIndexOp) and op.table_name.startswith(PREFIX):
        op.if_not_exists = True
    elif isinstance(op, alembic_ops.ModifyTableOps):
        for each in op.ops:
            _allow_again(each)
