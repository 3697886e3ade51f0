"""Compares storage parameters of tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import sqlalchemy as sa

from sqlaqueue.alembic import operations as ops
from sqlaqueue.alembic.compare.diff_context import ComparedTable, DiffContext
from sqlaqueue.postgresql.catalog_schemas import PREFIX
from sqlaqueue.postgresql.ddl import StorageParameters

log = logging.getLogger(__name__)

_BOOLEANS = {"on": "true", "yes": "true", "1": "true", "off": "false", "no": "false", "0": "false"}


def compare_storage_parameters(diff: DiffContext) -> None:
    """Compare the storage parameters of queues.

    Tables of this library have the parameters of the models and no others. Those of other tables are compared if the
    model sets any: otherwise they may have been set by an administrator.
    """
    for table in diff.tables:
        existing = diff.catalog.storage_parameters_of(table.qualified_name)
        if table.model_table is None:
            if existing and (table.name.startswith(PREFIX) or diff.was_queue(table)):
                undo = ops.SetStorageParameters(table.name, dict(existing), schema=table.schema)
                diff.before.append(ops.PerDirection(down=[undo]))
            continue
        if not table.belongs_to_queue:
            continue
        wanted = _wanted(table, table.model_table)
        if wanted or table.name.startswith(PREFIX):
            _set_parameters(diff, table, existing, wanted)


def _wanted(table: ComparedTable, model_table: sa.Table) -> dict[str, str]:
    wanted = {
        name: value
        for each in table.objects
        if isinstance(each, StorageParameters)
        for name, value in each.parameters.items()
    }
    if table.database_table is not None:
        # For a new table, Alembic writes these into CREATE TABLE.
        given = model_table.dialect_options["postgresql"].get("with") or {}
        wanted |= {str(name): str(value) for name, value in given.items()}
    return {name.lower(): value for name, value in wanted.items()}


def _set_parameters(
    diff: DiffContext, table: ComparedTable, existing: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    names = [name for name in {**wanted, **existing} if not _equal(existing.get(name), wanted.get(name))]
    if names:
        if table.database_table is not None:
            log.info("Detected changed storage parameters of %r: %s", table.name, ", ".join(names))
        diff.after.append(
            ops.SetStorageParameters(
                table.name,
                {name: wanted.get(name) for name in names},
                schema=table.schema,
                existing={name: existing.get(name) for name in names},
            )
        )


def _equal(a: str | None, b: str | None) -> bool:
    if a is None or b is None:
        return a is b
    try:
        return float(a) == float(b)
    except ValueError:
        return _BOOLEANS.get(a.lower(), a.lower()) == _BOOLEANS.get(b.lower(), b.lower())
