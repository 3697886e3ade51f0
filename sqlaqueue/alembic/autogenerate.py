"""The two functions that Alembic calls during autogenerate, and the order of all comparisons.

Alembic passes each table to :func:`remember_table`, after its filters (``include_name``, ``include_object``), and
compares tables, columns and indexes. After the last table it calls :func:`compare_queues`, which compares what Alembic
does not, and completes the list of operations. The downgrade is that list in reverse order.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops as alembic_ops
from alembic.util import PriorityDispatchResult

from sqlaqueue.alembic.compare import enums, functions, storage_parameters, tables, triggers
from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext, remembered_tables, take_tables
from sqlaqueue.alembic.migration_steps import (
    escaping,
    existing_tables,
    kept_schedules,
    live_tables,
    other_plugins,
    partitions,
    strategy_change,
    unique_indexes,
)
from sqlaqueue.postgresql.catalog_schemas import CatalogReader


def remember_table(  # noqa: PLR0917 - the signature that Alembic calls
    context: AutogenContext,
    modify_ops: alembic_ops.ModifyTableOps,
    schema: str | None,
    name: str,
    database_table: sa.Table | None,
    model_table: sa.Table | None,
) -> PriorityDispatchResult:
    """Remember a table that Alembic compares."""
    table = ComparedTable((schema, str(name)), database_table, model_table, modify_ops)
    remembered_tables(context).append(table)
    return PriorityDispatchResult.CONTINUE


def compare_queues(
    context: AutogenContext, upgrade: alembic_ops.UpgradeOps, schemas: set[str | None]
) -> PriorityDispatchResult:
    """Complete the operations that Alembic has found.

    :raises CommandError: when a difference is ambiguous, and the message explains how to resolve it.
    """
    other_plugins.remove_drops_of_queue_objects(upgrade)
    compared = take_tables(context)
    if context.connection is None or not compared:
        return PriorityDispatchResult.CONTINUE
    catalog = CatalogReader(context.connection, [table.qualified_name for table in compared], schemas)
    diff = DiffContext(context, upgrade, compared, catalog)
    partitions.leave_out_partitions(diff)
    kept_schedules.keep_tables_with_schedules(diff)
    existing_tables.refuse_taken_columns(diff)
    tables.compare_indexes_checks_and_defaults(diff)
    if not other_plugins.enums_are_managed_elsewhere():
        enums.compare_enums(diff)
    storage_parameters.compare_storage_parameters(diff)
    functions.compare_functions(diff)
    triggers.compare_triggers(diff)
    functions.drop_unused_functions(diff)
    strategy_change.move_jobs(diff)
    strategy_change.sort_dropped_columns(diff)
    existing_tables.ask_for_status(diff)
    unique_indexes.search_for_twins(diff)
    live_tables.split_into_steps(diff)
    escaping.escape_status_values(diff)
    alembic_changes = [op for op in upgrade.ops if not (isinstance(op, alembic_ops.ModifyTableOps) and op.is_empty())]
    upgrade.ops[:] = [*diff.before, *alembic_changes, *diff.after, *diff.last]
    return PriorityDispatchResult.CONTINUE
