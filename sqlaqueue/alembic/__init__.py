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

import sys
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops as alembic_ops
from alembic.util import PriorityDispatchResult
from sqlalchemy.dialects.postgresql import JSONB  # noqa: TID251 - the type of side tables

from sqlaqueue.alembic import compare, compare_functions, steps
from sqlaqueue.alembic.compare import ComparedTable, DiffContext
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.postgresql.catalog_schemas import PREFIX, CatalogReader
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.sql.engine import engine_of

# -- autogenerate ------------------------------------------------------------------------------------------------------
# The two functions that Alembic calls during autogenerate, and the order of all comparisons.
#
# Alembic passes each table to :func:`remember_table`, after its filters (``include_name``, ``include_object``), and
# compares tables, columns and indexes. After the last table it calls :func:`compare_queues`, which compares what
# Alembic does not, and completes the list of operations. The downgrade is that list in reverse order.


_TABLES = "_sqlaqueue_tables"


def remember_table(  # noqa: PLR0917 - the signature that Alembic calls
    context: AutogenContext,
    modify_ops: alembic_ops.ModifyTableOps,
    schema: str | None,
    name: str,
    database_table: sa.Table | None,
    model_table: sa.Table | None,
) -> PriorityDispatchResult:
    table = ComparedTable((schema, str(name)), database_table, model_table, modify_ops)
    context.__dict__.setdefault(_TABLES, []).append(table)
    return PriorityDispatchResult.CONTINUE


def compare_queues(
    context: AutogenContext, upgrade: alembic_ops.UpgradeOps, schemas: set[str | None]
) -> PriorityDispatchResult:
    """Complete the operations that Alembic has found.

    :raises CommandError: when a difference is ambiguous, and the message explains how to resolve it.
    """
    steps.remove_drops_of_queue_objects(upgrade)
    # Removed from the context: with two plug-ins set up, only the first one compares them.
    compared: list[ComparedTable] = context.__dict__.pop(_TABLES, [])
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
    steps.sort_dropped_columns(diff)
    steps.ask_for_status(diff)
    steps.search_for_duplicates(diff)
    steps.split_into_steps(diff)
    steps.escape_status_values(diff)
    alembic_changes = [op for op in upgrade.ops if not (isinstance(op, alembic_ops.ModifyTableOps) and op.is_empty())]
    upgrade.ops[:] = [*diff.before, *alembic_changes, *diff.after, *diff.last]
    return PriorityDispatchResult.CONTINUE


def refuse_queues(
    context: AutogenContext,
    upgrade: alembic_ops.UpgradeOps,  # noqa: ARG001 - the signature that Alembic calls
    schemas: set[str | None],  # noqa: ARG001 - the hook's signature
) -> PriorityDispatchResult:
    """Refuse tables of queues that ``include_object`` does not exclude.

    The migration would have PostgreSQL's partial indexes, whose columns a claim on MariaDB does not find, texts without
    the binary collation, and defaults that MariaDB does not accept.

    :raises ConfigurationError: naming the tables and what to do instead.
    """
    found = [
        table.name
        for table in context.sorted_tables
        if (queue_of(table) is not None or table.name.startswith(PREFIX))
        and context.run_object_filters(table, table.name, "table", False, None)  # noqa: FBT003 - Alembic passes it so
    ]
    if found:
        msg = (
            f"env.py: autogenerate cannot write the tables of queues on MariaDB ({', '.join(sorted(found))}); exclude "
            "them by include_object, and create them in a migration by "
            "Base.metadata.create_all(op.get_bind(), tables=[Model.__table__])"
        )
        raise ConfigurationError(msg)
    return PriorityDispatchResult.CONTINUE


def compare_sqlite_queues(
    context: AutogenContext,
    upgrade: alembic_ops.UpgradeOps,
    schemas: set[str | None],  # noqa: ARG001 - the signature that Alembic calls
) -> PriorityDispatchResult:
    """Write the types of side tables as any database has them, and add the indexes of expressions that are missing.

    Alembic compares tables, columns and indexes itself. Of PostgreSQL's objects there are none: no triggers of queues,
    functions or storage parameters.

    :raises ConfigurationError: if the engine is not prepared.
    """
    connection = context.connection
    if connection is None:
        return PriorityDispatchResult.CONTINUE
    tables = [table for table in context.sorted_tables if queue_of(table) is not None]
    if tables and engine_of(connection.dialect) is None:
        msg = "env.py: the engine is not prepared for queues; call sqlaqueue.prepare(engine) before it connects"
        raise ConfigurationError(msg)
    for op in upgrade.ops:
        if isinstance(op, alembic_ops.CreateTableOp):
            op.columns = [_portable(column) for column in op.columns]
        elif isinstance(op, alembic_ops.ModifyTableOps):
            for inner in op.ops:
                if isinstance(inner, alembic_ops.AddColumnOp):
                    inner.column = _portable(inner.column)
            op.ops = [inner for inner in op.ops if not _is_span_as_it_is(inner)]
    upgrade.ops = [op for op in upgrade.ops if not (isinstance(op, alembic_ops.ModifyTableOps) and op.is_empty())]
    names = sa.text("SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = :table")
    known = {name for table in tables for name in connection.scalars(names, {"table": table.name})}
    missing = (index for table in tables for index in table.indexes if index.name not in known)
    # Alembic passes over indexes of expressions, as it cannot compare them.
    upgrade.ops.extend(
        alembic_ops.CreateIndexOp.from_index(index)
        for index in missing
        if not all(isinstance(expression, sa.Column) for expression in index.expressions)
    )
    return PriorityDispatchResult.CONTINUE


def _portable(column: Any) -> Any:
    if not isinstance(column, sa.Column) or not isinstance(column.type, JSONB):
        return column
    copied = column._copy()  # noqa: SLF001 - the column itself belongs to the model
    copied.type = sa.JSON(none_as_null=column.type.none_as_null)
    return copied


def _is_span_as_it_is(op: Any) -> bool:
    """Return whether an operation makes a moment of a number of seconds, which a span of the library is."""
    if not isinstance(op, alembic_ops.AlterColumnOp) or not op.table_name.startswith(PREFIX):
        return False
    if isinstance(op.modify_type, sa.Interval) and not isinstance(op.existing_type, sa.DateTime):
        op.modify_type = None
    return not op.has_changes()


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
    add(remember_table, "table", "sqlaqueue", qualifier="postgresql", priority=last)
    add(compare_queues, "schema", "sqlaqueue", qualifier="postgresql", priority=last)
    add(compare_sqlite_queues, "schema", "sqlaqueue", qualifier="sqlite", priority=last)
    for name in ("mariadb", "mysql"):
        add(refuse_queues, "schema", "sqlaqueue", qualifier=name, priority=first)


Plugin.setup_plugin_from_module(sys.modules[__name__], NAME)
