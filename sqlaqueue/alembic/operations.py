"""The operations of queues: their names behind ``op``, arguments, reverses, and what they execute.

A migration must do the same in two years, with any version of the models and of this library. So an operation carries
everything that it writes: the text of a function, columns, conditions. ``schema`` is the schema of all tables and
functions that an operation names, None for the default one.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

import sqlalchemy as sa
from alembic.autogenerate.api import AutogenContext
from alembic.autogenerate.render import _render_column, render_op, renderers
from alembic.operations import MigrateOperation, Operations
from alembic.operations.ops import OpContainer

from sqlaqueue.alembic.implementations import (
    ATTEMPTS,
    LOCK_TIMEOUT,
    RetryingTransaction,
    autocommit,
    connection_of,
    drop_concurrently,
    execute,
    in_batches,
)
from sqlaqueue.postgresql import ddl
from sqlaqueue.postgresql.catalog_indexes import index_validity
from sqlaqueue.sql.types import NEUTRAL

NOT_RENDERED = {"not_rendered": True}
"""Metadata of a dataclass field that only :meth:`QueueOp.reverse` needs: it is not written into migrations."""


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class QueueOp(MigrateOperation):
    """Base of the operations: each subclass is a dataclass whose fields are the arguments of ``op.<name>()``."""

    name: ClassVar[str]

    def __init_subclass__(cls, *, name: str | None = None, **kw: Any) -> None:
        super().__init_subclass__(**kw)
        dataclass(eq=False)(cls)
        if name is not None:
            cls.name = name
            Operations.register_operation(name, "invoke")(cls)

    @classmethod
    def invoke(cls, operations: Operations, *args: Any, **kw: Any) -> Any:
        """Run the operation; ``op.<name>(...)`` calls this."""
        return operations.invoke(cls(*args, **kw))

    def implement(self, op: Operations) -> None:
        """Execute the operation in a database, or write it into a script."""
        raise NotImplementedError

    def reverse(self) -> MigrateOperation:
        """Return what the downgrade does: nothing, unless an operation says otherwise."""
        return OperationList()

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return the difference that ``alembic check`` prints."""
        return (self.name, *(getattr(self, each.name) for each in self.rendered_fields()))

    @classmethod
    def rendered_fields(cls) -> list[Field[Any]]:
        return [each for each in fields(cls) if not each.metadata.get("not_rendered")]  # type: ignore[arg-type] # every subclass is a dataclass


class _WithUndo(QueueOp):
    """An operation whose reverse is given: the one that restores what it drops or replaces."""

    undo: MigrateOperation | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        return self.undo or OperationList()


class OperationList(OpContainer):
    """Several operations in place of one."""

    def reverse(self) -> OperationList:
        return OperationList([op.reverse() for op in reversed(self.ops)])


class PerDirection(OpContainer):
    """Operations of the upgrade and others of the downgrade, which do not undo each other."""

    def __init__(self, up: Sequence[MigrateOperation] = (), down: Sequence[MigrateOperation] = ()) -> None:
        super().__init__(up)
        self.down = down

    def reverse(self) -> PerDirection:
        return PerDirection(self.down, self.ops)


@Operations.implementation_for(QueueOp)
def _implement(op: Operations, operation: QueueOp) -> None:
    operation.implement(op)


# -- how operations are written into a migration -----------------------------------------------------------------------


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
    if isinstance(value, list | tuple):
        begin, end = "[]" if isinstance(value, list) else "()"
        return f"{begin}{_join([render_value(context, each) for each in value])}{end}"
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


# -- jobs and messages -------------------------------------------------------------------------------------------------


class LockTables(QueueOp, name="lock_queue_tables"):
    """Locks tables in ACCESS EXCLUSIVE mode until the migration commits, in many short attempts.

    A consumer may hold a batch in an open transaction. A plain LOCK would wait for it, and every other statement on the
    table would wait behind the LOCK.

    :param lock_timeout: the duration of one attempt, in seconds.
    :param attempts: the number of attempts before the migration fails.
    """

    tables: list[str]
    _: KW_ONLY
    schema: str | None = None
    lock_timeout: float = LOCK_TIMEOUT
    attempts: int = ATTEMPTS

    def implement(self, op: Operations) -> None:
        tables = [ddl.bare_table(name, self.schema) for name in self.tables]
        # A migration that was interrupted may have dropped one of the tables.
        lock = "IF to_regclass({table:literal}) IS NOT NULL THEN LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE; END IF"
        locks = [ddl.SqlTemplate(lock, table=table) for table in tables]
        retrying = RetryingTransaction(tables[0], locks, lock_timeout=self.lock_timeout, attempts=self.attempts)
        execute(op, [retrying])


class ReleaseJobs(QueueOp, name="release_queue_jobs"):
    """Releases jobs that run under a lease, for a strategy that has no leases and would never rescue them.

    The consumers that hold them can no longer settle these runs; the writes of their handlers are rolled back. There
    is no reverse: a pending job is pending under every strategy.

    :param where: the condition that a job runs under a lease.
    :param values: column to SQL expression.
    """

    table: str
    values: dict[str, str]
    _: KW_ONLY
    where: str
    schema: str | None = None

    def implement(self, op: Operations) -> None:
        quote = op.get_context().dialect.identifier_preparer.quote
        values = ", ".join(f"{quote(name)} = {value}" for name, value in self.values.items())
        update = f"UPDATE {{table}} SET {values} WHERE {self.where}"  # noqa: S608 - the migration's own SQL
        op.execute(ddl.SqlTemplate(update, table=ddl.bare_table(self.table, self.schema)))


class EmptyMessages(QueueOp, name="empty_queue_messages"):
    """Deletes all messages of a queue before their table gets other columns; both directions write them again."""

    messages: str
    _: KW_ONLY
    schema: str | None = None

    def implement(self, op: Operations) -> None:
        execute(op, [ddl.SqlTemplate("TRUNCATE {table}", table=ddl.bare_table(self.messages, self.schema))])


class FillMessages(QueueOp, name="fill_queue_messages"):
    """Writes a message for each pending job that has none. The messages are dropped with their table.

    :param messages: the message table.
    :param keys: the columns of the primary key.
    :param order: the columns by which claims are ordered.
    :param where: the condition that a job is pending.
    :param live: the table is in use. Write the messages in batches, each in a transaction of its own.
    """

    table: str
    messages: str
    _: KW_ONLY
    keys: list[str]
    order: list[str]
    where: str
    schema: str | None = None
    live: bool = False

    def implement(self, op: Operations) -> None:
        quote = op.get_context().dialect.identifier_preparer.quote
        names = ", ".join(map(quote, [*self.keys, *self.order]))
        same = " AND ".join(f"sqlaqueue_m.{quote(key)} = sqlaqueue_j.{quote(key)}" for key in self.keys)
        missing = f"({self.where}) AND NOT EXISTS (SELECT FROM {{messages}} AS sqlaqueue_m WHERE {same})"
        tables = {
            "table": ddl.bare_table(self.table, self.schema),
            "messages": ddl.bare_table(self.messages, self.schema),
        }
        fill = f"INSERT INTO {{messages}} ({names}) SELECT {names} FROM {{table}} AS sqlaqueue_j WHERE {missing}"  # noqa: S608 - the migration's own SQL
        if not self.live:
            op.execute(ddl.SqlTemplate(f"{fill} ON CONFLICT DO NOTHING", **tables))
            return
        # The rows are locked: a job that stops being pending meanwhile must not get a message.
        batch = f"{fill} AND {{batch}} FOR NO KEY UPDATE OF sqlaqueue_j SKIP LOCKED ON CONFLICT DO NOTHING"
        remaining = f"EXISTS (SELECT FROM {{table}} AS sqlaqueue_j WHERE {missing})"
        with autocommit(op):
            op.execute(in_batches(batch, remaining, **tables))


# -- tables ------------------------------------------------------------------------------------------------------------


class SetStorageParameters(QueueOp, name="set_storage_parameters"):
    """Sets storage parameters of a table, and resets those that are None."""

    table: str
    parameters: dict[str, str | None]
    _: KW_ONLY
    schema: str | None = None
    existing: dict[str, str | None] = field(default_factory=dict, metadata=NOT_RENDERED)

    def implement(self, op: Operations) -> None:
        table = ddl.bare_table(self.table, self.schema)
        settings = ", ".join(f"{name} = {value}" for name, value in self.parameters.items() if value is not None)
        resets = ", ".join(name for name, value in self.parameters.items() if value is None)
        if settings:
            op.execute(ddl.SqlTemplate(f"ALTER TABLE {{table}} SET ({settings})", table=table))
        if resets:
            op.execute(ddl.SqlTemplate(f"ALTER TABLE {{table}} RESET ({resets})", table=table))

    def reverse(self) -> SetStorageParameters:
        return SetStorageParameters(self.table, self.existing, schema=self.schema, existing=self.parameters)


class CreateEnum(QueueOp, name="create_queue_enum"):
    """Creates the enum type of a status column that is added to a table."""

    enum: str
    values: list[str]
    _: KW_ONLY
    schema: str | None = None

    def implement(self, op: Operations) -> None:
        # A migration of a table in use may be run again, so the type may exist.
        enum = sa.Enum(*self.values, name=self.enum, schema=self.schema)
        enum.create(op.get_bind(), checkfirst=not op.get_context().as_sql)

    def reverse(self) -> DropEnum:
        return DropEnum(self.enum, schema=self.schema, values=self.values)


class DropEnum(QueueOp, name="drop_queue_enum"):
    """Drops the enum type of a status column."""

    enum: str
    _: KW_ONLY
    schema: str | None = None
    values: Sequence[str] = field(default=(), metadata=NOT_RENDERED)

    def implement(self, op: Operations) -> None:
        enum = sa.Enum(name=self.enum, schema=self.schema)
        enum.drop(op.get_bind(), checkfirst=not op.get_context().as_sql)

    def reverse(self) -> CreateEnum:
        return CreateEnum(self.enum, [*self.values], schema=self.schema)


class DropColumns(_WithUndo, name="drop_queue_columns"):
    """Drops the columns of a queue. The downgrade adds them again, and asks for the status of existing rows again."""

    table: str
    columns: list[str]
    _: KW_ONLY
    schema: str | None = None
    live: bool = False

    def implement(self, op: Operations) -> None:
        if op.get_context().dialect.name != "postgresql":
            with op.batch_alter_table(self.table, schema=self.schema) as batch:
                for name in self.columns:
                    batch.drop_column(name)
            return
        table, quote = ddl.bare_table(self.table, self.schema), NEUTRAL.identifier_preparer.quote
        drops = ", ".join(f"DROP COLUMN IF EXISTS {quote(name)}" for name in self.columns)
        drop = RetryingTransaction(table, [ddl.SqlTemplate(f"ALTER TABLE {{table}} {drops}", table=table)])
        with autocommit(op) if self.live else contextlib.nullcontext():
            execute(op, [drop])


class CreateIndex(QueueOp, name="create_queue_index"):
    """Creates an index CONCURRENTLY, outside of the migration's transaction.

    An invalid index of the same name, left behind by an interrupted attempt, is dropped first.

    :param where: the predicate, as SQL.
    :param options: further arguments of SQLAlchemy's Index, such as ``{"postgresql_using": "gin"}``.
    """

    index: str
    table: str
    columns: list[Any]
    _: KW_ONLY
    unique: bool = False
    where: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    schema: str | None = None

    def implement(self, op: Operations) -> None:
        connection, table = connection_of(op), ddl.bare_table(self.table, self.schema)
        with autocommit(op):
            valid = None if connection is None else index_validity(connection, table, self.index)
            if valid:
                return
            if valid is False:
                drop_concurrently(op, self.index, table)
            op.create_index(
                self.index,
                self.table,
                self.columns,
                unique=self.unique,
                schema=self.schema,
                postgresql_where=None if self.where is None else sa.literal_column(self.where),
                **{**self.options, "postgresql_concurrently": True},
            )

    def reverse(self) -> DropIndex:
        return DropIndex(self.index, self.table, schema=self.schema, undo=self)


class DropIndex(_WithUndo, name="drop_queue_index"):
    """Drops an index CONCURRENTLY, outside of the migration's transaction."""

    index: str
    table: str
    _: KW_ONLY
    schema: str | None = None

    def implement(self, op: Operations) -> None:
        with autocommit(op):
            drop_concurrently(op, self.index, ddl.bare_table(self.table, self.schema))


# -- functions and triggers --------------------------------------------------------------------------------------------


TransitionTables = dict[str, str]
"""``{"OLD": name, "NEW": name}``."""

TriggerDefinition = tuple[str, TransitionTables] | tuple[str, TransitionTables, str]
"""The event of a trigger, its transition tables and, for a row trigger, its condition as SQL."""


def trigger_definition(event: str, transition_tables: TransitionTables, when: str | None) -> TriggerDefinition:
    return (event, transition_tables) if when is None else (event, transition_tables, when)


class CreateFunction(QueueOp, name="create_queue_function"):
    """Creates or replaces a function.

    :param function: the name of the function.
    :param body: its text in PL/pgSQL; ``{key}`` is replaced by the table of that key in ``tables``.
    :param arguments: the names and types of its arguments in SQL; a trigger function has none.
    :param returns: the type of its result in SQL.
    :param tables: key to name of a table.
    :param comment: its comment, which contains its version.
    :param definer: make it SECURITY DEFINER, and revoke EXECUTE from PUBLIC.
    :param bare: whether it changes no setting, so that its body names PostgreSQL's own objects only.
    :param undo: creates the function again that this one replaces; None if it replaces none.
    """

    function: str
    body: str
    _: KW_ONLY
    arguments: str = ""
    returns: str = "trigger"
    tables: dict[str, str] = field(default_factory=dict)
    comment: str | None = None
    definer: bool = False
    bare: bool = False
    schema: str | None = None
    undo: MigrateOperation | None = field(default=None, metadata=NOT_RENDERED)

    def implement(self, op: Operations) -> None:
        function = ddl.Function(
            ddl.bare_table("", self.schema),
            self.function,
            self.arguments,
            self.returns,
            self.body,
            {key: ddl.bare_table(name, self.schema) for key, name in self.tables.items()},
            self.comment,
            definer=self.definer,
            bare=self.bare,
        )
        # CREATE OR REPLACE keeps the comment of the former function, so the comment is always set.
        statements = [each for each in function.created() if not isinstance(each, ddl.CommentOnFunction)]
        execute(op, [*statements, ddl.CommentOnFunction(function)])

    def reverse(self) -> MigrateOperation:
        return self.undo or DropFunction(self.function, arguments=self.arguments, schema=self.schema, undo=self)


class DropFunction(_WithUndo, name="drop_queue_function"):
    """Drops a function."""

    function: str
    _: KW_ONLY
    arguments: str = ""
    schema: str | None = None

    def implement(self, op: Operations) -> None:
        function = ddl.Function(ddl.bare_table("", self.schema), self.function, self.arguments, "", "")
        execute(op, [ddl.DropFunctionStatement(function)])


class CreateTriggers(QueueOp, name="create_queue_triggers"):
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
    _: KW_ONLY
    schema: str | None = None
    live: bool = False

    def implement(self, op: Operations) -> None:
        table = ddl.bare_table(self.table, self.schema)
        function = ddl.TriggerFunction(ddl.bare_table("", self.schema), self.function, "")
        triggers = [
            ddl.Trigger(table, name, event, function, rows, when=when[0] if when else None)
            for name, (event, rows, *when) in self.triggers.items()
        ]
        connection, preparer = connection_of(op), op.get_context().dialect.identifier_preparer
        role = "the role of the migration" if connection is None else connection.scalar(sa.text("SELECT current_user"))
        grant = f"GRANT TRIGGER ON TABLE {preparer.format_table(table)} TO {preparer.quote(str(role))};"
        if not self.live:
            execute(op, triggers, grant=grant)
            return
        for trigger in triggers:
            # The migration may be run again after an interruption.
            trigger.replace = True
        with autocommit(op):
            execute(op, [RetryingTransaction(table, triggers)], grant=grant)

    def reverse(self) -> MigrateOperation:
        return DropTriggers(self.table, [*self.triggers], schema=self.schema, live=self.live, undo=self)


class DropTriggers(_WithUndo, name="drop_queue_triggers"):
    """Drops triggers of a table."""

    table: str
    triggers: list[str]
    _: KW_ONLY
    schema: str | None = None
    live: bool = False

    def implement(self, op: Operations) -> None:
        table, quote = ddl.bare_table(self.table, self.schema), op.get_context().dialect.identifier_preparer.quote
        drops = [
            ddl.SqlTemplate(f"DROP TRIGGER IF EXISTS {quote(name)} ON {{table}}", table=table) for name in self.triggers
        ]
        if not self.live:
            execute(op, drops)
            return
        with autocommit(op):
            execute(op, [RetryingTransaction(table, drops)])


class ExecuteVerbatim(_WithUndo, name="execute_verbatim"):
    """Executes SQL without interpreting colons or percent signs; it restores objects that were changed by hand."""

    sql: str

    def implement(self, op: Operations) -> None:
        op.execute(ddl.SqlTemplate(self.sql))
