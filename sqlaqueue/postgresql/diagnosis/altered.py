"""Triggers and functions that were changed by hand: the right name and version, and not what the model declares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog import queries
from sqlaqueue.postgresql.catalog.queue_objects import schemas_of
from sqlaqueue.postgresql.catalog.reflected_objects import ReflectedFunction, ReflectedTrigger
from sqlaqueue.postgresql.ddl import wake_triggers
from sqlaqueue.postgresql.ddl.attach import objects_of
from sqlaqueue.postgresql.ddl.objects import Function, Trigger, version_in
from sqlaqueue.postgresql.diagnosis.sql import name_of, sql_texts
from sqlaqueue.queue.diagnosis_protocol import AlteredObject


def altered_objects(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[AlteredObject]:
    """Return the triggers and functions that are not as the model declares them, in three statements.

    The condition of a trigger is not compared: the server prints it in a form of its own, and its name ends in a
    digest of it. Nor is the version of a function, and whether a trigger is enabled.
    """
    if not any(isinstance(each, Trigger | Function) for table in tables for each in objects_of(table)):
        return []
    schemas = schemas_of(connection, tables)
    bound = {"schemas": sorted(set(schemas.values()))}
    functions = {
        (row.schema, f"{row.name}({row.arguments})"): ReflectedFunction.from_row(row, row.schema)
        for row in _rows(connection, queries.FUNCTIONS, bound)
    }
    triggers = {
        (row.schema, row.table, row.name): ReflectedTrigger.from_row(row, row.schema)
        for row in _rows(connection, queries.TRIGGERS_OF_TABLES, {**bound, "tables": [each.name for each in tables]})
    }
    found = list[AlteredObject]()
    for table in tables:
        schema = schemas.get(table.name, "")
        found += _altered_functions(connection, table, schema, functions)
        found += _altered_triggers(connection, table, schema, triggers)
    return found


def _altered_functions(
    connection: sa.Connection, table: sa.Table, schema: str, existing: dict[tuple[str, str], ReflectedFunction]
) -> Iterator[AlteredObject]:
    for each in (one for one in objects_of(table) if isinstance(one, Function)):
        there = existing.get((schema, each.signature))
        # One of another version is another finding.
        if there is None or version_in(there.comment) != version_in(each.comment) or there.is_as_declared(each):
            continue
        wakes = each.name.startswith(wake_triggers.PREFIX)
        yield AlteredObject(
            kind=each.kind, name=each.name, table="", wakes=wakes, repair=sql_texts(connection, each.created())
        )


def _altered_triggers(
    connection: sa.Connection, table: sa.Table, schema: str, existing: dict[tuple[str, str, str], ReflectedTrigger]
) -> Iterator[AlteredObject]:
    for each in (one for one in objects_of(table) if isinstance(one, Trigger)):
        there = existing.get((schema, table.name, each.name))
        if there is None or replace(there, enabled="O").equals(each):
            continue
        yield AlteredObject(
            kind="trigger",
            name=each.name,
            table=name_of(connection, table),
            wakes=each.name.startswith(wake_triggers.PREFIX),
            repair=sql_texts(connection, [replace(each, replace=True)]),
        )


def _rows(connection: sa.Connection, query: sa.TextClause, bound: dict[str, Any]) -> Sequence[Any]:
    arrays = [sa.bindparam(name, type_=sa.ARRAY(sa.Text())) for name in bound]
    return connection.execute(query.bindparams(*arrays), bound).all()
