"""What each operation executes in a database, or writes into a script."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.elements import conv

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.operations import (
    RetryingTransaction,
    add_columns,
    drop_columns,
    in_batches,
    twins_check,
    twins_message,
)
from sqlaqueue.postgresql.catalog_indexes import index_validity
from sqlaqueue.postgresql.ddl import (
    CommentOnFunction,
    DropFunction,
    Function,
    SqlTemplate,
    Trigger,
    TriggerFunction,
    bare_table,
)
from sqlaqueue.sql.errors import INSUFFICIENT_PRIVILEGE, UNIQUE_VIOLATION, sqlstate, violated_constraint
from sqlaqueue.sql.types import NEUTRAL, object_name

_TIMEOUTS = ("statement_timeout", "lock_timeout")


@contextlib.contextmanager
def autocommit(op: Operations) -> Iterator[None]:
    """Commit the migration's transaction, and run the block in autocommit mode.

    :raises CommandError: when the transaction was not begun by Alembic.
    """
    context = op.get_context()
    connection = connection_of(op)
    if connection is not None and connection.get_isolation_level() == "AUTOCOMMIT":
        yield
        return
    begun = context._transaction  # noqa: SLF001 - autocommit_block() fails with a bare assertion without it
    if connection is not None and connection.in_transaction() and begun is None:
        raise CommandError(
            "an operation with live=True commits by itself, but env.py runs the migrations in a transaction of its "
            "own; begin it with context.begin_transaction() instead of connection.begin()"
        )
    with context.autocommit_block():
        # All batches are one long statement, and CREATE INDEX CONCURRENTLY waits for others without blocking them.
        for setting in _TIMEOUTS:
            op.execute(SqlTemplate(f"SET {setting} = 0"))
        try:
            yield
        finally:
            for setting in _TIMEOUTS:
                op.execute(SqlTemplate(f"RESET {setting}"))


def execute(op: Operations, elements: Sequence[DDLElement], *, grant: str | None = None) -> None:
    """Execute statements.

    :param grant: the statement that grants the required privilege.
    :raises CommandError: when the role lacks a privilege, with the SQL for an administrator.
    """
    try:
        for element in elements:
            op.execute(element)
    except DBAPIError as error:
        if sqlstate(error) != INSUFFICIENT_PRIVILEGE:
            raise
        raise CommandError(_missing_privilege(op, elements, grant, error)) from error


def _missing_privilege(op: Operations, elements: Sequence[DDLElement], grant: str | None, error: DBAPIError) -> str:
    make_dialect: Any = type(op.get_context().dialect)
    # With this paramstyle no percent sign is doubled.
    plain = make_dialect(paramstyle="named")
    statements = "\n".join(f"{str(element.compile(dialect=plain)).strip()};" for element in elements)
    first = f"Grant the privilege, and run the migration again:\n\n{grant}\n\nOr let" if grant else "Let"
    return (
        f"{str(error.orig).strip()}\nThe role of this migration lacks a privilege. {first} a role with the privilege "
        "execute the whole migration, as `alembic upgrade <from>:<to> --sql` writes it. The refused statements are:\n\n"
        f"{statements}"
    )


def connection_of(op: Operations) -> sa.Connection | None:
    """Return the connection to the database, None when a script is written."""
    context = op.get_context()
    return None if context.as_sql else context.connection


def _role(op: Operations) -> str:
    connection = connection_of(op)
    role = "the role of the migration" if connection is None else connection.scalar(sa.text("SELECT current_user"))
    return op.get_context().dialect.identifier_preparer.quote(str(role))


@Operations.implementation_for(ops.CreateFunction)
def _create_function(op: Operations, operation: ops.CreateFunction) -> None:
    tables = {key: bare_table(name, operation.schema) for key, name in operation.tables.items()}
    function = Function(
        bare_table("", operation.schema),
        operation.function,
        operation.arguments,
        operation.returns,
        operation.body,
        tables,
        operation.comment,
        definer=operation.definer,
    )
    # CREATE OR REPLACE keeps the comment of the former function, so the comment is always set.
    statements = [each for each in function.created() if not isinstance(each, CommentOnFunction)]
    execute(op, [*statements, CommentOnFunction(function)])


@Operations.implementation_for(ops.DropFunction)
def _drop_function(op: Operations, operation: ops.DropFunction) -> None:
    function = Function(bare_table("", operation.schema), operation.function, operation.arguments, "", "")
    execute(op, [DropFunction(function)])


@Operations.implementation_for(ops.CreateTriggers)
def _create_triggers(op: Operations, operation: ops.CreateTriggers) -> None:
    table = bare_table(operation.table, operation.schema)
    function = TriggerFunction(bare_table("", operation.schema), operation.function, "")
    triggers = [
        Trigger(table, name, event, function, rows, when=when[0] if when else None)
        for name, (event, rows, *when) in operation.triggers.items()
    ]
    preparer = op.get_context().dialect.identifier_preparer
    grant = f"GRANT TRIGGER ON TABLE {preparer.format_table(table)} TO {_role(op)};"
    if not operation.live:
        execute(op, triggers, grant=grant)
        return
    for trigger in triggers:
        # The migration may be run again after an interruption.
        trigger.replace = True
    with autocommit(op):
        execute(op, [RetryingTransaction(table, triggers)], grant=grant)


@Operations.implementation_for(ops.DropTriggers)
def _drop_triggers(op: Operations, operation: ops.DropTriggers) -> None:
    table = bare_table(operation.table, operation.schema)
    quote = op.get_context().dialect.identifier_preparer.quote
    drops = [
        SqlTemplate(f"DROP TRIGGER IF EXISTS {quote(name)} ON {{table}}", table=table) for name in operation.triggers
    ]
    if not operation.live:
        execute(op, drops)
        return
    with autocommit(op):
        execute(op, [RetryingTransaction(table, drops)])


@Operations.implementation_for(ops.ExecuteVerbatim)
def _execute_verbatim(op: Operations, operation: ops.ExecuteVerbatim) -> None:
    op.execute(SqlTemplate(operation.sql))


@Operations.implementation_for(ops.SetStorageParameters)
def _set_storage_parameters(op: Operations, operation: ops.SetStorageParameters) -> None:
    table = bare_table(operation.table, operation.schema)
    values = {name: value for name, value in operation.parameters.items() if value is not None}
    settings = ", ".join(f"{name} = {value}" for name, value in values.items())
    resets = ", ".join(name for name, value in operation.parameters.items() if value is None)
    if settings:
        op.execute(SqlTemplate(f"ALTER TABLE {{table}} SET ({settings})", table=table))
    if resets:
        op.execute(SqlTemplate(f"ALTER TABLE {{table}} RESET ({resets})", table=table))


@Operations.implementation_for(ops.CreateEnum)
def _create_enum(op: Operations, operation: ops.CreateEnum) -> None:
    # A migration of a table in use may be run again, so the type may exist.
    enum = sa.Enum(*operation.values, name=operation.enum, schema=operation.schema)
    enum.create(op.get_bind(), checkfirst=not op.get_context().as_sql)


@Operations.implementation_for(ops.DropEnum)
def _drop_enum(op: Operations, operation: ops.DropEnum) -> None:
    enum = sa.Enum(name=operation.enum, schema=operation.schema)
    enum.drop(op.get_bind(), checkfirst=not op.get_context().as_sql)


@Operations.implementation_for(ops.AddColumns)
def _add_columns(op: Operations, operation: ops.AddColumns) -> None:
    statements, backfill = add_columns(operation)
    table = bare_table(operation.table, operation.schema)
    add = RetryingTransaction(table, statements)
    if not operation.live:
        execute(op, [add, *backfill.at_once])
        return
    steps: list[DDLElement] = [add]
    if backfill.batches is not None:
        steps.append(backfill.batches)
        steps += [RetryingTransaction(table, [each]) if locks else each for locks, each in backfill.not_null]
    with autocommit(op):
        execute(op, steps)


@Operations.implementation_for(ops.DropColumns)
def _drop_columns(op: Operations, operation: ops.DropColumns) -> None:
    drop = RetryingTransaction(bare_table(operation.table, operation.schema), [drop_columns(operation)])
    with autocommit(op) if operation.live else contextlib.nullcontext():
        execute(op, [drop])


@Operations.implementation_for(ops.CreateIndex)
def _create_index(op: Operations, operation: ops.CreateIndex) -> None:
    connection, table = connection_of(op), bare_table(operation.table, operation.schema)
    with autocommit(op):
        valid = None if connection is None else index_validity(connection, table, operation.index)
        if valid:
            return
        if valid is False:
            drop_concurrently(op, operation.index, table)
        op.create_index(
            operation.index,
            operation.table,
            operation.columns,
            unique=operation.unique,
            schema=operation.schema,
            postgresql_where=None if operation.where is None else sa.literal_column(operation.where),
            **{**operation.options, "postgresql_concurrently": True},
        )


@Operations.implementation_for(ops.DropIndex)
def _drop_index(op: Operations, operation: ops.DropIndex) -> None:
    with autocommit(op):
        drop_concurrently(op, operation.index, bare_table(operation.table, operation.schema))


def drop_concurrently(op: Operations, index: str, table: sa.Table) -> None:
    """Drop an index CONCURRENTLY if it exists."""
    op.drop_index(index, table.name, schema=table.schema, if_exists=True, postgresql_concurrently=True)


@Operations.implementation_for(ops.LockTables)
def _lock_tables(op: Operations, operation: ops.LockTables) -> None:
    tables = [bare_table(name, operation.schema) for name in operation.tables]
    # A migration that was interrupted may have dropped one of the tables.
    lock = "IF to_regclass({table:literal}) IS NOT NULL THEN LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE; END IF"
    locks = [SqlTemplate(lock, table=table) for table in tables]
    timeout, attempts = operation.lock_timeout, operation.attempts
    execute(op, [RetryingTransaction(tables[0], locks, lock_timeout=timeout, attempts=attempts)])


@Operations.implementation_for(ops.ReleaseJobs)
def _release_jobs(op: Operations, operation: ops.ReleaseJobs) -> None:
    quote = op.get_context().dialect.identifier_preparer.quote
    values = ", ".join(f"{quote(name)} = {value}" for name, value in operation.values.items())
    update = f"UPDATE {{table}} SET {values} WHERE {operation.where}"  # noqa: S608 - the migration's own SQL
    op.execute(SqlTemplate(update, table=bare_table(operation.table, operation.schema)))


@Operations.implementation_for(ops.EmptyMessages)
def _empty_messages(op: Operations, operation: ops.EmptyMessages) -> None:
    execute(op, [SqlTemplate("TRUNCATE {table}", table=bare_table(operation.messages, operation.schema))])


@Operations.implementation_for(ops.FillMessages)
def _fill_messages(op: Operations, operation: ops.FillMessages) -> None:
    quote = op.get_context().dialect.identifier_preparer.quote
    names = ", ".join(map(quote, [*operation.keys, *operation.order]))
    same = " AND ".join(f"sqlaqueue_m.{quote(key)} = sqlaqueue_j.{quote(key)}" for key in operation.keys)
    missing = f"({operation.where}) AND NOT EXISTS (SELECT FROM {{messages}} AS sqlaqueue_m WHERE {same})"
    tables = {
        "table": bare_table(operation.table, operation.schema),
        "messages": bare_table(operation.messages, operation.schema),
    }
    fill = f"INSERT INTO {{messages}} ({names}) SELECT {names} FROM {{table}} AS sqlaqueue_j WHERE {missing}"  # noqa: S608 - as above
    if not operation.live:
        op.execute(SqlTemplate(f"{fill} ON CONFLICT DO NOTHING", **tables))
        return
    # The rows are locked: a job that stops being pending meanwhile must not get a message.
    batch = f"{fill} AND {{batch}} FOR NO KEY UPDATE OF sqlaqueue_j SKIP LOCKED ON CONFLICT DO NOTHING"
    remaining = f"EXISTS (SELECT FROM {{table}} AS sqlaqueue_j WHERE {missing})"
    with autocommit(op):
        op.execute(in_batches(batch, remaining, **tables))


# -- unique index builds -----------------------------------------------------------------------------------------------
# What the creation of a unique index executes: the search for twins, and the build of the index.


@Operations.implementation_for(ops.CreateUniqueIndex)
def _create_unique_index(op: Operations, operation: ops.CreateUniqueIndex) -> None:
    table = bare_table(operation.table, operation.schema)
    if operation.live:
        with autocommit(op):
            _build_concurrently(op, operation, table)
        return
    _refuse_twins(op, operation, table)
    if operation.replace:
        op.drop_index(conv(operation.index), table.name, schema=table.schema, if_exists=True)
    _build(op, operation, operation.index)


def _build_concurrently(op: Operations, operation: ops.CreateUniqueIndex, table: sa.Table) -> None:
    """Build the index beside the one that it replaces: until then, enqueue() needs that one."""
    connection = connection_of(op)
    name = object_name(operation.index, "new") if operation.replace else operation.index
    valid = None if connection is None else index_validity(connection, table, name)
    if not valid:
        _refuse_twins(op, operation, table)
        if valid is False:
            drop_concurrently(op, name, table)
        try:
            _build(op, operation, name, postgresql_concurrently=True)
        except CommandError:
            # An invalid index would still refuse twins.
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


def _refuse_twins(op: Operations, operation: ops.CreateUniqueIndex, table: sa.Table) -> None:
    try:
        op.execute(SqlTemplate(twins_check(operation), table=table))
    except DBAPIError as error:
        if sqlstate(error) != UNIQUE_VIOLATION:
            raise
        raise _twins(op, operation) from error


def _build(op: Operations, operation: ops.CreateUniqueIndex, name: str, **options: Any) -> None:
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
        # Twins that were inserted after the search.
        raise _twins(op, operation) from error


def _twins(op: Operations, operation: ops.CreateUniqueIndex) -> CommandError:
    connection = connection_of(op)
    options = {} if connection is None else connection.get_execution_options()
    schemas = options.get("schema_translate_map") or {}
    table = bare_table(operation.table, schemas.get(operation.schema, operation.schema))
    # With this paramstyle no percent sign of a name is doubled.
    make_dialect: Any = type(op.get_context().dialect)
    name = make_dialect(paramstyle="named").identifier_preparer.format_table(table)
    return CommandError(twins_message(operation).replace("{table}", name))
