"""How the columns of a queue come to a table that has rows: without rewriting it, and without a guess about them.

A column with a constant default costs nothing, however many rows there are: PostgreSQL notes the default once, as the
value of every row before it. So the state of all existing rows is one such default, replaced in the same transaction
by the one for new rows. A state that depends on the row begins as NULL, which is no state, and is filled in
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement

from sqlaqueue.alembic.operations import AddColumns, DropColumns
from sqlaqueue.alembic.sql import Statement, default_of, in_batches, stand_in
from sqlaqueue.postgresql.ddl import NEUTRAL
from sqlaqueue.queue.roles import literal_text

PAGES = 64
_NOT_NULL = "sqlaqueue_not_null"


@dataclass
class Rest:
    """What remains to be done when the columns are there, at once or in steps."""

    at_once: Sequence[DDLElement] = ()
    batches: DDLElement | None = None
    constrain: Sequence[tuple[bool, DDLElement]] = ()
    """What makes the column NOT NULL without a long lock, and whether it needs a strong one for a moment."""


class AddColumn(DDLElement):
    """Adds one column if it is not there."""

    inherit_cache = False

    def __init__(self, table: sa.Table, column: sa.Column[Any]) -> None:
        self.table = table
        self.column = column


@compiles(AddColumn, "postgresql")
def _add_column(element: AddColumn, compiler: Any, **_: Any) -> str:
    table = compiler.preparer.format_table(element.table)
    return f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {compiler.get_column_specification(element.column)}"


def add_columns(this: AddColumns) -> tuple[list[DDLElement], Rest]:
    """Return what adds the columns, to be done in one transaction, and what remains then.

    :raises CommandError: when the migration does not say what the rows are that are there already.
    """
    check_answer(this)
    table = stand_in(this.table, this.schema)
    status: sa.Column[Any] | None = None
    first: list[DDLElement] = []
    rest = Rest()
    for given in this.columns:
        column = given._copy()  # noqa: SLF001 - the public copy() was taken away; a column belongs to one table
        added = column
        if column.name == this.status:
            status, added = column, column._copy()  # noqa: SLF001 - as above
            by_row = isinstance(this.existing_rows, sa.TextClause)
            added.server_default = None if by_row else sa.DefaultClause(_literal(this, column))
            added.nullable = by_row or column.nullable
        table.append_column(added)
        first.append(AddColumn(table, added))
    if status is not None:
        first.append(_default_for_new_rows(table, status))
        if isinstance(this.existing_rows, sa.TextClause):
            rest = _fill(table, status, this.existing_rows.text)
    return first, rest


def check_answer(this: AddColumns) -> None:
    """Refuse a migration whose writer has not said what the rows are that are there already.

    :raises CommandError: with what can be said.
    """
    call = f"op.add_queue_columns({this.table!r}"
    asked = this.existing_rows is ... or (this.status is not None and this.existing_rows is None)
    if asked and this.status is not None:
        raise CommandError(
            f"{call}): say in this migration what state the rows are in that are in the table already, in place of "
            'existing_rows=... . existing_rows="completed" runs none of them, "pending" all; '
            "sa.text(\"CASE WHEN sent_at IS NULL THEN 'pending' ELSE 'completed' END\") tells it from each row"
            f"{_since_when(this)}"
        )
    if asked:
        raise CommandError(
            f"{call}): this queue has no status, so each row of the table is a job, "
            'and all that are there will run. If that is meant, write existing_rows="pending" in place of ...; '
            "if not, move them to another table before, or keep a status"
        )
    if this.status is None and this.existing_rows not in {None, "pending"}:
        raise CommandError(
            f"{call}, existing_rows={this.existing_rows!r}): a queue without a status has no place for a state; "
            'existing_rows="pending" says that all rows of the table are jobs to run'
        )


def _since_when(this: AddColumns) -> str:
    """Return what to do about rows that were finished before anybody noted when."""
    name = "finished_at"
    if name not in {column.name for column in this.columns}:
        return ""
    quote = NEUTRAL.identifier_preparer.quote
    table = NEUTRAL.identifier_preparer.format_table(stand_in(this.table, this.schema))
    statement = f"UPDATE {table} SET {name} = now() WHERE {quote(str(this.status))} = 'completed'"  # noqa: S608 - shown only
    return (
        f". Rows that are finished already have no {name}: retention and a purge by age leave them where they are. "
        f'If they are to go some day, write behind it op.execute("{statement}"), or with a column that knows better '
        "than now()"
    )


def _literal(this: AddColumns, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    try:
        return sa.literal_column(literal_text(this.existing_rows, column.type))
    except (TypeError, ValueError, LookupError, StatementError) as error:
        msg = (
            f"op.add_queue_columns({this.table!r}, existing_rows={this.existing_rows!r}): the column {column.name} "
            "cannot hold that; give one of its values, or sa.text() with an expression"
        )
        raise CommandError(msg) from error


def _default_for_new_rows(table: sa.Table, status: sa.Column[Any]) -> DDLElement:
    name = NEUTRAL.identifier_preparer.quote(status.name)
    return Statement(f"ALTER TABLE {{table}} ALTER COLUMN {name} SET DEFAULT {default_of(status)}", table=table)


def _fill(table: sa.Table, status: sa.Column[Any], expression: str) -> Rest:
    name = NEUTRAL.identifier_preparer.quote(status.name)
    fill = f"UPDATE {{table}} SET {name} = ({expression}) WHERE {name} IS NULL"  # noqa: S608 - the migration says what to do
    locked = f"SELECT ctid FROM {{table}} WHERE {name} IS NULL AND {{batch}} FOR NO KEY UPDATE SKIP LOCKED"  # noqa: S608 - as above
    batch = f"{fill} AND ctid = ANY (ARRAY({locked}))"
    left = f"EXISTS (SELECT FROM {{table}} WHERE {name} IS NULL)"
    alter = "ALTER TABLE {table}"
    not_null = Statement(f"{alter} ALTER COLUMN {name} SET NOT NULL", table=table)
    drop = f"DROP CONSTRAINT IF EXISTS {_NOT_NULL}"
    return Rest(
        at_once=[Statement(fill, table=table), *([] if status.nullable else [not_null])],
        batches=in_batches(batch, left, pages=PAGES, table=table),
        # Proved by a constraint that is validated under a weak lock, SET NOT NULL does not look at the rows.
        constrain=[]
        if status.nullable
        else [
            (
                True,
                Statement(
                    f"{alter} {drop}, ADD CONSTRAINT {_NOT_NULL} CHECK ({name} IS NOT NULL) NOT VALID", table=table
                ),
            ),
            (False, Statement(f"{alter} VALIDATE CONSTRAINT {_NOT_NULL}", table=table)),
            (True, not_null),
            (True, Statement(f"{alter} {drop}", table=table)),
        ],
    )


def drop_columns(this: DropColumns) -> DDLElement:
    """Return the statement that drops the columns."""
    quote = NEUTRAL.identifier_preparer.quote
    drops = ", ".join(f"DROP COLUMN IF EXISTS {quote(name)}" for name in this.columns)
    return Statement(f"ALTER TABLE {{table}} {drops}", table=stand_in(this.table, this.schema))
