"""Autogenerate on SQLite: Alembic compares tables, columns and indexes itself, and this completes what it has found.

Of PostgreSQL's objects there are none: no triggers of queues, functions or storage parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops as alembic_ops
from alembic.util import PriorityDispatchResult
from sqlalchemy.dialects.postgresql import JSONB  # noqa: TID251 - the type of side tables

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.postgresql.ddl import queue_of
from sqlaqueue.sql.engine import PREPARED_BY, engine_of


def compare_queues(
    context: AutogenContext,
    upgrade: alembic_ops.UpgradeOps,
    schemas: set[str | None],  # noqa: ARG001 - the signature that Alembic calls
) -> PriorityDispatchResult:
    """Write the types of side tables as any database has them, and add the indexes of expressions that are missing.

    :raises ConfigurationError: if the engine is not prepared.
    """
    connection = context.connection
    if connection is None:
        return PriorityDispatchResult.CONTINUE
    tables = [table for table in context.sorted_tables if queue_of(table) is not None]
    if tables and engine_of(connection.dialect) is None:
        call = PREPARED_BY[connection.dialect.name]
        msg = f"env.py: the engine is not prepared for queues; call {call} before it connects"
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
    known = {name for table in tables for name in _index_names(connection, table)}
    missing = (index for table in tables for index in table.indexes if index.name not in known)
    upgrade.ops.extend(alembic_ops.CreateIndexOp.from_index(index) for index in missing if _has_expressions(index))
    return PriorityDispatchResult.CONTINUE


def _portable(column: Any) -> Any:
    if not isinstance(column, sa.Column) or not isinstance(column.type, JSONB):
        return column
    copied = column._copy()  # noqa: SLF001 - the column itself belongs to the model
    copied.type = sa.JSON(none_as_null=column.type.none_as_null)
    return copied


def _is_span_as_it_is(op: Any) -> bool:
    """Return whether an operation makes a moment of a number of seconds, which a span of the library is."""
    if not isinstance(op, alembic_ops.AlterColumnOp) or not op.table_name.startswith("sqlaqueue_"):
        return False
    if isinstance(op.modify_type, sa.Interval) and not isinstance(op.existing_type, sa.DateTime):
        op.modify_type = None
    return not op.has_changes()


def _index_names(connection: sa.Connection, table: sa.Table) -> Iterator[str]:
    names = sa.text("SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = :table")
    yield from connection.scalars(names, {"table": table.name})


def _has_expressions(index: sa.Index) -> bool:
    # Alembic passes over these, as it cannot compare them.
    return not all(isinstance(expression, sa.Column) for expression in index.expressions)
