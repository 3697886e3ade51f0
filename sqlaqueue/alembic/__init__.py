"""A plug-in for Alembic: autogenerate finds and writes everything that a queue has in a database.

One line in ``env.py`` sets it up::

    import sqlaqueue.alembic

Then ``alembic revision --autogenerate`` compares triggers, their functions, predicates of indexes, check constraints,
storage parameters and enum types of the queues in your models with the database, beside what Alembic compares itself.
It writes each difference as an operation such as ``op.create_queue_triggers(...)``, which works in any later version
of sqlaqueue and has a reverse, so that ``alembic downgrade`` restores the former schema. When a table with rows becomes
a queue, the migration contains ``existing_rows=...`` and does not run before you replace the three dots by the status
of these rows. For a large table that is in use, write the migration with ``alembic -x live=<table> revision
--autogenerate``: its steps then commit one by one and wait for their locks in short attempts.

The plug-in is named ``alembic.autogenerate.sqlaqueue``. Alembic includes it by default; an ``env.py`` that sets
``autogenerate_plugins`` must add that name.
"""

from __future__ import annotations

import logging
import sys

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops as alembic_ops
from alembic.util import PriorityDispatchResult

from sqlaqueue.alembic import compare, compare_functions, steps
from sqlaqueue.alembic.compare import TABLES, ComparedTable, DiffContext
from sqlaqueue.alembic.compare_prepared import complete_operations, use_stored_tables
from sqlaqueue.mapping.waits import configure_waits
from sqlaqueue.postgresql.catalog_schemas import CatalogReader
from sqlaqueue.sql.engine import PREPARED

log = logging.getLogger(__name__)

# -- autogenerate ------------------------------------------------------------------------------------------------------
# The two functions that Alembic calls during autogenerate, and the order of all comparisons.
#
# Alembic passes each table to :func:`remember_table`, after its filters (``include_name``, ``include_object``), and
# compares tables, columns and indexes. After the last table it calls :func:`compare_queues`, which compares what
# Alembic does not, and completes the list of operations. The downgrade is that list in reverse order.


def remember_table(  # noqa: PLR0917 - the signature that Alembic calls
    context: AutogenContext,
    modify_ops: alembic_ops.ModifyTableOps,
    schema: str | None,
    name: str,
    database_table: sa.Table | None,
    model_table: sa.Table | None,
) -> PriorityDispatchResult:
    """Remember a table for :func:`compare_queues`.

    :raises CommandError: if it is one of the library's, and a newer version of the library has migrated it.
    """
    table = ComparedTable((schema, str(name)), database_table, model_table, modify_ops)
    context.__dict__.setdefault(TABLES, []).append(table)
    compare.compare_version(context, table)
    return PriorityDispatchResult.CONTINUE


def configure_models(
    context: AutogenContext,
    upgrade: alembic_ops.UpgradeOps,  # noqa: ARG001 - the signature that Alembic calls
    schemas: set[str | None],  # noqa: ARG001 - the hook's signature
) -> PriorityDispatchResult:
    """Let the queues of the models know what their jobs wait for, before Alembic compares tables and indexes."""
    for metadata in dict.fromkeys(table.metadata for table in context.sorted_tables):
        configure_waits(metadata)
    return PriorityDispatchResult.CONTINUE


def compare_queues(
    context: AutogenContext, upgrade: alembic_ops.UpgradeOps, schemas: set[str | None]
) -> PriorityDispatchResult:
    """Complete the operations that Alembic has found.

    :raises CommandError: when a difference is ambiguous, and the message explains how to resolve it.
    """
    steps.remove_drops_of_queue_objects(upgrade)
    # Removed from the context: with two plug-ins set up, only the first one compares them.
    compared: list[ComparedTable] = context.__dict__.pop(TABLES, [])
    if context.connection is None or not compared:
        return PriorityDispatchResult.CONTINUE
    catalog = CatalogReader(context.connection, [table.qualified_name for table in compared], schemas)
    diff = DiffContext(context, upgrade, compared, catalog)
    steps.leave_out_partitions(diff)
    steps.keep_tables_with_schedules(diff)
    steps.refuse_taken_columns(diff)
    compare.compare_indexes_checks_and_defaults(diff)
    if not steps.enums_are_managed_elsewhere():
        compare.compare_enums(diff)
    compare.compare_storage_parameters(diff)
    compare_functions.compare_functions(diff)
    compare_functions.compare_triggers(diff)
    compare_functions.drop_unused_functions(diff)
    steps.move_jobs(diff)
    steps.move_waiting(diff)
    steps.sort_dropped_columns(diff)
    steps.ask_for_status(diff)
    steps.search_for_duplicates(diff)
    steps.split_into_steps(diff)
    steps.escape_status_values(diff)
    alembic_changes = [op for op in upgrade.ops if not (isinstance(op, alembic_ops.ModifyTableOps) and op.is_empty())]
    upgrade.ops[:] = [*diff.before, *alembic_changes, *diff.after, *diff.last]
    return PriorityDispatchResult.CONTINUE


try:
    from alembic.runtime.plugins import Plugin
    from alembic.util import DispatchPriority
except ImportError as missing:
    msg = "sqlaqueue.alembic needs Alembic 1.19.2 or newer, which has plug-ins: pip install 'sqlaqueue[alembic]'"
    raise ImportError(msg) from missing


__all__ = ["NAME"]

NAME = "alembic.autogenerate.sqlaqueue"
"""The name of the plug-in. Alembic includes all names that begin with ``alembic.autogenerate.`` by default."""


def setup(plugin: Plugin) -> None:
    """Add the comparisons to a plug-in; Alembic calls this."""
    add, first, last = plugin.add_autogenerate_comparator, DispatchPriority.FIRST, DispatchPriority.LAST
    add(configure_models, "schema", "sqlaqueue", qualifier="postgresql", priority=first)
    add(remember_table, "table", "sqlaqueue", qualifier="postgresql", priority=last)
    add(compare_queues, "schema", "sqlaqueue", qualifier="postgresql", priority=last)
    for name in PREPARED:
        add(configure_models, "schema", "sqlaqueue", qualifier=name, priority=first)
        add(use_stored_tables, "schema", "sqlaqueue", qualifier=name, priority=first)
        add(remember_table, "table", "sqlaqueue", qualifier=name, priority=last)
        add(complete_operations, "schema", "sqlaqueue", qualifier=name, priority=last)


Plugin.setup_plugin_from_module(sys.modules[__name__], NAME)
