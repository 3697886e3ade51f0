"""Compare the functions and triggers of queues with the database, and restore what it has for a downgrade."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator

from alembic.operations import MigrateOperation
from sqlalchemy.sql.compiler import IdentifierPreparer

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare import ComparedTable, DiffContext, normalizing
from sqlaqueue.postgresql.catalog_schemas import PREFIX, ReflectedFunction, ReflectedTrigger, ResolvedName
from sqlaqueue.postgresql.ddl import Function, objects_of, version_in
from sqlaqueue.sql.types import is_name_of

_NOT_ENABLED = {"D": "DISABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}
"""The command that gives a new trigger a state other than enabled, by ``pg_trigger.tgenabled``."""


def create_function(function: ReflectedFunction) -> MigrateOperation:
    has_expected_path = not function.has_search_path
    if function.definer or (function.returns == "trigger" and not function.bare):
        has_expected_path = function.restricted if function.definer else function.has_session_search_path
    if function.plain and has_expected_path and function.source.startswith("\n"):
        return ops.CreateFunction(
            function.name,
            function.source[1:],
            arguments=function.arguments,
            returns=function.returns,
            comment=function.comment,
            definer=function.definer,
            bare=function.bare,
            schema=function.schema,
        )
    return ops.OperationList(
        [ops.ExecuteVerbatim(function.definition), ops.ExecuteVerbatim(function.comment_statement)]
    )


def restore_function(preparer: IdentifierPreparer, function: ReflectedFunction) -> MigrateOperation:
    """Return the operation that restores a function which the migration has replaced.

    CREATE OR REPLACE keeps the privileges of the function in the database, so those of PUBLIC are restored as well.
    """
    name = _qualified(preparer, function.schema, function.name)
    command, preposition = ("GRANT", "TO") if function.public else ("REVOKE", "FROM")
    privileges = ops.ExecuteVerbatim(f"{command} ALL ON FUNCTION {name}({function.arguments}) {preposition} PUBLIC")
    return ops.OperationList([create_function(function), privileges])


def create_trigger(preparer: IdentifierPreparer, trigger: ReflectedTrigger) -> MigrateOperation:
    if trigger.event:
        triggers = {trigger.name: trigger_definition(trigger)}
        create: MigrateOperation = ops.CreateTriggers(trigger.table, trigger.function, triggers, schema=trigger.schema)
    else:
        create = ops.ExecuteVerbatim(trigger.definition)
    if trigger.enabled not in _NOT_ENABLED:
        return create
    table, name = _qualified(preparer, trigger.schema, trigger.table), preparer.quote(trigger.name)
    alter = ops.ExecuteVerbatim(f"ALTER TABLE {table} {_NOT_ENABLED[trigger.enabled]} TRIGGER {name}")
    return ops.OperationList([create, alter])


def trigger_definition(trigger: ReflectedTrigger) -> ops.TriggerDefinition:
    return ops.trigger_definition(trigger.event, dict(trigger.transition_tables), trigger.when)


def _qualified(preparer: IdentifierPreparer, schema: str | None, name: str) -> str:
    return ".".join(map(preparer.quote, filter(None, (schema, name))))


log = logging.getLogger(__name__)


def compare_functions(diff: DiffContext) -> None:
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
                bare=function.bare,
                schema=table.schema,
                undo=None if existing is None else restore_function(preparer, existing),
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
        undo = create_function(function)
        diff.before.append(
            ops.DropFunction(function.name, arguments=function.arguments, schema=function.schema, undo=undo)
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


def compare_triggers(diff: DiffContext) -> None:
    dropped: list[MigrateOperation] = []
    for table in diff.tables:
        existing = {
            name: trigger
            for name, trigger in diff.catalog.triggers_of(table.qualified_name).items()
            if name.startswith(PREFIX) or name in table.triggers
        }
        removed = [trigger for name, trigger in existing.items() if name not in table.triggers]
        if removed:
            log.info("Detected removed triggers of %r: %s", table.name, ", ".join(each.name for each in removed))
            dropped += _drop(diff, table, removed)
        changed = _changed(diff, table, existing)
        if changed:
            log.info("Detected changed triggers of %r: %s", table.name, ", ".join(each.name for each in changed))
            dropped += _drop(diff, table, changed)
        _create(diff, table, existing.keys() - {each.name for each in changed})
    diff.before += dropped


def _drop(diff: DiffContext, table: ComparedTable, triggers: list[ReflectedTrigger]) -> Iterator[ops.DropTriggers]:
    preparer = diff.context.dialect.identifier_preparer
    for function in dict.fromkeys(each.function for each in triggers):
        dropped = [each for each in triggers if each.function == function]
        definitions = {each.name: trigger_definition(each) for each in dropped}
        if all(each.event and each.enabled == "O" for each in dropped):
            undo: MigrateOperation = ops.CreateTriggers(table.name, function, definitions, schema=table.schema)
        else:
            undo = ops.OperationList([create_trigger(preparer, each) for each in dropped])
        yield ops.DropTriggers(table.name, [*definitions], schema=table.schema, undo=undo)


def _changed(diff: DiffContext, table: ComparedTable, existing: dict[str, ReflectedTrigger]) -> list[ReflectedTrigger]:
    """Return the triggers to create again: those that differ, and those whose condition names a retyped column.

    PostgreSQL refuses to change the type of a column while the condition of a trigger names it.
    """
    pairs = [(existing[name], trigger) for name, trigger in table.triggers.items() if name in existing]
    retyped = table.retyped_columns()
    changed = [each for each, trigger in pairs if not each.equals(trigger) or retyped & {*each.columns}]
    with_condition = [(each, trigger) for each, trigger in pairs if each not in changed and each.when is not None]
    if with_condition and diff.context.connection is not None:
        with normalizing(diff.context.connection, table.qualified_name) as normalizer:
            for each, trigger in with_condition:
                normalize = functools.partial(normalizer.trigger_condition, trigger.event)
                if not normalizer.same(normalize, each.when, trigger.when):
                    changed.append(each)
    return changed


def _create(diff: DiffContext, table: ComparedTable, existing: Collection[str]) -> None:
    by_function: dict[str, dict[str, ops.TriggerDefinition]] = {}
    for name, trigger in table.triggers.items():
        if name not in existing:
            definition = ops.trigger_definition(trigger.event, trigger.rows, trigger.when)
            by_function.setdefault(trigger.function.name, {})[name] = definition
    for function, triggers in by_function.items():
        if table.database_table is not None:
            log.info("Detected missing triggers of %r: %s", table.name, ", ".join(triggers))
        diff.after.append(ops.CreateTriggers(table.name, function, triggers, schema=table.schema))
