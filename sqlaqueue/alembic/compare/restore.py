"""Operations that restore a function or a trigger as the database has it, for downgrades."""

from __future__ import annotations

from alembic.operations import MigrateOperation
from sqlalchemy.sql.compiler import IdentifierPreparer

from sqlaqueue.alembic import operations as ops
from sqlaqueue.postgresql.catalog_schemas import ReflectedFunction, ReflectedTrigger

_NOT_ENABLED = {"D": "DISABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}
"""The command that gives a new trigger a state other than enabled, by ``pg_trigger.tgenabled``."""


def create_function(function: ReflectedFunction) -> MigrateOperation:
    """Return the operation that creates a dropped function as it was."""
    has_expected_path = not function.has_search_path
    if function.definer or function.returns == "trigger":
        has_expected_path = function.restricted if function.definer else function.has_session_search_path
    if function.plain and has_expected_path and function.source.startswith("\n"):
        return ops.CreateFunction(
            function.name,
            function.source[1:],
            arguments=function.arguments,
            returns=function.returns,
            comment=function.comment,
            definer=function.definer,
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
    """Return the operation that creates a dropped trigger as it was."""
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
    """Return the definition of a trigger for the operation that creates it."""
    return ops.trigger_definition(trigger.event, dict(trigger.transition_tables), trigger.when)


def _qualified(preparer: IdentifierPreparer, schema: str | None, name: str) -> str:
    return ".".join(map(preparer.quote, filter(None, (schema, name))))
