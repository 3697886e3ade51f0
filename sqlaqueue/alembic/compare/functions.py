"""Compares the functions that triggers and statements of queues call."""

from __future__ import annotations

import logging

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare import restore
from sqlaqueue.alembic.compare.diff_context import DiffContext
from sqlaqueue.postgresql.catalog_schemas import PREFIX, ReflectedFunction, ResolvedName
from sqlaqueue.postgresql.ddl import Function, objects_of, version_in
from sqlaqueue.sql.types import is_name_of

log = logging.getLogger(__name__)


def compare_functions(diff: DiffContext) -> None:
    """Create the functions that are missing, and replace those that differ."""
    preparer = diff.context.dialect.identifier_preparer
    for table in diff.tables:
        for function in table.functions.values():
            existing = diff.catalog.function(table.qualified_name, function.signature)
            if existing is not None and existing.is_as_declared(function):
                continue
            if existing is not None:
                log.info("Detected changed %s %r", function.kind, function.name)
            elif table.database_table is not None:
                log.info("Detected added %s %r", function.kind, function.name)
            create = ops.CreateFunction(
                function.name,
                function.body,
                arguments=function.arguments,
                returns=function.returns,
                tables={key: each.name for key, each in function.tables.items()},
                comment=function.comment,
                definer=function.definer,
                schema=table.schema,
                undo=None if existing is None else restore.restore_function(preparer, existing),
            )
            diff.after.append(create)


def drop_unused_functions(diff: DiffContext) -> None:
    """Drop the functions that the models no longer have, and that no trigger of another table calls."""
    catalog = diff.catalog
    wanted = {
        (catalog.resolve(table.qualified_name)[0], signature) for table in diff.tables for signature in table.functions
    }
    compared = {catalog.resolve(table.qualified_name) for table in diff.tables}
    called = {
        (schema, f"{trigger.function}()")
        for (schema, table), triggers in catalog.triggers.items()
        if (schema, table) not in compared
        for trigger in triggers.values()
    }
    needed = wanted | called | diff.kept_functions | _functions_of_filtered_tables(diff)
    for key, function in catalog.functions.items():
        if not function.name.startswith(PREFIX) or key in needed:
            continue
        if function.returns == "trigger":
            log.info("Detected removed trigger function %r", function.name)
        elif _is_removed(diff, function, compared):
            log.info("Detected removed function %r", function.name)
        else:
            continue
        diff.before.append(
            ops.DropFunction(
                function.name,
                arguments=function.arguments,
                schema=function.schema,
                undo=restore.create_function(function),
            )
        )


def _is_removed(diff: DiffContext, function: ReflectedFunction, compared: set[ResolvedName]) -> bool:
    """Return whether a function that statements call is the library's, and of no table that the filters leave out.

    The catalog does not tell which table it belongs to, but its name does.
    """
    if not version_in(function.comment):
        return False
    purpose = function.name.removeprefix(PREFIX).partition("_")[0]
    tables = [name for schema, name in {*diff.catalog.tables, *compared} if schema == function.actual_schema]
    named = [table for table in tables if is_name_of(function.name, f"{PREFIX}{purpose}", table)]
    return not named or (function.actual_schema, max(named, key=len)) in compared


def _functions_of_filtered_tables(diff: DiffContext) -> set[ResolvedName]:
    """Return the functions of the models, including those of tables that the filters of ``env.py`` leave out."""
    return {
        (diff.catalog.resolve((table.schema, table.name))[0], each.signature)
        for table in diff.context.sorted_tables
        for each in objects_of(table)
        if isinstance(each, Function)
    }
