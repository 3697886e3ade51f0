"""Triggers that do not fire, and functions of another version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog import queue_objects
from sqlaqueue.postgresql.ddl import wake_triggers
from sqlaqueue.postgresql.ddl.attach import objects_of
from sqlaqueue.postgresql.ddl.objects import Function, Trigger, TriggerFunction, version_in
from sqlaqueue.postgresql.diagnosis.relations import quoted
from sqlaqueue.postgresql.diagnosis.sql import name_of, sql_texts
from sqlaqueue.queue.diagnosis_protocol import FunctionFault, TriggerFault


def trigger_faults(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[TriggerFault]:
    """Return the triggers that are missing or disabled; two statements for each table that has any."""
    faults = []
    for table in tables:
        triggers = [each for each in objects_of(table) if isinstance(each, Trigger)]
        if not triggers:
            continue
        there = queue_objects.trigger_names(connection, table)
        enabled = queue_objects.trigger_names(connection, table, enabled_only=True)
        for each in triggers:
            if each.name in enabled:
                continue
            name = name_of(connection, table)
            enable = f"ALTER TABLE {name} ENABLE TRIGGER {quoted(each.name)};"
            # Its function may be missing as well, and both statements may be repeated.
            create = sql_texts(connection, [*each.function.created(), replace(each, replace=True)])
            faults.append(
                TriggerFault(
                    state="disabled" if each.name in there else "missing",
                    name=each.name,
                    table=name,
                    wakes=each.name.startswith(wake_triggers.PREFIX),
                    repair=enable if each.name in there else create,
                )
            )
    return faults


def function_faults(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[FunctionFault]:
    """Return the functions that are missing or of another version."""
    faults = []
    for table in tables:
        functions = [each for each in objects_of(table) if isinstance(each, Function)]
        called = [each for each in functions if not isinstance(each, TriggerFunction)]
        if not functions:
            continue
        comments = queue_objects.function_comments(
            connection, table, [each.name for each in functions if each not in called]
        )
        existing = queue_objects.existing_functions(connection, table, called)
        comments |= {each.name: existing[each.signature].comment for each in called if each.signature in existing}
        for each in functions:
            wanted, found = version_in(each.comment), version_in(comments.get(each.name))
            if each.name in comments and found == wanted:
                continue
            faults.append(
                FunctionFault(
                    state="missing" if each.name not in comments else "outdated" if found < wanted else "newer",
                    kind=each.kind,
                    name=each.name,
                    found=found,
                    wanted=wanted,
                    wakes=each.name.startswith(wake_triggers.PREFIX),
                    repair=sql_texts(connection, each.created()),
                )
            )
    return faults
