"""What the jobs of a queue need when the queue gets another strategy: locks, released jobs, and messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import sqlalchemy as sa
from alembic.operations import ops as alembic_ops

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext
from sqlaqueue.postgresql.catalog_schemas import PREFIX
from sqlaqueue.postgresql.ddl import literal_sql
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.types import object_name

_IS_NOT_NULL = re.compile(r'(?:"(?:[^"]|"")+"|\w+) IS NOT NULL')
"""How PostgreSQL prints the condition on the lease in the predicate of the index of quarantined jobs."""


def move_jobs(diff: DiffContext) -> None:
    """Keep the jobs of remaining tables pending under the other strategy, in both directions."""
    locked: list[ComparedTable] = []
    emptied: list[ops.PerDirection] = []
    for table, *_ in diff.remaining_tables:
        up: list[ops.QueueOp] = []
        down: list[ops.QueueOp] = []
        spec = table.spec
        released = None if spec is None else _release(table, spec, *_lease_conditions(diff, table, spec))
        rewritten = spec is not None and _message_columns_change(diff, table)
        # New triggers write messages for later changes only, so existing jobs need theirs from the migration.
        if spec is not None and (rewritten or any(map(table.has_message_triggers, diff.after))):
            up += _fill_messages(table, spec)
        if rewritten:
            empty = ops.EmptyMessages(diff.message_table_name(table)[1], schema=table.schema)
            diff.before.insert(0, ops.PerDirection([empty]))
            emptied.append(ops.PerDirection(down=[empty]))
        if rewritten or any(map(table.has_message_triggers, diff.before)):
            down += _fill_former_messages(diff, table)
        if diff.was_queue(table) and (up or down or released or _triggers_change(diff, table)):
            locked.append(table)
        if released is not None:
            # In both directions before the columns are dropped that the conditions name.
            diff.before.insert(0, ops.PerDirection(released.ops))
            diff.last.append(ops.PerDirection(down=released.down))
        if down:
            diff.before.insert(0, ops.PerDirection(down=down))
        diff.after += up
    diff.after += emptied
    for schema in dict.fromkeys(table.schema for table in locked):
        _lock(diff, schema, [table for table in locked if table.schema == schema])


def _message_columns_change(diff: DiffContext, table: ComparedTable) -> bool:
    """Return whether the message table gets or loses columns, so that its rows must be written again."""
    columns = (alembic_ops.AddColumnOp, alembic_ops.DropColumnOp)
    messages = diff.message_table_name(table)
    return any(
        isinstance(op, columns)
        for other, *_ in diff.remaining_tables
        if other.qualified_name == messages
        for op in other.modify_ops.ops
    )


def _triggers_change(diff: DiffContext, table: ComparedTable) -> bool:
    """Return whether triggers are created or dropped, which needs a strong lock on the table."""
    return any(table.triggers_in(op) for op in [*diff.before, *diff.after])


def _lease_conditions(diff: DiffContext, table: ComparedTable, spec: QueueSpec) -> tuple[str | None, str | None]:
    """Return the conditions that a running job has a lease, before the migration and after it.

    Both are None unless exactly one of the two strategies has leases. A processing row without a lease was not claimed
    by this queue.
    """
    before = _former_lease_condition(diff, table)
    role = next((role for role in ("lease_expires_at", "lease_token") if spec.has(role)), None)
    after = None if spec.strategy.holds_transaction or role is None else literal_sql(spec.columns[role].is_not(None))
    if not diff.was_queue(table) or (before is None) == (after is None):
        return None, None
    return before, after


def _former_lease_condition(diff: DiffContext, table: ComparedTable) -> str | None:
    """Return the condition that a job has a lease in the database, taken from its indexes on leases."""
    lease, quarantine = (object_name("ix", table.name, "queue", purpose) for purpose in ("lease", "quarantined"))
    if table.database_table is not None:
        for index in table.database_table.indexes:
            if index.name == lease and len(index.columns) == 1:
                return literal_sql(index.columns[0].is_not(None))
    _, predicate = diff.catalog.index(table.qualified_name, quarantine) or (True, None)
    match = _IS_NOT_NULL.search(predicate or "")
    return None if match is None else match[0]


def _release(table: ComparedTable, spec: QueueSpec, before: str | None, after: str | None) -> ops.PerDirection | None:
    """Return what releases jobs with leases in the direction in which the next strategy has no leases."""
    if not spec.has("status") or spec.config.states.processing is None or (before is None and after is None):
        return None
    values = {spec.columns["status"].name: literal_sql(spec.literal("pending"))}
    if spec.has("attempts"):
        attempts = spec.columns["attempts"]
        values[attempts.name] = literal_sql(sa.func.greatest(sa.func.coalesce(attempts, 0) - 1, 0))
    running = literal_sql(spec.in_state("processing"))

    def release(lease: str | None) -> list[ops.ReleaseJobs]:
        if lease is None:
            return []
        return [ops.ReleaseJobs(table.name, values, where=f"{running} AND {lease}", schema=table.schema)]

    return ops.PerDirection(release(before), release(after))


def _fill_messages(table: ComparedTable, spec: QueueSpec) -> Iterator[ops.QueueOp]:
    messages = spec.side_tables.get("messages")
    if messages is None or not messages.name.startswith(PREFIX):
        return
    yield ops.FillMessages(
        table.name,
        messages.name,
        keys=[key.name for key in spec.keys],
        order=[spec.columns[role].name for role in spec.order_roles],
        where=literal_sql(spec.in_state("pending")),
        schema=table.schema,
    )


def _fill_former_messages(diff: DiffContext, table: ComparedTable) -> Iterator[ops.QueueOp]:
    """Yield what writes the messages of the former strategy, as its triggers in the database define them."""
    name = diff.message_table_name(table)
    messages, where = diff.database_table(name), diff.pending_condition_of_triggers(table)
    if messages is None or where is None:
        return
    keys = [column.name for column in messages.columns if column.primary_key]
    order = [column.name for column in messages.columns if not column.primary_key]
    yield ops.FillMessages(table.name, name[1], keys=keys, order=order, where=where, schema=table.schema)


def _lock(diff: DiffContext, schema: str | None, tables: Sequence[ComparedTable]) -> None:
    # All tables in one attempt: waiting for one while holding another would block other transactions.
    before, after = [], []
    for table in tables:
        messages = diff.message_table_name(table)
        remains = any(other.qualified_name == messages and other.model_table is not None for other in diff.tables)
        before += [table.name, *([messages[1]] if diff.database_table(messages) is not None else [])]
        after += [table.name, *([messages[1]] if remains else [])]
    up, down = (ops.LockTables(names, schema=schema) for names in (before, after))
    diff.before.insert(0, ops.PerDirection([up]))
    diff.last.append(ops.PerDirection(down=[down]))


def sort_dropped_columns(diff: DiffContext) -> None:
    """Drop the columns of a queue last first, so that the downgrade adds them in their present order.

    Alembic drops them in no particular order.
    """
    for table, database_table, _ in diff.remaining_tables:
        positions = {column.name: position for position, column in enumerate(database_table.columns)}
        drops = [op for op in table.modify_ops.ops if isinstance(op, alembic_ops.DropColumnOp)]
        if diff.was_queue(table) and len(drops) > 1:
            others = [op for op in table.modify_ops.ops if op not in drops]
            drops.sort(key=lambda op: positions[op.column_name], reverse=True)
            table.modify_ops.ops = [*others, *drops]
