"""Compares triggers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator

from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare import restore
from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext
from sqlaqueue.alembic.compare.normalize import normalizing
from sqlaqueue.postgresql.catalog_schemas import PREFIX, ExpressionNormalizer, ReflectedTrigger
from sqlaqueue.postgresql.ddl import Trigger

log = logging.getLogger(__name__)


def compare_triggers(diff: DiffContext) -> None:
    """Create, replace and drop triggers."""
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
        definitions = {each.name: restore.trigger_definition(each) for each in dropped}
        if all(each.event and each.enabled == "O" for each in dropped):
            undo: MigrateOperation = ops.CreateTriggers(table.name, function, definitions, schema=table.schema)
        else:
            undo = ops.OperationList([restore.create_trigger(preparer, each) for each in dropped])
        yield ops.DropTriggers(table.name, [*definitions], schema=table.schema, undo=undo)


def _changed(diff: DiffContext, table: ComparedTable, existing: dict[str, ReflectedTrigger]) -> list[ReflectedTrigger]:
    """Return the triggers to create again: those that differ, and those whose condition names a retyped column.

    PostgreSQL refuses to change the type of a column while the condition of a trigger names it.
    """
    pairs = [(existing[name], trigger) for name, trigger in table.triggers.items() if name in existing]
    retyped = {
        op.column_name
        for op in table.modify_ops.ops
        if isinstance(op, alembic_ops.AlterColumnOp) and op.modify_type is not None
    }
    changed = [each for each, trigger in pairs if not each.equals(trigger) or retyped & {*each.columns}]
    with_condition = [(each, trigger) for each, trigger in pairs if each not in changed and each.when is not None]
    if with_condition and diff.context.connection is not None:
        with normalizing(diff.context.connection, table.qualified_name) as normalizer:
            changed += [each for each, trigger in with_condition if not _same_condition(normalizer, each, trigger)]
    return changed


def _same_condition(normalizer: ExpressionNormalizer, existing: ReflectedTrigger, trigger: Trigger) -> bool:
    normalize = functools.partial(normalizer.trigger_condition, trigger.event)
    return normalizer.same(normalize, existing.when, trigger.when)


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
