"""What the creation of a unique index executes: the search for twins, and the build of the index."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.elements import conv

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.operations.implementations import autocommit, connection_of, drop_concurrently, execute
from sqlaqueue.alembic.operations.lock_retries import RetryingTransaction
from sqlaqueue.alembic.operations.unique_indexes import twins_check, twins_message
from sqlaqueue.postgresql.catalog_indexes import index_validity
from sqlaqueue.postgresql.ddl import SqlTemplate, bare_table
from sqlaqueue.sql.errors import UNIQUE_VIOLATION, sqlstate, violated_constraint
from sqlaqueue.sql.types import NEUTRAL, object_name


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
