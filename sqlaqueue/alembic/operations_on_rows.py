"""The two operations that depend on the rows of a table: new columns of a queue, and its unique index."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import sqlalchemy as sa
from alembic.operations import MigrateOperation, Operations
from alembic.operations import ops as alembic_ops
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.elements import conv

from sqlaqueue.alembic.implementations import (
    RetryingTransaction,
    autocommit,
    connection_of,
    drop_concurrently,
    execute,
    in_batches,
)
from sqlaqueue.alembic.operations import NOT_RENDERED, DropColumns, DropIndex, QueueOp
from sqlaqueue.postgresql.catalog_indexes import index_validity
from sqlaqueue.postgresql.ddl import SqlTemplate, bare_table, literal_sql, server_default_sql
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.sql.engine import UNIQUE_VIOLATION, sqlstate, violated_constraint
from sqlaqueue.sql.types import NEUTRAL, object_name

# -- columns -----------------------------------------------------------------------------------------------------------
# Columns are added without rewriting the table. PostgreSQL stores a constant default once, as the value of every
# existing row. So one status for all existing rows is such a default, replaced in the same transaction by the default
# for new rows. A status that depends on the row is NULL at first, which is no status, and is filled in afterwards.


class AddColumns(QueueOp, name="add_queue_columns"):
    """Adds the columns of a queue to a table with rows, without rewriting the table.

    :param table: the table.
    :param columns: the columns.
    :param status: the name of the status column, if it is among them.
    :param existing_rows: the status of the existing rows: a value of the column, such as ``"completed"``, or
        ``sa.text()`` with an expression over the table's columns. There is no default, since it would be a guess about
        the data: ``"pending"`` makes all existing rows run.
    :param live: the table is in use. Add the columns in a transaction of their own, wait for their lock in many short
        attempts, and write the status of an expression in batches.
    """

    table: str
    columns: list[sa.Column[Any]]
    _: KW_ONLY
    status: str | None = None
    existing_rows: Any = None
    schema: str | None = None
    live: bool = False

    def implement(self, op: Operations) -> None:
        if op.get_context().dialect.name != "postgresql":
            _add_columns_elsewhere(op, self)
            return
        statements, backfill = _add_columns(self)
        table = bare_table(self.table, self.schema)
        add = RetryingTransaction(table, statements)
        if not self.live:
            execute(op, [add, *backfill.at_once])
            return
        steps: list[DDLElement] = [add]
        if backfill.batches is not None:
            steps.append(backfill.batches)
            steps += [RetryingTransaction(table, [each]) if locks else each for locks, each in backfill.not_null]
        with autocommit(op):
            execute(op, steps)

    def reverse(self) -> DropColumns:
        names = [column.name for column in self.columns]
        return DropColumns(self.table, names, schema=self.schema, live=self.live, undo=self)


_NOT_NULL = "sqlaqueue_not_null"


@dataclass
class _Backfill:
    """The statements that fill in a status that depends on the row."""

    at_once: Sequence[DDLElement] = ()
    """For a migration in one transaction."""
    batches: DDLElement | None = None
    """For a table in use, followed by ``not_null``."""
    not_null: Sequence[tuple[bool, DDLElement]] = ()
    """Makes the column NOT NULL without a long lock; True marks a statement that needs a strong lock for a moment."""


class _AddColumn(DDLElement):
    inherit_cache = False

    def __init__(self, table: sa.Table, column: sa.Column[Any]) -> None:
        self.table = table
        self.column = column


@compiles(_AddColumn, "postgresql")
def _render_column(element: _AddColumn, compiler: Any, **_: Any) -> str:
    table = compiler.preparer.format_table(element.table)
    return f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {compiler.get_column_specification(element.column)}"


def _add_columns(operation: AddColumns) -> tuple[list[DDLElement], _Backfill]:
    """Return the statements that add the columns in one transaction, and those that follow.

    :raises CommandError: when the migration does not give the status of the existing rows.
    """
    _check_existing_rows(operation)
    table = bare_table(operation.table, operation.schema)
    status: sa.Column[Any] | None = None
    statements: list[DDLElement] = []
    backfill = _Backfill()
    for given in operation.columns:
        column = given._copy()  # noqa: SLF001 - the public copy() was removed; a column belongs to one table
        added = column
        if column.name == operation.status:
            status, added = column, column._copy()  # noqa: SLF001 - a column belongs to one table
            by_row = isinstance(operation.existing_rows, sa.TextClause)
            added.server_default = None if by_row else sa.DefaultClause(_literal(operation, column))
            added.nullable = by_row or column.nullable
        table.append_column(added)
        statements.append(_AddColumn(table, added))
    if status is not None:
        name, default = NEUTRAL.identifier_preparer.quote(status.name), server_default_sql(status)
        set_default = f"ALTER TABLE {{table}} ALTER COLUMN {name} SET DEFAULT {default}"
        statements.append(SqlTemplate(set_default, table=table))
        if isinstance(operation.existing_rows, sa.TextClause):
            backfill = _backfill(table, status, operation.existing_rows.text)
    return statements, backfill


def _add_columns_elsewhere(op: Operations, operation: AddColumns) -> None:
    """Add the columns on SQLite or MariaDB; a table of SQLite is copied if a default is an expression."""
    _check_existing_rows(operation)
    with op.batch_alter_table(operation.table, schema=operation.schema) as batch:
        for column in operation.columns:
            batch.add_column(column._copy())  # noqa: SLF001 - the public copy() was removed; a column belongs to one table
    for column in operation.columns:
        if column.name == operation.status:
            rows = operation.existing_rows
            is_text = isinstance(rows, sa.TextClause)
            value = sa.literal_column(f"({rows.text})") if is_text else _literal(operation, column)
            table = sa.table(operation.table, sa.column(column.name), schema=operation.schema)
            op.execute(sa.update(table).values({column.name: value}))


def _check_existing_rows(operation: AddColumns) -> None:
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


def _backfill(table: sa.Table, status: sa.Column[Any], expression: str) -> _Backfill:
    name = NEUTRAL.identifier_preparer.quote(status.name)
    update = f"UPDATE {{table}} SET {name} = ({expression}) WHERE {name} IS NULL"  # noqa: S608 - the migration's own SQL
    rows = f"SELECT ctid FROM {{table}} WHERE {name} IS NULL AND {{batch}} FOR NO KEY UPDATE SKIP LOCKED"  # noqa: S608 - the migration's own SQL
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
    return _Backfill(
        at_once=[SqlTemplate(update, table=table), *([] if status.nullable else [set_not_null])],
        batches=in_batches(f"{update} AND ctid = ANY (ARRAY({rows}))", remaining, table=table),
        not_null=[] if status.nullable else not_null,
    )


class CreateUniqueIndex(QueueOp, name="create_queue_unique_index"):
    """Creates the unique index of a queue, unless the table has jobs with the same values (duplicates).

    The table is searched for duplicates first, which blocks no other transaction.

    :param columns: the names of columns, and ``sa.text()`` with an expression.
    :param where: the predicate, as SQL: which jobs count.
    :param keys: the columns of the primary key, by which the error message shows duplicates.
    :param nulls_distinct: whether jobs with a NULL in one of the columns are never duplicates.
    :param options: further arguments of SQLAlchemy's Index, such as ``{"postgresql_with": {"fillfactor": "70"}}``.
    :param replace: the table has an index of this name, which is dropped.
    :param live: the table is in use. Create the index CONCURRENTLY, outside of the migration's transaction; an index to
        replace is dropped when the new one is complete.
    """

    index: str
    table: str
    columns: list[Any]
    _: KW_ONLY
    where: str | None = None
    keys: list[str]
    nulls_distinct: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    replace: bool = False
    schema: str | None = None
    live: bool = False
    former: CreateUniqueIndex | None = field(default=None, metadata=NOT_RENDERED)

    def implement(self, op: Operations) -> None:
        table = bare_table(self.table, self.schema)
        if self.live:
            with autocommit(op):
                _build_concurrently(op, self, table)
            return
        _refuse_duplicates(op, self, table)
        if self.replace:
            op.drop_index(conv(self.index), table.name, schema=table.schema, if_exists=True)
        _build(op, self, self.index)

    def reverse(self) -> MigrateOperation:
        if self.former is not None:
            return dataclasses.replace(self.former, replace=True, former=self)
        if self.live:
            return DropIndex(self.index, self.table, schema=self.schema, undo=self)
        return alembic_ops.DropIndexOp(conv(self.index), self.table, schema=self.schema)


def duplicates_query(operation: CreateUniqueIndex) -> str:
    """Return the SELECT of all duplicates, with ``{table}`` in place of the table's name."""
    quote = NEUTRAL.identifier_preparer.quote
    values = _values(operation)
    keys = [quote(key) for key in operation.keys]
    key = keys[0] if len(keys) == 1 else f"({', '.join(keys)})"
    conditions = [] if operation.where is None else [f"({operation.where})"]
    if operation.nulls_distinct:
        conditions += [f"{value} IS NOT NULL" for value in values]
    lines = [
        f"SELECT {', '.join(values)}, count(*), array_agg({key} ORDER BY {', '.join(keys)})",
        "FROM {table}",
        *([f"WHERE {' AND '.join(conditions)}"] if conditions else []),
        f"GROUP BY {', '.join(values)}",
        "HAVING count(*) > 1",
    ]
    return "\n".join(lines)


def duplicates_message(operation: CreateUniqueIndex) -> str:
    """Return the error message about duplicates, with ``{table}`` in place of the table's name."""
    return (
        f"{{table}}: the unique index {operation.index} cannot be created, because there are jobs with equal "
        f"{', '.join(_values(operation))}. Cancel or delete all but one of each, and run the migration again. This "
        f"query shows them:\n\n{duplicates_query(operation)};"
    )


def duplicates_check(operation: CreateUniqueIndex) -> str:
    """Return a statement that raises ``unique_violation`` if there are duplicates; ``{table}`` is the table's name."""
    # In PL/pgSQL, so that a script (--sql) contains the check as well. FOUND is a variable there, and may be a column.
    return f"""\
DO $sqlaqueue_do$
#variable_conflict use_column
BEGIN
  IF EXISTS (
{duplicates_query(operation)}
  ) THEN
    RAISE unique_violation USING MESSAGE = $sqlaqueue_text${duplicates_message(operation)}$sqlaqueue_text$;
  END IF;
END
$sqlaqueue_do$"""


def _values(operation: CreateUniqueIndex) -> list[str]:
    quote = NEUTRAL.identifier_preparer.quote
    return [quote(each) if isinstance(each, str) else literal_sql(each) for each in operation.columns]


def _build_concurrently(op: Operations, operation: CreateUniqueIndex, table: sa.Table) -> None:
    """Build the index beside the one that it replaces: until then, enqueue() needs that one."""
    connection = connection_of(op)
    name = object_name(operation.index, "new") if operation.replace else operation.index
    valid = None if connection is None else index_validity(connection, table, name)
    if not valid:
        _refuse_duplicates(op, operation, table)
        if valid is False:
            drop_concurrently(op, name, table)
        try:
            _build(op, operation, name, postgresql_concurrently=True)
        except CommandError:
            # An invalid index would still refuse duplicates.
            drop_concurrently(op, name, table)
            raise
    if operation.replace:
        schema = operation.schema
        index, built = bare_table(operation.index, schema), bare_table(name, schema)
        # A dialect that doubles percent signs would double them once more than the template does.
        quoted = NEUTRAL.identifier_preparer.quote(operation.index)
        swap = [
            SqlTemplate("DROP INDEX IF EXISTS {index}", index=index),
            SqlTemplate(f"ALTER INDEX {{built}} RENAME TO {quoted}", built=built),
        ]
        execute(op, [RetryingTransaction(table, swap)])


def _refuse_duplicates(op: Operations, operation: CreateUniqueIndex, table: sa.Table) -> None:
    try:
        op.execute(SqlTemplate(duplicates_check(operation), table=table))
    except DBAPIError as error:
        if sqlstate(error) != UNIQUE_VIOLATION:
            raise
        raise _duplicates(op, operation) from error


def _build(op: Operations, operation: CreateUniqueIndex, name: str, **options: Any) -> None:
    if not operation.nulls_distinct:
        options["postgresql_nulls_not_distinct"] = True
    try:
        op.create_index(
            conv(name),
            operation.table,
            operation.columns,
            unique=True,
            schema=operation.schema,
            postgresql_where=None if operation.where is None else sa.literal_column(operation.where),
            **operation.options,
            **options,
        )
    except DBAPIError as error:
        if sqlstate(error) != UNIQUE_VIOLATION or violated_constraint(error) != name:
            raise
        # Duplicates that were inserted after the search.
        raise _duplicates(op, operation) from error


def _duplicates(op: Operations, operation: CreateUniqueIndex) -> CommandError:
    connection = connection_of(op)
    options = {} if connection is None else connection.get_execution_options()
    schemas = options.get("schema_translate_map") or {}
    table = bare_table(operation.table, schemas.get(operation.schema, operation.schema))
    # With this paramstyle no percent sign of a name is doubled.
    make_dialect: Any = type(op.get_context().dialect)
    name = make_dialect(paramstyle="named").identifier_preparer.format_table(table)
    return CommandError(duplicates_message(operation).replace("{table}", name))
