"""The SQL of :class:`~sqlaqueue.alembic.operations.AddColumns`: columns for a table with rows, without rewriting it.

PostgreSQL stores a constant default once, as the value of every existing row. So one status for all existing rows is
such a default, replaced in the same transaction by the default for new rows. A status that depends on the row is NULL
at first, which is no status, and is filled in afterwards.
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

from sqlaqueue.alembic.operations.lock_retries import in_batches
from sqlaqueue.alembic.operations.tables import AddColumns, DropColumns
from sqlaqueue.postgresql.ddl import SqlTemplate, bare_table, server_default_sql
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.sql.types import NEUTRAL

_NOT_NULL = "sqlaqueue_not_null"


@dataclass
class Backfill:
    """The statements that fill in a status that depends on the row."""

    at_once: Sequence[DDLElement] = ()
    """For a migration in one transaction."""
    batches: DDLElement | None = None
    """For a table in use, followed by ``not_null``."""
    not_null: Sequence[tuple[bool, DDLElement]] = ()
    """Makes the column NOT NULL without a long lock; True marks a statement that needs a strong lock for a moment."""


class AddColumn(DDLElement):
    """Adds one column if it does not exist."""

    inherit_cache = False

    def __init__(self, table: sa.Table, column: sa.Column[Any]) -> None:
        self.table = table
        self.column = column


@compiles(AddColumn, "postgresql")
def _add_column(element: AddColumn, compiler: Any, **_: Any) -> str:
    table = compiler.preparer.format_table(element.table)
    return f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {compiler.get_column_specification(element.column)}"


def add_columns(operation: AddColumns) -> tuple[list[DDLElement], Backfill]:
    """Return the statements that add the columns in one transaction, and those that follow.

    :raises CommandError: when the migration does not give the status of the existing rows.
    """
    check_existing_rows(operation)
    table = bare_table(operation.table, operation.schema)
    status: sa.Column[Any] | None = None
    statements: list[DDLElement] = []
    backfill = Backfill()
    for given in operation.columns:
        column = given._copy()  # noqa: SLF001 - the public copy() was removed; a column belongs to one table
        added = column
        if column.name == operation.status:
            status, added = column, column._copy()  # noqa: SLF001 - as above
            by_row = isinstance(operation.existing_rows, sa.TextClause)
            added.server_default = None if by_row else sa.DefaultClause(_literal(operation, column))
            added.nullable = by_row or column.nullable
        table.append_column(added)
        statements.append(AddColumn(table, added))
    if status is not None:
        statements.append(_set_default(table, status))
        if isinstance(operation.existing_rows, sa.TextClause):
            backfill = _backfill(table, status, operation.existing_rows.text)
    return statements, backfill


def check_existing_rows(operation: AddColumns) -> None:
    """Refuse a migration that does not give the status of the existing rows.

    :raises CommandError: with the possible answers.
    """
    call = f"op.add_queue_columns({operation.table!r}"
    missing = operation.existing_rows is ... or (operation.status is not None and operation.existing_rows is None)
    if missing and operation.status is not None:
        raise CommandError(
            f"{call}): the table may have rows; give their status in this migration, in place of existing_rows=... . "
            'existing_rows="completed" runs none of them, "pending" runs all; '
            "sa.text(\"CASE WHEN sent_at IS NULL THEN 'pending' ELSE 'completed' END\") decides for each row"
            f"{_finished_at_hint(operation)}"
        )
    if missing:
        raise CommandError(
            f"{call}): this queue has no status, so each row of the table is a job, and all existing rows will run. "
            'To let them run, write existing_rows="pending" in place of ...; if they must not run, move them to '
            "another table first, or keep a status"
        )
    if operation.status is None and operation.existing_rows not in {None, "pending"}:
        raise CommandError(
            f"{call}, existing_rows={operation.existing_rows!r}): a queue without a status cannot store one; "
            'give existing_rows="pending", which says that all rows of the table are jobs to run'
        )


def _finished_at_hint(operation: AddColumns) -> str:
    """Return the part of the message that explains how existing rows get a ``finished_at``."""
    name = "finished_at"
    if name not in {column.name for column in operation.columns}:
        return ""
    quote = NEUTRAL.identifier_preparer.quote
    table = NEUTRAL.identifier_preparer.format_table(bare_table(operation.table, operation.schema))
    statement = f"UPDATE {table} SET {name} = now() WHERE {quote(str(operation.status))} = 'completed'"  # noqa: S608 - shown only
    return (
        f". Existing rows that are finished have no {name}, so retention and purge(older_than=...) do not delete them. "
        f'To have them deleted, add op.execute("{statement}") after this call, or use a column with the actual time '
        "instead of now()"
    )


def _literal(operation: AddColumns, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    try:
        return sa.literal_column(literal_text(operation.existing_rows, column.type))
    except (TypeError, ValueError, LookupError, StatementError) as error:
        msg = (
            f"op.add_queue_columns({operation.table!r}, existing_rows={operation.existing_rows!r}): the column "
            f"{column.name} cannot store this value; give one of its values, or sa.text() with an expression"
        )
        raise CommandError(msg) from error


def _set_default(table: sa.Table, status: sa.Column[Any]) -> DDLElement:
    name, default = NEUTRAL.identifier_preparer.quote(status.name), server_default_sql(status)
    return SqlTemplate(f"ALTER TABLE {{table}} ALTER COLUMN {name} SET DEFAULT {default}", table=table)


def _backfill(table: sa.Table, status: sa.Column[Any], expression: str) -> Backfill:
    name = NEUTRAL.identifier_preparer.quote(status.name)
    update = f"UPDATE {{table}} SET {name} = ({expression}) WHERE {name} IS NULL"  # noqa: S608 - the migration's own SQL
    rows = f"SELECT ctid FROM {{table}} WHERE {name} IS NULL AND {{batch}} FOR NO KEY UPDATE SKIP LOCKED"  # noqa: S608 - as above
    remaining = f"EXISTS (SELECT FROM {{table}} WHERE {name} IS NULL)"

    def alter(action: str) -> SqlTemplate:
        return SqlTemplate(f"ALTER TABLE {{table}} {action}", table=table)

    set_not_null = alter(f"ALTER COLUMN {name} SET NOT NULL")
    drop = f"DROP CONSTRAINT IF EXISTS {_NOT_NULL}"
    add = f"ADD CONSTRAINT {_NOT_NULL} CHECK ({name} IS NOT NULL) NOT VALID"
    # SET NOT NULL does not read the rows if a valid constraint proves it, and VALIDATE needs a weak lock only.
    not_null = [
        (True, alter(f"{drop}, {add}")),
        (False, alter(f"VALIDATE CONSTRAINT {_NOT_NULL}")),
        (True, set_not_null),
        (True, alter(drop)),
    ]
    return Backfill(
        at_once=[SqlTemplate(update, table=table), *([] if status.nullable else [set_not_null])],
        batches=in_batches(f"{update} AND ctid = ANY (ARRAY({rows}))", remaining, table=table),
        not_null=[] if status.nullable else not_null,
    )


def drop_columns(operation: DropColumns) -> DDLElement:
    """Return the statement that drops the columns."""
    quote = NEUTRAL.identifier_preparer.quote
    drops = ", ".join(f"DROP COLUMN IF EXISTS {quote(name)}" for name in operation.columns)
    return SqlTemplate(f"ALTER TABLE {{table}} {drops}", table=bare_table(operation.table, operation.schema))
