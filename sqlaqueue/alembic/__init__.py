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
import re
import sys
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops
from alembic.util import PriorityDispatchResult
from sqlalchemy.schema import CreateIndex

from sqlaqueue.alembic import compare, compare_functions, steps
from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare import ComparedTable, DiffContext, is_queue_column
from sqlaqueue.alembic.implementations import VerbatimSql, ddl_text, stored_table
from sqlaqueue.alembic.operations_on_rows import AddColumns
from sqlaqueue.mapping.waits import configure_waits
from sqlaqueue.postgresql.catalog_schemas import PREFIX, CatalogReader
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.sql.engine import PREPARED
from sqlaqueue.sql.types import check_dialect, object_name

log = logging.getLogger(__name__)

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
    steps.move_waiting(diff)
    steps.sort_dropped_columns(diff)
    steps.ask_for_status(diff)
    steps.search_for_duplicates(diff)
    steps.split_into_steps(diff)
    steps.escape_status_values(diff)
    alembic_changes = [op for op in upgrade.ops if not (isinstance(op, alembic_ops.ModifyTableOps) and op.is_empty())]
    upgrade.ops[:] = [*diff.before, *alembic_changes, *diff.after, *diff.last]
    return PriorityDispatchResult.CONTINUE


# -- SQLite and MariaDB ------------------------------------------------------------------------------------------------
# Alembic compares tables, columns and indexes itself, with tables that are as the engine stores those of the models:
# the types, defaults and indexes of a prepared engine are written out, so that a migration contains them. What follows
# is the index of unique jobs, and what SQLite does not tell about indexes.


def use_stored_tables(
    context: AutogenContext,
    upgrade: alembic_ops.UpgradeOps,  # noqa: ARG001 - the signature that Alembic calls
    schemas: set[str | None],  # noqa: ARG001 - the hook's signature
) -> PriorityDispatchResult:
    """Let Alembic compare the tables of queues as the engine stores them.

    :raises ConfigurationError: if the engine is not prepared.
    """
    connection, models = context.connection, list(context.sorted_tables)
    if connection is None or not any(map(_is_of_library, models)) or _MODELS in context.__dict__:
        return PriorityDispatchResult.CONTINUE
    check_dialect(connection.dialect, "env.py", "the engine")
    copies: dict[Any, sa.MetaData] = {}
    stored = [
        stored_table(table, copies.setdefault(table.metadata, sa.MetaData()), connection.dialect) for table in models
    ]
    # Both are computed once, from the MetaData of the models.
    context.__dict__[_MODELS] = models
    context.__dict__["sorted_tables"] = stored
    context.__dict__["table_key_to_table"] = {table.key: table for table in stored}
    return PriorityDispatchResult.CONTINUE


_MODELS = "_sqlaqueue_models"
"""The tables of the models, beside those that Alembic compares."""


def _is_of_library(table: sa.Table) -> bool:
    return queue_of(table) is not None or table.name.startswith(PREFIX)


def complete_operations(
    context: AutogenContext,
    upgrade: alembic_ops.UpgradeOps,
    schemas: set[str | None],  # noqa: ARG001 - the hook's signature
) -> PriorityDispatchResult:
    """Add what Alembic does not compare, and ask for the status of existing rows."""
    connection = context.connection
    # Without a queue in the models, there may still be one in the database.
    models: list[sa.Table] = context.__dict__.get(_MODELS, [])
    compared: list[ComparedTable] = context.__dict__.pop(_TABLES, [])
    if connection is None:
        return PriorityDispatchResult.CONTINUE
    originals = {table.key: table for table in models}
    before: list[MigrateOperation] = []
    after: list[MigrateOperation] = []
    kept = steps.leave_out_schedules(connection, upgrade, compared, lambda table: table.schema)
    for table in compared:
        if table in kept:
            continue
        model = None if table.model_table is None else originals.get(table.model_table.key)
        _remove_equal_defaults(table)
        added = None if model is None else _added_columns(table, model)
        if added is not None:
            before.append(added)
        compare_indexes = _indexes_of_sqlite if connection.dialect.name == "sqlite" else _unique_index_of_mariadb
        first, last = compare_indexes(connection, table, model)
        before += first
        after += [*_dropped_status(table), *last]
    changes = [op for op in upgrade.ops if not (isinstance(op, alembic_ops.ModifyTableOps) and op.is_empty())]
    upgrade.ops[:] = [*before, *changes, *after]
    return PriorityDispatchResult.CONTINUE


def _added_columns(table: ComparedTable, model: sa.Table) -> MigrateOperation | None:
    """Take the columns of a queue that a table with rows gets, to ask for the status of the rows."""
    spec = queue_of(model)
    if spec is None or not spec.has("status") or table.database_table is None:
        return None
    additions = [op for op in table.modify_ops.ops if isinstance(op, alembic_ops.AddColumnOp)]
    found = [op for op in additions if is_queue_column(op.column)]
    status = spec.columns["status"].name
    if not any(op.column.name == status for op in found):
        return None
    table.modify_ops.ops = [op for op in table.modify_ops.ops if op not in found]
    columns = [op.column for op in found]
    return AddColumns(table.name, columns, status=status, existing_rows=..., schema=table.schema)


def _dropped_status(table: ComparedTable) -> list[MigrateOperation]:
    """Take the status of a table that is no queue any more, to ask for that of its rows in the downgrade."""
    claim = object_name("ix", table.name, "queue", "claim")
    indexes: Any = () if table.database_table is None else table.database_table.indexes
    index = next((each for each in indexes if each.name == claim), None)
    if table.model_table is None or table.spec is not None or index is None:
        return []
    # The index has the pending jobs on SQLite, and begins with the status on MariaDB.
    where = index.dialect_options["sqlite"]["where"]
    steps.ask_in_downgrade(table, index.columns[0].name if where is None else str(where))
    found: list[MigrateOperation] = [op for op in table.modify_ops.ops if isinstance(op, ops.DropColumns)]
    table.modify_ops.ops = [op for op in table.modify_ops.ops if op not in found]
    return found


def _remove_equal_defaults(table: ComparedTable) -> None:
    """Remove changes of defaults that differ only in how the engine writes them, if Alembic compares defaults."""
    for op in table.modify_ops.ops:
        if isinstance(op, alembic_ops.AlterColumnOp) and op.modify_server_default is not False:
            default = op.modify_server_default
            if isinstance(getattr(default, "arg", None), VerbatimSql):
                existing = getattr(op.existing_server_default, "arg", None)
                if _plain_default(existing) == _plain_default(default.arg):
                    op.modify_server_default = False
    changes = (alembic_ops.AlterColumnOp,)
    table.modify_ops.ops = [op for op in table.modify_ops.ops if not isinstance(op, changes) or op.has_changes()]


def _plain_default(default: Any) -> str:
    text = str(getattr(default, "text", default)).replace("\\:", ":").lower().replace("'", "")
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    text = {"true": "1", "false": "0"}.get(text, text)
    try:
        return str(float(text))
    except ValueError:
        return text


def _indexes_of_sqlite(
    connection: sa.Connection, table: ComparedTable, model: sa.Table | None
) -> tuple[list[MigrateOperation], list[MigrateOperation]]:
    """Return the operations that drop indexes of a queue, and those that create them, beside those of Alembic.

    SQLAlchemy does not reflect indexes of expressions, and Alembic compares no conditions. SQLite keeps the text of
    each index. A table that batch mode copies loses the indexes that SQLAlchemy does not reflect.
    """
    names = sa.text(
        "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = :table AND sql IS NOT NULL"
    )
    known = {row.name: row.sql for row in connection.execute(names, {"table": table.name})}
    wanted = {} if model is None or queue_of(model) is None else {str(index.name): index for index in model.indexes}
    reflected = set() if table.database_table is None else {index.name for index in table.database_table.indexes}
    by_alembic = {str(getattr(op, "index_name", "")) for op in table.modify_ops.ops}
    in_place = (alembic_ops.AddColumnOp, alembic_ops.CreateIndexOp, alembic_ops.DropIndexOp)
    is_copied = not all(isinstance(op, in_place) for op in table.modify_ops.ops)
    before: list[MigrateOperation] = []
    after: list[MigrateOperation] = []
    for name, index in sorted(wanted.items()):
        text = ddl_text(CreateIndex(index), connection.dialect)
        differs = name in known and _without_quotes(known[name]) != _without_quotes(text)
        has_expressions = not all(isinstance(each, sa.Column) for each in index.expressions)
        if name not in by_alembic and (differs or (has_expressions and name not in known)):
            log.info("Detected %s index %r on %r", "changed" if differs else "added", name, table.name)
            after.append(alembic_ops.CreateIndexOp.from_index(_index_named(table.model_table, name)))
        elif is_copied and name in known and name not in reflected:
            again = ops.ExecuteVerbatim(known[name].replace(" INDEX ", " INDEX IF NOT EXISTS ", 1))
            before.append(ops.PerDirection(down=[again]))
            after.append(ops.PerDirection([again]))
            continue
        if differs and name not in by_alembic:
            before.append(_drop_index(connection, name, known[name]))
    for name, text in known.items():
        if name not in wanted and name not in reflected and name.startswith(f"ix_{table.name}_queue_"):
            log.info("Detected removed index %r on %r", name, table.name)
            before.append(_drop_index(connection, name, text))
    return before, after


def _index_named(table: Any, name: str) -> sa.Index:
    found: sa.Index = next(index for index in table.indexes if index.name == name)
    return found


def _drop_index(connection: sa.Connection, name: str, text: str) -> MigrateOperation:
    quoted = connection.dialect.identifier_preparer.quote(name)
    return ops.ExecuteVerbatim(f"DROP INDEX IF EXISTS {quoted}", undo=ops.ExecuteVerbatim(text))


def _without_quotes(text: str) -> list[str]:
    """Return the parts of an index's text: a table that was copied in batch mode has its name in quotes."""
    return re.sub(r"([(),])", r" \1 ", text.replace('"', "")).split()


def _unique_index_of_mariadb(
    connection: sa.Connection, table: ComparedTable, model: sa.Table | None
) -> tuple[list[MigrateOperation], list[MigrateOperation]]:
    """Return the operations that drop the index of unique jobs with its column, and those that create it."""
    from sqlaqueue.mariadb import tables as unique  # noqa: PLC0415 - a migration of another database does not need it

    def is_of_column(op: Any) -> bool:
        name = getattr(op, "index_name", getattr(op, "constraint_name", None))
        return getattr(op, "column_name", None) == unique.COLUMN or name == table.unique_index

    # Alembic sees the column and the index in the database only.
    table.modify_ops.ops = [op for op in table.modify_ops.ops if not is_of_column(op)]
    index = None if model is None else next((each for each in model.indexes if each.name == table.unique_index), None)
    wanted = None if index is None else ddl_text(CreateIndex(index), connection.dialect)
    preparer = connection.dialect.identifier_preparer
    quoted = preparer.format_table(sa.table(table.name, schema=table.schema))
    drop = f"ALTER TABLE {quoted} DROP INDEX {preparer.quote(table.unique_index)}, DROP COLUMN {unique.COLUMN}"
    existing = None
    if table.database_table is not None and unique.COLUMN in table.database_table.c:
        existing = unique.definition(connection, quoted)
        if wanted is not None and unique.same_definition(connection, quoted, drop, wanted):
            return [], []
    before: list[MigrateOperation] = []
    after: list[MigrateOperation] = []
    if existing is not None:
        again = f"ALTER TABLE {quoted} {', '.join(f'ADD {line}' for line in existing)}"
        log.info("Detected removed or changed index %r on %r", table.unique_index, table.name)
        before.append(ops.ExecuteVerbatim(drop, undo=ops.ExecuteVerbatim(again)))
    if wanted is not None:
        undo: MigrateOperation | None = ops.ExecuteVerbatim(drop)
        if table.database_table is None:
            # The downgrade drops the table.
            undo = None
        after.append(ops.ExecuteVerbatim(wanted, undo=undo))
    return before, after


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
        add(use_stored_tables, "schema", "sqlaqueue", qualifier=name, priority=first)
        add(remember_table, "table", "sqlaqueue", qualifier=name, priority=last)
        add(complete_operations, "schema", "sqlaqueue", qualifier=name, priority=last)


Plugin.setup_plugin_from_module(sys.modules[__name__], NAME)
