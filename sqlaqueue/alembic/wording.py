"""State words with colons and percent signs, written into migrations so that they mean themselves there.

Alembic renders a predicate or a default as ``sa.text("status = ...")``. There ``:word`` would be a parameter, and a
percent sign that was doubled for a driver is doubled once more.
"""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa
from alembic.operations import ops as alembic_ops
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import ColumnElement

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.seen import Review
from sqlaqueue.alembic.tables import text_of

_WHERE = "postgresql_where"
_TREACHEROUS = re.compile(r"%|(?<!:):(?!:)")


class AsWritten(ColumnElement[Any]):
    """SQL that comes out of ``sa.text()``, once it is rendered, as it was put in here."""

    inherit_cache = False

    def __init__(self, text: str) -> None:
        self.text = text


@compiles(AsWritten)
def _as_written(element: AsWritten, *_: Any, **__: Any) -> str:
    return element.text.replace(":", "\\:")


def write_as_meant(review: Review) -> None:
    """See to the words in what Alembic is going to render for the tables of queues."""
    of_queues = {seen.place for seen in review.tables if seen.of_queue or review.was_queue(seen)}
    default = review.context.dialect.default_schema_name
    for op in _flat([*review.front, *review.upgrade.ops, *review.behind]):
        schema, name = getattr(op, "schema", None), getattr(op, "table_name", getattr(op, "table", None))
        if (None if schema == default else schema, name) in of_queues:
            _mend(op)


def _mend(op: alembic_ops.MigrateOperation | None) -> None:
    if isinstance(op, alembic_ops.CreateIndexOp | alembic_ops.DropIndexOp):
        _mend_predicate(op)
    elif isinstance(op, alembic_ops.CreateTableOp):
        op.columns = [_mended(each) if isinstance(each, sa.Column) else each for each in op.columns]
    elif isinstance(op, alembic_ops.AddColumnOp):
        op.column = _mended(op.column)
    elif isinstance(op, ops.AddColumns):
        op.columns = [_mended(each) for each in op.columns]
    elif isinstance(op, alembic_ops.AlterColumnOp):
        for which in ("modify_server_default", "existing_server_default"):
            setattr(op, which, _mended_default(getattr(op, which)))
    elif isinstance(op, alembic_ops.DropTableOp | alembic_ops.DropColumnOp):
        _mend(op._reverse)  # noqa: SLF001 - what brings it back
    elif isinstance(op, ops.DropColumns):
        _mend(op.previous)


def _flat(given: list[alembic_ops.MigrateOperation]) -> list[alembic_ops.MigrateOperation]:
    flat: list[alembic_ops.MigrateOperation] = []
    for op in given:
        flat += op.ops if isinstance(op, alembic_ops.ModifyTableOps) else [op]
    return flat


def _mend_predicate(op: alembic_ops.CreateIndexOp | alembic_ops.DropIndexOp) -> None:
    where = op.kw.get(_WHERE)
    # What was reflected is a string.
    text = where if where is None or isinstance(where, str) else text_of(where)
    if text is not None and _TREACHEROUS.search(text):
        op.kw = {**op.kw, _WHERE: AsWritten(text)}


def _mended(column: sa.Column[Any]) -> sa.Column[Any]:
    default = _mended_default(column.server_default)
    if default is column.server_default:
        return column
    mended = column._copy()  # noqa: SLF001 - the public copy() was taken away, and the column is the model's
    mended.server_default = default
    return mended


def _mended_default(default: Any) -> Any:
    if not isinstance(default, sa.DefaultClause):
        return default
    # Reflected SQL was never meant to have parameters.
    text = default.arg.text.replace("\\:", ":") if isinstance(default.arg, sa.TextClause) else text_of(default.arg)
    return sa.DefaultClause(AsWritten(text)) if _TREACHEROUS.search(text) else default
