"""Autogenerate on SQLite and MariaDB.

Alembic compares tables, columns and indexes itself, with tables that are as the engine stores those of the models: the
types, defaults and indexes of a prepared engine are written out, so that a migration contains them. Added here are the
index of unique jobs, what SQLite does not tell about indexes, and the triggers and states of jobs that wait for others.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops
from alembic.util import PriorityDispatchResult
from sqlalchemy.schema import CreateIndex

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic import steps
from sqlaqueue.alembic.compare import TABLES, ComparedTable, is_queue_column
from sqlaqueue.alembic.implementations import VerbatimSql, ddl_text, stored_table
from sqlaqueue.alembic.operations_on_rows import AddColumns
from sqlaqueue.engines.waits import TRIGGERS
from sqlaqueue.postgresql.catalog_schemas import PREFIX
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.sql.engine import engine_of, exists_on
from sqlaqueue.sql.types import check_dialect, object_name

log = logging.getLogger(__name__)


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
    compared: list[ComparedTable] = context.__dict__.pop(TABLES, [])
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
        if _change_default_of_status(table, model) and not any(op is table.modify_ops for op in upgrade.ops):
            upgrade.ops.append(table.modify_ops)
        added = None if model is None else _added_columns(table, model)
        if added is not None:
            before.append(added)
        compare_indexes = _indexes_of_sqlite if connection.dialect.name == "sqlite" else _unique_index_of_mariadb
        first, last = compare_indexes(connection, table, model)
        before += first
        after += [*_dropped_status(table), *last, *_released(table, model)]
    triggers = _Triggers.of(connection, [table for table in compared if table not in kept], originals)
    before += triggers.dropped
    after += triggers.created
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
    indexes = [] if model is None or queue_of(model) is None else model.indexes
    # Some are of PostgreSQL only.
    wanted = {str(index.name): index for index in indexes if exists_on(index, connection.dialect)}
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


# -- jobs that wait for others -----------------------------------------------------------------------------------------


def _change_default_of_status(table: ComparedTable, model: sa.Table | None) -> bool:
    """Add the change of the default of the status, which Alembic compares only if it is configured to.

    A job that is inserted as waiting by a queue without ``waits_for`` would never run.
    """
    spec = None if model is None else queue_of(model)
    if spec is None or not spec.has("status") or table.database_table is None or table.model_table is None:
        return False
    name = spec.columns["status"].name
    existing, wanted = table.database_table.c.get(name), table.model_table.c[name].server_default
    changes = table.modify_ops.ops
    altered = [op for op in changes if isinstance(op, alembic_ops.AlterColumnOp) and op.column_name == name]
    known = any(op.modify_server_default is not False for op in altered)
    if existing is None or existing.server_default is None or wanted is None or known:
        return False
    before: Any = existing.server_default
    if _plain_default(before.arg) == _plain_default(getattr(wanted, "arg", "")):
        return False
    log.info("Detected changed default of column '%s.%s'", table.name, name)
    change = alembic_ops.AlterColumnOp(table.name, name, schema=table.schema, modify_server_default=wanted)
    change.existing_type, change.existing_nullable = existing.type, existing.nullable
    change.existing_server_default = before
    changes.append(change)
    return True


def _released(table: ComparedTable, model: sa.Table | None) -> list[MigrateOperation]:
    """Return what makes waiting jobs pending, in the direction in which they begin to wait for nothing."""
    spec = None if model is None else queue_of(model)
    name = object_name("ix", table.name, "queue", "waiting")
    known = [] if table.database_table is None else [each for each in table.database_table.indexes if each.name == name]
    if spec is None or table.database_table is None or bool(spec.waits) == bool(known):
        return []
    status = spec.columns["status"]
    waiting = f"{status.name} = 'waiting'"
    if spec.waits:
        waiting = f"{status.name} = {spec.literal('waiting')}"
    elif known[0].dialect_options["sqlite"]["where"] is not None:
        waiting = str(known[0].dialect_options["sqlite"]["where"])
    quoted = f"{table.schema}.{table.name}" if table.schema else table.name
    release = ops.ExecuteVerbatim(f"UPDATE {quoted} SET {status.name} = {spec.literal('pending')} WHERE {waiting}")  # noqa: S608 - names and values of the models
    return [ops.PerDirection(down=[release]) if spec.waits else ops.PerDirection([release])]


class _Trigger(NamedTuple):
    table: str
    create: str
    drop: str


class _Triggers(NamedTuple):
    """The operations on triggers: those before all others, and those after."""

    dropped: list[MigrateOperation]
    created: list[MigrateOperation]

    @classmethod
    def of(
        cls, connection: sa.Connection, tables: Sequence[ComparedTable], models: Mapping[str, sa.Table]
    ) -> _Triggers:
        engine: Any = engine_of(connection.dialect)
        quote = connection.dialect.identifier_preparer.quote
        known = {name: each for table in tables for name, each in _known_triggers(connection, table)}
        wanted: dict[str, _Trigger] = {}
        for table in tables:
            model = None if table.model_table is None else models.get(table.model_table.key)
            if model is not None and queue_of(model) is not None:
                for name, create in engine.triggers(model, connection).items():
                    wanted[name] = _Trigger(table.name, create, f"DROP TRIGGER {quote(name)}")
        removed, added = known.keys() - wanted.keys(), wanted.keys() - known.keys()
        again: set[str] = set()
        if connection.dialect.name == "sqlite" and any(map(_is_copied, tables)):
            # A table that batch mode copies loses its triggers, and cannot be renamed while others refer to it.
            again = known.keys() & wanted.keys()
        for name in sorted(removed | added):
            log.info(
                "Detected %s trigger %r on %r",
                "removed" if name in removed else "added",
                name,
                (known | wanted)[name].table,
            )
        before: list[MigrateOperation] = []
        after: list[MigrateOperation] = []
        for name in sorted(removed | again):
            drop = ops.ExecuteVerbatim(known[name].drop)
            before.append(ops.ExecuteVerbatim(drop.sql, undo=ops.ExecuteVerbatim(known[name].create)))
        dropped_later = {table.name for table in tables if table.database_table is None}
        for name in sorted(added | again):
            # The downgrade of a new table drops its triggers.
            undo = None if wanted[name].table in dropped_later else ops.ExecuteVerbatim(wanted[name].drop)
            after.append(ops.ExecuteVerbatim(wanted[name].create, undo=undo))
        return cls(before, after)


def _is_copied(table: ComparedTable) -> bool:
    in_place = (alembic_ops.AddColumnOp, alembic_ops.CreateIndexOp, alembic_ops.DropIndexOp)
    return table.database_table is not None and not all(isinstance(op, in_place) for op in table.modify_ops.ops)


def _known_triggers(connection: sa.Connection, table: ComparedTable) -> list[tuple[str, _Trigger]]:
    """Return the triggers of a table in the database, but for that of schedules."""
    quote = connection.dialect.identifier_preparer.quote
    if connection.dialect.name == "sqlite":
        query = sa.text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = :table")
        texts = {row.name: row.sql for row in connection.execute(query, {"table": table.name})}
    else:
        query = sa.text(
            "SELECT trigger_name FROM information_schema.triggers "
            "WHERE event_object_table = :table AND trigger_schema = COALESCE(:schema, DATABASE())"
        )
        names = connection.execute(query, {"table": table.name, "schema": table.qualified_name[0]}).scalars().all()
        shown = {name: connection.exec_driver_sql(f"SHOW CREATE TRIGGER {quote(name)}").one() for name in names}
        texts = {name: re.sub(r"DEFINER=\S+ ", "", row[2]) for name, row in shown.items()}
    return [
        (name, _Trigger(table.name, text, f"DROP TRIGGER {quote(name)}"))
        for name, text in texts.items()
        if name.startswith(TRIGGERS)
    ]
