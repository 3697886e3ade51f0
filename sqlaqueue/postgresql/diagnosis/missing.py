"""Tables and columns of a queue that the database lacks, or has in several schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog import queue_objects
from sqlaqueue.postgresql.checks.missing_objects import other_schemas
from sqlaqueue.postgresql.ddl.attach import objects_of
from sqlaqueue.postgresql.ddl.sql_template import SqlTemplate
from sqlaqueue.postgresql.diagnosis.relations import quoted
from sqlaqueue.postgresql.diagnosis.sql import creation, name_of, sql_text, sql_texts
from sqlaqueue.postgresql.types import NEUTRAL
from sqlaqueue.queue.diagnosis_protocol import MissingDefault, MissingObject, SplitSchemas
from sqlaqueue.queue.spec import QueueSpec


def missing_tables(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[MissingObject]:
    """Return the tables that do not exist."""
    return [
        MissingObject(
            name=name_of(connection, table),
            create=sql_texts(connection, creation(table, objects_of(table))),
            hint=other_schemas(connection, table).strip(" ()"),
        )
        for table in queue_objects.missing_tables(connection, tables)
    ]


def missing_columns(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[MissingObject]:
    """Return the columns that do not exist."""
    # Only a part of a statement is compiled.
    compiler: Any = cast("Any", NEUTRAL.ddl_compiler)(NEUTRAL, None)
    return [
        MissingObject(
            name=f"{name_of(connection, column.table)}.{quoted(column.name)}",
            create=sql_text(
                connection,
                SqlTemplate(
                    f"ALTER TABLE {{table}} ADD COLUMN {compiler.get_column_specification(column)}", table=column.table
                ),
            ),
        )
        for column in queue_objects.missing_columns(connection, tables)
    ]


def missing_defaults(connection: sa.Connection, spec: QueueSpec) -> list[MissingDefault]:
    """Return the columns without the DEFAULT that the model declares."""
    compiler: Any = cast("Any", NEUTRAL.ddl_compiler)(NEUTRAL, None)
    tables = [spec.table, *spec.side_tables.values()]
    there = queue_objects.columns_with_default(connection, tables)
    mine = {*spec.columns.values(), *(column for table in spec.side_tables.values() for column in table.c)}
    return [
        MissingDefault(
            name=f"{name_of(connection, table)}.{quoted(column.name)}",
            is_of_queue=column in mine,
            repair=sql_text(
                connection,
                SqlTemplate(
                    f"ALTER TABLE {{table}} ALTER COLUMN {quoted(column.name)} "
                    f"SET DEFAULT {compiler.get_column_default_string(column)}",
                    table=table,
                ),
            ),
        )
        for table in tables
        for column in table.c
        # Not FetchedValue, by which a model says that something else sets the value, such as a trigger.
        if isinstance(column.server_default, sa.DefaultClause) and column not in there
    ]


def split_schemas(connection: sa.Connection, spec: QueueSpec) -> SplitSchemas | None:
    """Return the schemas in which the search path finds a queue's tables, if there are several."""
    mine = [table for table in spec.side_tables.values() if table.schema == spec.table.schema]
    schemas = queue_objects.schemas_of(connection, [spec.table, *mine])
    home = schemas[spec.table.name]
    others = [f"{name} in {schema}" for name, schema in schemas.items() if schema != home]
    if not others:
        return None
    database, role, path = connection.execute(
        sa.select(
            queue_objects.quoted_name(sa.func.current_database()),
            queue_objects.quoted_role(),
            sa.func.current_setting(sa.literal_column("'search_path'")),
        )
    ).one()
    after = [each for each in map(str.strip, path.split(",")) if each and each.strip('"') != home]
    repair = f"ALTER ROLE {role} IN DATABASE {database} SET search_path = {', '.join([quoted(home), *after])};"
    return SplitSchemas(home=home, others=others, repair=repair)
