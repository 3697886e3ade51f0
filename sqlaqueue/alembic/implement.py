"""What the operations do in a database, or write into a script."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.util import CommandError
from sqlalchemy.dialects.postgresql import ENUM
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import DDLElement

from sqlaqueue.alembic import catalog
from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.columns import add_columns, drop_columns
from sqlaqueue.alembic.sql import Patient, Statement, in_batches, stand_in
from sqlaqueue.postgresql.ddl import CommentOnFunction, DropFunction, Trigger, TriggerFunction

_PATIENCE = ("statement_timeout", "lock_timeout")
LOCK_TIMEOUT = 0.5
ATTEMPTS = 120
PAGES = 64
"""How many pages of a table one batch looks at: few enough for a writer to wait for."""


@contextlib.contextmanager
def on_its_own(op: Operations) -> Iterator[None]:
    """Leave the migration's transaction for as long as the block takes, committing what was done before it.

    :raises CommandError: when the transaction is not Alembic's to commit.
    """
    context = op.get_context()
    connection = _connection(op)
    if connection is not None and connection.get_isolation_level() == "AUTOCOMMIT":
        yield
        return
    begun = context._transaction  # noqa: SLF001 - autocommit_block() asserts that it is there, without a message
    if connection is not None and connection.in_transaction() and begun is None:
        raise CommandError(
            "an operation on a table that is in use commits on its own, but env.py runs the migrations in a "
            "transaction of its own making; let it begin with context.begin_transaction() instead of connection.begin()"
        )
    with context.autocommit_block():
        # All batches are one statement, and CREATE INDEX CONCURRENTLY waits for others without being in their way.
        for setting in _PATIENCE:
            op.execute(Statement(f"SET {setting} = 0"))
        try:
            yield
        finally:
            for setting in _PATIENCE:
                op.execute(Statement(f"RESET {setting}"))


def execute(op: Operations, elements: Sequence[DDLElement], *, right: str | None = None) -> None:
    """Execute statements.

    :param right: the statement that gives the right to do so.
    :raises CommandError: when the role may not, with the SQL for somebody who may.
    """
    try:
        for element in elements:
            op.execute(element)
    except DBAPIError as error:
        if catalog.sqlstate(error) != catalog.NO_PRIVILEGE:
            raise
        raise CommandError(_for_a_dba(op, elements, right, error)) from error


def _for_a_dba(op: Operations, elements: Sequence[DDLElement], right: str | None, error: DBAPIError) -> str:
    dialect = op.get_context().dialect
    # A dialect of the same kind that doubles no percent sign.
    make: Any = type(dialect)
    plain = make(paramstyle="named")
    statements = "\n".join(f"{str(element.compile(dialect=plain)).strip()};" for element in elements)
    grant = f"Give it the right, and run the migration again:\n\n{right}\n\nOr let" if right else "Let"
    return (
        f"{str(error.orig).strip()}\nThe role of this migration may not do it. {grant} somebody who may execute the "
        "whole migration, as `alembic upgrade <from>:<to> --sql` writes it. What was refused is:\n\n"
        f"{statements}"
    )


def _connection(op: Operations) -> sa.Connection | None:
    """Return the connection to the database; None when a script is written."""
    context = op.get_context()
    return None if context.as_sql else context.connection


def _role(op: Operations) -> str:
    connection = _connection(op)
    role = "the role of the migration" if connection is None else connection.scalar(sa.text("SELECT current_user"))
    return op.get_context().dialect.identifier_preparer.quote(str(role))


@Operations.implementation_for(ops.CreateFunction)
def _create_function(op: Operations, this: ops.CreateFunction) -> None:
    tables = {key: stand_in(name, this.schema) for key, name in this.tables.items()}
    function = TriggerFunction(
        stand_in("", this.schema), this.function, this.body, tables, this.comment, definer=this.definer
    )
    # A function that is replaced keeps its comment, unless it is taken away.
    steps = [each for each in function.created() if not isinstance(each, CommentOnFunction)]
    execute(op, [*steps, CommentOnFunction(function)])


@Operations.implementation_for(ops.DropFunction)
def _drop_function(op: Operations, this: ops.DropFunction) -> None:
    function = TriggerFunction(stand_in("", this.schema), this.function, "")
    execute(op, [DropFunction(function)])


@Operations.implementation_for(ops.CreateTriggers)
def _create_triggers(op: Operations, this: ops.CreateTriggers) -> None:
    table = stand_in(this.table, this.schema)
    function = TriggerFunction(stand_in("", this.schema), this.function, "")
    triggers = [
        Trigger(table, name, event, function, rows, when=when[0] if when else None)
        for name, (event, rows, *when) in this.triggers.items()
    ]
    preparer = op.get_context().dialect.identifier_preparer
    right = f"GRANT TRIGGER ON TABLE {preparer.format_table(table)} TO {_role(op)};"
    if not this.live:
        execute(op, triggers, right=right)
        return
    for trigger in triggers:
        # A migration that was interrupted is run again.
        trigger.replace = True
    with on_its_own(op):
        execute(op, [patient(table, triggers)], right=right)


@Operations.implementation_for(ops.DropTriggers)
def _drop_triggers(op: Operations, this: ops.DropTriggers) -> None:
    table = stand_in(this.table, this.schema)
    quote = op.get_context().dialect.identifier_preparer.quote
    drops = [Statement(f"DROP TRIGGER IF EXISTS {quote(name)} ON {{table}}", table=table) for name in this.triggers]
    if not this.live:
        execute(op, drops)
        return
    with on_its_own(op):
        execute(op, [patient(table, drops)])


@Operations.implementation_for(ops.ExecuteAsWritten)
def _execute_as_written(op: Operations, this: ops.ExecuteAsWritten) -> None:
    op.execute(Statement(this.sql))


@Operations.implementation_for(ops.SetStorageParameters)
def _set_storage_parameters(op: Operations, this: ops.SetStorageParameters) -> None:
    table = stand_in(this.table, this.schema)
    values = {name: value for name, value in this.parameters.items() if value is not None}
    settings = ", ".join(f"{name} = {value}" for name, value in values.items())
    resets = ", ".join(name for name, value in this.parameters.items() if value is None)
    if settings:
        op.execute(Statement(f"ALTER TABLE {{table}} SET ({settings})", table=table))
    if resets:
        op.execute(Statement(f"ALTER TABLE {{table}} RESET ({resets})", table=table))


@Operations.implementation_for(ops.CreateEnum)
def _create_enum(op: Operations, this: ops.CreateEnum) -> None:
    type_ = ENUM(*this.values, name=this.enum, schema=this.schema)
    # A migration of a table in use may be run again.
    type_.create(_bind(op), checkfirst=not op.get_context().as_sql)


@Operations.implementation_for(ops.DropEnum)
def _drop_enum(op: Operations, this: ops.DropEnum) -> None:
    ENUM(name=this.enum, schema=this.schema).drop(_bind(op), checkfirst=not op.get_context().as_sql)


def _bind(op: Operations) -> Any:
    # In a script it is a connection that writes what it is told to execute.
    return op.get_bind()


@Operations.implementation_for(ops.AddColumns)
def _add_columns(op: Operations, this: ops.AddColumns) -> None:
    first, rest = add_columns(this)
    table = stand_in(this.table, this.schema)
    if not this.live:
        execute(op, [patient(table, first), *rest.at_once])
        return
    steps: list[DDLElement] = [patient(table, first)]
    if rest.batches is not None:
        steps.append(rest.batches)
        steps += [patient(table, [element]) if patience else element for patience, element in rest.constrain]
    with on_its_own(op):
        execute(op, steps)


@Operations.implementation_for(ops.DropColumns)
def _drop_columns(op: Operations, this: ops.DropColumns) -> None:
    table = stand_in(this.table, this.schema)
    drop = patient(table, [drop_columns(this)])
    with on_its_own(op) if this.live else contextlib.nullcontext():
        execute(op, [drop])


@Operations.implementation_for(ops.CreateIndex)
def _create_index(op: Operations, this: ops.CreateIndex) -> None:
    connection = _connection(op)
    with on_its_own(op):
        valid = None if connection is None else catalog.index_is_valid(connection, this.schema, this.index)
        if valid:
            return
        if valid is False:
            _drop_concurrently(op, this.index, stand_in(this.table, this.schema))
        op.create_index(
            this.index,
            this.table,
            this.columns,
            unique=this.unique,
            schema=this.schema,
            postgresql_where=None if this.where is None else sa.literal_column(this.where),
            **{**this.options, "postgresql_concurrently": True},
        )


@Operations.implementation_for(ops.DropIndex)
def _drop_index(op: Operations, this: ops.DropIndex) -> None:
    with on_its_own(op):
        _drop_concurrently(op, this.index, stand_in(this.table, this.schema))


def _drop_concurrently(op: Operations, index: str, table: sa.Table) -> None:
    op.drop_index(index, table.name, schema=table.schema, if_exists=True, postgresql_concurrently=True)


@Operations.implementation_for(ops.LockTables)
def _lock_tables(op: Operations, this: ops.LockTables) -> None:
    tables = [stand_in(name, this.schema) for name in this.tables]
    # A migration that was interrupted may have dropped one of them.
    lock = "IF to_regclass({table:literal}) IS NOT NULL THEN LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE; END IF"
    locks = [Statement(lock, table=table) for table in tables]
    execute(op, [Patient(tables[0], locks, lock_timeout=this.lock_timeout, attempts=this.attempts)])


@Operations.implementation_for(ops.ReleaseRuns)
def _release_runs(op: Operations, this: ops.ReleaseRuns) -> None:
    quote = op.get_context().dialect.identifier_preparer.quote
    values = ", ".join(f"{quote(name)} = {value}" for name, value in this.values.items())
    update = f"UPDATE {{table}} SET {values} WHERE {this.where}"  # noqa: S608 - the migration says what to do
    op.execute(Statement(update, table=stand_in(this.table, this.schema)))


@Operations.implementation_for(ops.EmptyMessages)
def _empty_messages(op: Operations, this: ops.EmptyMessages) -> None:
    execute(op, [Statement("TRUNCATE {table}", table=stand_in(this.messages, this.schema))])


@Operations.implementation_for(ops.FillMessages)
def _fill_messages(op: Operations, this: ops.FillMessages) -> None:
    quote = op.get_context().dialect.identifier_preparer.quote
    names = ", ".join(map(quote, [*this.keys, *this.order]))
    same = " AND ".join(f"sqlaqueue_m.{quote(key)} = sqlaqueue_j.{quote(key)}" for key in this.keys)
    lacking = f"({this.where}) AND NOT EXISTS (SELECT FROM {{messages}} AS sqlaqueue_m WHERE {same})"
    tables = {"table": stand_in(this.table, this.schema), "messages": stand_in(this.messages, this.schema)}
    fill = f"INSERT INTO {{messages}} ({names}) SELECT {names} FROM {{table}} AS sqlaqueue_j WHERE {lacking}"  # noqa: S608 - as above
    if not this.live:
        op.execute(Statement(f"{fill} ON CONFLICT DO NOTHING", **tables))
        return
    # The rows are locked: one that ceased to wait in the meantime must not get a message.
    batch = f"{fill} AND {{batch}} FOR NO KEY UPDATE OF sqlaqueue_j SKIP LOCKED ON CONFLICT DO NOTHING"
    left = f"EXISTS (SELECT FROM {{table}} AS sqlaqueue_j WHERE {lacking})"
    with on_its_own(op):
        op.execute(in_batches(batch, left, pages=PAGES, **tables))


def patient(table: sa.Table, statements: Sequence[DDLElement]) -> Patient:
    """Return ``statements`` as one transaction that waits for its locks as a table in use can bear it."""
    return Patient(table, statements, lock_timeout=LOCK_TIMEOUT, attempts=ATTEMPTS)
