"""The operations of queues, as ``op.create_queue_triggers()`` and others, each with its reverse."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.autogenerate.render import _render_column, render_op, renderers
from alembic.operations import MigrateOperation, Operations
from alembic.operations import ops as alembic_ops
from alembic.operations.ops import OpContainer
from alembic.util import CommandError
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler
from sqlalchemy.sql.elements import conv

from sqlaqueue.postgresql.ddl import SqlTemplate, bare_table, literal_sql, server_default_sql
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.sql.types import NEUTRAL

# -- operations --------------------------------------------------------------------------------------------------------
# The operations of queues, as ``op.create_queue_triggers()`` and others, each with its reverse.
#
# A migration must do the same in two years, with any version of the models and of this library. So an operation
# carries everything that it writes: the text of a function, columns, conditions.
#
# ``schema`` is the schema of all tables and functions that an operation names, None for the default one.


__all__ = [
    "AddColumns",
    "CreateEnum",
    "CreateFunction",
    "CreateIndex",
    "CreateTriggers",
    "CreateUniqueIndex",
    "DropColumns",
    "DropEnum",
    "DropFunction",
    "DropIndex",
    "DropTriggers",
    "EmptyMessages",
    "ExecuteVerbatim",
    "FillMessages",
    "LockTables",
    "OperationList",
    "PerDirection",
    "QueueOp",
    "ReleaseJobs",
    "SetStorageParameters",
    "TriggerDefinition",
    "trigger_definition",
]


# -- base --------------------------------------------------------------------------------------------------------------
# The base of all operations, and the containers that give a downgrade other operations than the reverse.


Q = TypeVar("Q", bound="QueueOp")

NOT_RENDERED = {"not_rendered": True}
"""Metadata of a dataclass field that only :meth:`QueueOp.reverse` needs: it is not written into migrations."""


class QueueOp(MigrateOperation):
    """Base of the operations: a dataclass whose fields are the arguments of ``op.<name>()``."""

    name: ClassVar[str]

    @classmethod
    def invoke(cls, operations: Operations, *args: Any, **kw: Any) -> Any:
        """Run the operation; ``op.<name>(...)`` calls this."""
        return operations.invoke(cls(*args, **kw))

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return the difference that ``alembic check`` prints."""
        return (self.name, *(getattr(self, each.name) for each in self.rendered_fields()))

    @classmethod
    def rendered_fields(cls) -> list[Field[Any]]:
        """Return the fields that are written into migrations."""
        return [each for each in fields(cls) if not each.metadata.get("not_rendered")]  # type: ignore[arg-type] # every subclass is a dataclass


def registered_as(name: str) -> Callable[[type[Q]], type[Q]]:
    """Register an operation as ``op.<name>``."""

    def register(cls: type[Q]) -> type[Q]:
        cls.name = name
        return Operations.register_operation(name, "invoke")(cls)

    return register


class OperationList(OpContainer):
    """Several operations in place of one."""

    def reverse(self) -> OperationList:
        """Return the reverse of each operation, last first."""
        return OperationList([op.reverse() for op in reversed(self.ops)])


class PerDirection(OpContainer):
    """Operations of the upgrade and others of the downgrade, which do not undo each other."""

    def __init__(self, up: Sequence[MigrateOperation] = (), down: Sequence[MigrateOperation] = ()) -> None:
        super().__init__(up)
        self.down = down

    def reverse(self) -> PerDirection:
        """Return the operations with both directions exchanged."""
        return PerDirection(self.down, self.ops)


# -- lock retries ------------------------------------------------------------------------------------------------------
# Statements that a server repeats until they can have their locks: DO blocks.
#
# The loop is part of the SQL, so that a script (``--sql``) contains it as well.


LOCK_TIMEOUT = 0.5
"""How long one attempt to lock a table waits, in seconds."""

ATTEMPTS = 120

PAGES_PER_BATCH = 64
"""How many pages of a table one batch reads: few enough for a writer to wait for it."""


class RetryingTransaction(DDLElement):
    """Statements that need strong locks, in one transaction of the server.

    Each lock is waited for no longer than ``lock_timeout``, since all other statements on the table wait behind this
    one. If a lock is not free in time, all locks are released and the transaction is tried again, ``attempts`` times.

    :param table: the table that the error message names.
    """

    inherit_cache = False

    def __init__(
        self,
        table: sa.Table,
        statements: Sequence[DDLElement],
        *,
        lock_timeout: float = LOCK_TIMEOUT,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.table = table
        self.statements = statements
        self.milliseconds = max(1, round(lock_timeout * 1000))
        self.attempts = attempts


@compiles(RetryingTransaction, "postgresql")
def _render(element: RetryingTransaction, compiler: DDLCompiler, **_: Any) -> str:
    statements = "\n".join(f"      {compiler.process(statement)};" for statement in element.statements)
    table = compiler.preparer.format_table(element.table)
    return f"""\
DO $sqlaqueue_do$
DECLARE
  sqlaqueue_before text := current_setting('lock_timeout');
BEGIN
  FOR sqlaqueue_attempt IN 1 .. {element.attempts} LOOP
    BEGIN
      PERFORM set_config('lock_timeout', '{element.milliseconds}ms', true);
{statements}
      PERFORM set_config('lock_timeout', sqlaqueue_before, true);
      RETURN;
    EXCEPTION WHEN lock_not_available THEN
      NULL;
    END;
    PERFORM pg_sleep(0.2 + random() * 0.3);
  END LOOP;
  RAISE lock_not_available USING
    MESSAGE = $sqlaqueue_text$table {table} was locked by others at each of {element.attempts} attempts$sqlaqueue_text$,
    HINT = 'pg_stat_activity shows the open transactions; run the migration again when they have ended';
END
$sqlaqueue_do$"""


def in_batches(work: str, remaining: str, **tables: sa.Table) -> SqlTemplate:
    """Return a DO block that executes ``work`` on a few pages of ``{table}`` at a time, and commits after each.

    It must run outside of a transaction.

    :param work: a statement that skips rows locked by others; ``{batch}`` in it is the condition that a row is in the
        pages of the current batch.
    :param remaining: the condition that work remains. While it is true, the block reads the whole table again.
    """
    batch = "ctid >= sqlaqueue_from AND ctid < sqlaqueue_to"
    text = f"""\
DO $sqlaqueue_do$
#variable_conflict use_column
DECLARE
  sqlaqueue_page bigint;
  sqlaqueue_pages bigint;
  sqlaqueue_from tid;
  sqlaqueue_to tid;
BEGIN
  WHILE {remaining} LOOP
    SELECT coalesce(max(pg_relation_size(relid)), pg_relation_size({{table:literal}}))
        / current_setting('block_size')::bigint
      INTO sqlaqueue_pages FROM pg_partition_tree({{table:literal}});
    sqlaqueue_page := 0;
    WHILE sqlaqueue_page <= sqlaqueue_pages LOOP
      sqlaqueue_from := '(' || sqlaqueue_page || ',0)';
      sqlaqueue_page := sqlaqueue_page + {PAGES_PER_BATCH};
      sqlaqueue_to := '(' || sqlaqueue_page || ',0)';
      {work.replace("{batch}", batch)};
      COMMIT;
    END LOOP;
    PERFORM pg_sleep(0.1);
  END LOOP;
END
$sqlaqueue_do$"""  # noqa: S608 - all parts come from the migration itself
    return SqlTemplate(text, **tables)


# -- jobs and messages -------------------------------------------------------------------------------------------------
# Operations on the rows of a queue: its locks, its running jobs and its messages.


@registered_as("lock_queue_tables")
@dataclass(eq=False)
class LockTables(QueueOp):
    """Locks tables in ACCESS EXCLUSIVE mode until the migration commits, in many short attempts.

    A consumer may hold a batch in an open transaction. A plain LOCK would wait for it, and every other statement on the
    table would wait behind the LOCK.

    :param lock_timeout: the duration of one attempt, in seconds.
    :param attempts: the number of attempts before the migration fails.
    """

    tables: list[str]
    schema: str | None = field(default=None, kw_only=True)
    lock_timeout: float = field(default=LOCK_TIMEOUT, kw_only=True)
    attempts: int = field(default=ATTEMPTS, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Return nothing: the lock ends with the transaction."""
        return OperationList()


@registered_as("release_queue_jobs")
@dataclass(eq=False)
class ReleaseJobs(QueueOp):
    """Releases jobs that run under a lease, for a strategy that has no leases and would never rescue them.

    The consumers that hold them can no longer settle these runs; the writes of their handlers are rolled back.

    :param where: the condition that a job runs under a lease.
    :param values: column to SQL expression.
    """

    table: str
    values: dict[str, str]
    where: str = field(kw_only=True)
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Return nothing: a pending job is pending under every strategy."""
        return OperationList()


@registered_as("empty_queue_messages")
@dataclass(eq=False)
class EmptyMessages(QueueOp):
    """Deletes all messages of a queue before their table gets other columns; they are written again afterwards."""

    messages: str
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Return nothing: the messages are written again in both directions."""
        return OperationList()


@registered_as("fill_queue_messages")
@dataclass(eq=False)
class FillMessages(QueueOp):
    """Writes a message for each pending job that has none.

    :param messages: the message table.
    :param keys: the columns of the primary key.
    :param order: the columns by which claims are ordered.
    :param where: the condition that a job is pending.
    :param live: the table is in use. Write the messages in batches, each in a transaction of its own.
    """

    table: str
    messages: str
    keys: list[str] = field(kw_only=True)
    order: list[str] = field(kw_only=True)
    where: str = field(kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Return nothing: the messages are dropped with their table."""
        return OperationList()


# -- render ------------------------------------------------------------------------------------------------------------
# How operations are written into a migration: as a call of ``op``, with long arguments on lines of their own.


IMPORT = "import sqlaqueue.alembic"
"""Written into each migration with such operations: it must run even if ``env.py`` no longer has the import."""

_WIDTH = 100
_INDENT = "    "


@renderers.dispatch_for(OperationList)
@renderers.dispatch_for(PerDirection)
def _render_container(context: AutogenContext, container: OperationList | PerDirection) -> list[str]:
    return [line for op in container.ops for line in render_op(context, op)]


@renderers.dispatch_for(QueueOp)
def _render_call(context: AutogenContext, op: QueueOp) -> str:
    context.imports.add(IMPORT)
    prefix = context.opts["alembic_module_prefix"] or ""
    arguments = []
    for each in op.rendered_fields():
        value = getattr(op, each.name)
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        if each.kw_only and default is not MISSING and value == default:
            continue
        text = render_value(context, value)
        arguments.append(f"{each.name}={text}" if each.kw_only else text)
    return f"{prefix}{op.name}({_join(arguments)})"


def render_value(context: AutogenContext, value: Any) -> str:  # noqa: PLR0911 - one for each kind of value
    """Return a value as Python source."""
    if value is ...:
        return "..."
    if isinstance(value, str):
        return _render_text(str(value))
    if isinstance(value, sa.Column):
        return str(_render_column(value, context))
    if isinstance(value, sa.TextClause):
        return f"{context.opts['sqlalchemy_module_prefix'] or ''}text({value.text!r})"
    if isinstance(value, dict):
        items = [f"{render_value(context, key)}: {render_value(context, each)}" for key, each in value.items()]
        return f"{{{_join(items)}}}"
    if isinstance(value, list):
        return f"[{_join([render_value(context, each) for each in value])}]"
    if isinstance(value, tuple):
        return f"({_join([render_value(context, each) for each in value])})"
    return repr(value)


def _join(items: Sequence[str]) -> str:
    """Return items on one line, or on lines of their own if they are too long for one."""
    line = ", ".join(items)
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    return "\n" + "".join(f"{textwrap.indent(item, _INDENT)},\n" for item in items)


def _render_text(text: str) -> str:
    if "\n" not in text:
        return repr(text)
    # One literal a line: Alembic indents the lines of a migration, which must not change the text itself.
    return "(\n" + "".join(f"{_INDENT}{line!r}\n" for line in text.splitlines(keepends=True)) + ")"


# -- tables ------------------------------------------------------------------------------------------------------------
# Operations on the columns, indexes, storage parameters and enum types of queues.


@registered_as("set_storage_parameters")
@dataclass(eq=False)
class SetStorageParameters(QueueOp):
    """Sets storage parameters of a table, and resets those that are None."""

    table: str
    parameters: dict[str, str | None]
    schema: str | None = field(default=None, kw_only=True)
    existing: dict[str, str | None] = field(default_factory=dict, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> SetStorageParameters:
        """Set the former parameters."""
        return SetStorageParameters(self.table, self.existing, schema=self.schema, existing=self.parameters)


@registered_as("create_queue_enum")
@dataclass(eq=False)
class CreateEnum(QueueOp):
    """Creates the enum type of a status column that is added to a table."""

    enum: str
    values: list[str]
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> DropEnum:
        """Drop the type."""
        return DropEnum(self.enum, schema=self.schema, values=self.values)


@registered_as("drop_queue_enum")
@dataclass(eq=False)
class DropEnum(QueueOp):
    """Drops the enum type of a status column."""

    enum: str
    schema: str | None = field(default=None, kw_only=True)
    values: Sequence[str] = field(default=(), kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> CreateEnum:
        """Create the type."""
        return CreateEnum(self.enum, [*self.values], schema=self.schema)


@registered_as("add_queue_columns")
@dataclass(eq=False)
class AddColumns(QueueOp):
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
    status: str | None = field(default=None, kw_only=True)
    existing_rows: Any = field(default=None, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)

    def reverse(self) -> DropColumns:
        """Drop the columns."""
        names = [column.name for column in self.columns]
        return DropColumns(self.table, names, schema=self.schema, live=self.live, undo=self)


@registered_as("drop_queue_columns")
@dataclass(eq=False)
class DropColumns(QueueOp):
    """Drops the columns of a queue."""

    table: str
    columns: list[str]
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Add the columns again; the migration asks for the status of the existing rows again as well."""
        return self.undo or OperationList()


@registered_as("create_queue_index")
@dataclass(eq=False)
class CreateIndex(QueueOp):
    """Creates an index CONCURRENTLY, outside of the migration's transaction.

    An invalid index of the same name, left behind by an interrupted attempt, is dropped first.

    :param where: the predicate, as SQL.
    :param options: further arguments of SQLAlchemy's Index, such as ``{"postgresql_using": "gin"}``.
    """

    index: str
    table: str
    columns: list[Any]
    unique: bool = field(default=False, kw_only=True)
    where: str | None = field(default=None, kw_only=True)
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)

    def reverse(self) -> DropIndex:
        """Drop the index."""
        return DropIndex(self.index, self.table, schema=self.schema, undo=self)


@registered_as("drop_queue_index")
@dataclass(eq=False)
class DropIndex(QueueOp):
    """Drops an index CONCURRENTLY, outside of the migration's transaction."""

    index: str
    table: str
    schema: str | None = field(default=None, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Create the index again."""
        return self.undo or OperationList()


# -- queue columns -----------------------------------------------------------------------------------------------------
# The SQL of :class:`~sqlaqueue.alembic.operations.AddColumns`: columns for a table with rows, without rewriting it.
#
# PostgreSQL stores a constant default once, as the value of every existing row. So one status for all existing rows
# is such a default, replaced in the same transaction by the default for new rows. A status that depends on the row is
# NULL at first, which is no status, and is filled in afterwards.


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


# -- triggers ----------------------------------------------------------------------------------------------------------
# Operations on functions and triggers.


TransitionTables = dict[str, str]
"""``{"OLD": name, "NEW": name}``."""

TriggerDefinition = tuple[str, TransitionTables] | tuple[str, TransitionTables, str]
"""The event of a trigger, its transition tables and, for a row trigger, its condition as SQL."""


def trigger_definition(event: str, transition_tables: TransitionTables, when: str | None) -> TriggerDefinition:
    """Return the definition of a trigger for :class:`CreateTriggers`."""
    return (event, transition_tables) if when is None else (event, transition_tables, when)


@registered_as("create_queue_function")
@dataclass(eq=False)
class CreateFunction(QueueOp):
    """Creates or replaces a function.

    :param function: the name of the function.
    :param body: its text in PL/pgSQL; ``{key}`` is replaced by the table of that key in ``tables``.
    :param arguments: the names and types of its arguments in SQL; a trigger function has none.
    :param returns: the type of its result in SQL.
    :param tables: key to name of a table.
    :param comment: its comment, which contains its version.
    :param definer: make it SECURITY DEFINER, and revoke EXECUTE from PUBLIC.
    """

    function: str
    body: str
    arguments: str = field(default="", kw_only=True)
    returns: str = field(default="trigger", kw_only=True)
    tables: dict[str, str] = field(default_factory=dict, kw_only=True)
    comment: str | None = field(default=None, kw_only=True)
    definer: bool = field(default=False, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)
    """Creates the function again that this one replaces."""

    def reverse(self) -> MigrateOperation:
        """Drop the function, or restore the former one."""
        return self.undo or DropFunction(self.function, arguments=self.arguments, schema=self.schema, undo=self)


@registered_as("drop_queue_function")
@dataclass(eq=False)
class DropFunction(QueueOp):
    """Drops a function."""

    function: str
    arguments: str = field(default="", kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Create the function again."""
        return self.undo or OperationList()


@registered_as("create_queue_triggers")
@dataclass(eq=False)
class CreateTriggers(QueueOp):
    """Creates triggers, all or none.

    :param table: the table of the jobs.
    :param function: the function that the triggers call.
    :param triggers: name to event (INSERT, UPDATE, DELETE, TRUNCATE), transition tables and, for a row trigger, its
        condition.
    :param live: the table is in use. Create the triggers in a transaction of their own, and wait for their lock in
        many short attempts.
    """

    table: str
    function: str
    triggers: dict[str, TriggerDefinition]
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)

    def reverse(self) -> MigrateOperation:
        """Drop the triggers."""
        return DropTriggers(self.table, [*self.triggers], schema=self.schema, live=self.live, undo=self)


@registered_as("drop_queue_triggers")
@dataclass(eq=False)
class DropTriggers(QueueOp):
    """Drops triggers of a table."""

    table: str
    triggers: list[str]
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Create the triggers again as they were."""
        return self.undo or OperationList()


@registered_as("execute_verbatim")
@dataclass(eq=False)
class ExecuteVerbatim(QueueOp):
    """Executes SQL without interpreting colons or percent signs; it restores objects that were changed by hand."""

    sql: str
    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Restore what this replaced."""
        return self.undo or OperationList()


# -- unique indexes ----------------------------------------------------------------------------------------------------
# The operation that creates the unique index of a queue, and the SQL that finds the jobs that prevent it.


@registered_as("create_queue_unique_index")
@dataclass(eq=False)
class CreateUniqueIndex(QueueOp):
    """Creates the unique index of a queue, unless the table has jobs with the same values (twins).

    The table is searched for twins first, which blocks no other transaction.

    :param columns: the names of columns, and ``sa.text()`` with an expression.
    :param where: the predicate, as SQL: which jobs count.
    :param keys: the columns of the primary key, by which the error message shows twins.
    :param nulls_distinct: whether jobs with a NULL in one of the columns are never twins.
    :param options: further arguments of SQLAlchemy's Index, such as ``{"postgresql_with": {"fillfactor": "70"}}``.
    :param replace: the table has an index of this name, which is dropped.
    :param live: the table is in use. Create the index CONCURRENTLY, outside of the migration's transaction; an index to
        replace is dropped when the new one is complete.
    """

    index: str
    table: str
    columns: list[Any]
    where: str | None = field(default=None, kw_only=True)
    keys: list[str] = field(kw_only=True)
    nulls_distinct: bool = field(default=True, kw_only=True)
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)
    replace: bool = field(default=False, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)
    former: CreateUniqueIndex | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Create the index that was replaced, or drop the index."""
        if self.former is not None:
            return dataclasses.replace(self.former, replace=True, former=self)
        if self.live:
            return DropIndex(self.index, self.table, schema=self.schema, undo=self)
        return alembic_ops.DropIndexOp(conv(self.index), self.table, schema=self.schema)


def twins_query(operation: CreateUniqueIndex) -> str:
    """Return the SELECT of all twins, with ``{table}`` in place of the table's name."""
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


def twins_message(operation: CreateUniqueIndex) -> str:
    """Return the error message about twins, with ``{table}`` in place of the table's name."""
    return (
        f"{{table}}: the unique index {operation.index} cannot be created, because there are jobs with the same "
        f"{', '.join(_values(operation))}. Cancel or delete all but one of each, and run the migration again. This "
        f"query shows them:\n\n{twins_query(operation)};"
    )


def twins_check(operation: CreateUniqueIndex) -> str:
    """Return a statement that raises ``unique_violation`` if there are twins; ``{table}`` is the table's name."""
    # In PL/pgSQL, so that a script (--sql) contains the check as well. FOUND is a variable there, and may be a column.
    return f"""\
DO $sqlaqueue_do$
#variable_conflict use_column
BEGIN
  IF EXISTS (
{twins_query(operation)}
  ) THEN
    RAISE unique_violation USING MESSAGE = $sqlaqueue_text${twins_message(operation)}$sqlaqueue_text$;
  END IF;
END
$sqlaqueue_do$"""


def _values(operation: CreateUniqueIndex) -> list[str]:
    quote = NEUTRAL.identifier_preparer.quote
    return [quote(each) if isinstance(each, str) else literal_sql(each) for each in operation.columns]
