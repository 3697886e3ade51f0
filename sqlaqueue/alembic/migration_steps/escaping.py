"""Escapes colons and percent signs of status values in the SQL that Alembic writes into migrations.

Alembic writes a predicate or a default as ``sa.text("status = ...")``. There ``:name`` would be a parameter, and a
percent sign that was doubled for a driver would be doubled again.
"""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa
from alembic.operations import ops as alembic_ops
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import ColumnElement

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare.diff_context import DiffContext
from sqlaqueue.postgresql.ddl import literal_sql

_WHERE = "postgresql_where"
_NEEDS_ESCAPE = re.compile(r"%|(?<!:):(?!:)")


class VerbatimSql(ColumnElement[Any]):
    """SQL text that Alembic renders as an ``sa.text()`` with the same meaning."""

    inherit_cache = False

    def __init__(self, text: str) -> None:
        self.text = text


@compiles(VerbatimSql)
def _render(element: VerbatimSql, *_: Any, **__: Any) -> str:
    return element.text.replace(":", "\\:")


def escape_status_values(diff: DiffContext) -> None:
    """Escape the predicates and defaults in the operations on queues that Alembic renders itself."""
    queues = {table.qualified_name for table in diff.tables if table.belongs_to_queue or diff.was_queue(table)}
    default = diff.context.dialect.default_schema_name
    for found in [*diff.before, *diff.upgrade.ops, *diff.after]:
        for op in found.ops if isinstance(found, alembic_ops.ModifyTableOps) else [found]:
            schema, name = getattr(op, "schema", None), getattr(op, "table_name", getattr(op, "table", None))
            if (None if schema == default else schema, name) in queues:
                _escape(op)


def _escape(op: alembic_ops.MigrateOperation | None) -> None:
    if isinstance(op, alembic_ops.CreateIndexOp | alembic_ops.DropIndexOp):
        where = op.kw.get(_WHERE)
        # A reflected predicate is a string.
        text = where if where is None or isinstance(where, str) else literal_sql(where)
        if text is not None and _NEEDS_ESCAPE.search(text):
            op.kw = {**op.kw, _WHERE: VerbatimSql(text)}
    elif isinstance(op, alembic_ops.CreateTableOp):
        op.columns = [_escaped(each) if isinstance(each, sa.Column) else each for each in op.columns]
    elif isinstance(op, alembic_ops.AddColumnOp):
        op.column = _escaped(op.column)
    elif isinstance(op, ops.AddColumns):
        op.columns = [_escaped(each) for each in op.columns]
    elif isinstance(op, alembic_ops.AlterColumnOp):
        op.modify_server_default = _escaped_default(op.modify_server_default)
        op.existing_server_default = _escaped_default(op.existing_server_default)
    elif isinstance(op, alembic_ops.DropTableOp | alembic_ops.DropColumnOp):
        _escape(op._reverse)  # noqa: SLF001 - the operation that the downgrade renders
    elif isinstance(op, ops.DropColumns):
        _escape(op.undo)


def _escaped(column: sa.Column[Any]) -> sa.Column[Any]:
    default = _escaped_default(column.server_default)
    if default is column.server_default:
        return column
    escaped = column._copy()  # noqa: SLF001 - the public copy() was removed, and the column belongs to the model
    escaped.server_default = default
    return escaped


def _escaped_default(default: Any) -> Any:
    if not isinstance(default, sa.DefaultClause):
        return default
    # Reflected SQL contains escaped colons.
    text = default.arg.text.replace("\\:", ":") if isinstance(default.arg, sa.TextClause) else literal_sql(default.arg)
    return sa.DefaultClause(VerbatimSql(text)) if _NEEDS_ESCAPE.search(text) else default
