"""Keeps the tables of schedules while they have rows, even if the models do not have these tables.

A MetaData gets these tables when a schedule is constructed. An ``env.py`` that imports the models, but not the module
with the schedules, does not have them, so Alembic would drop them, with all schedules that were added at run time.
"""

from __future__ import annotations

import logging

import sqlalchemy as sa

from sqlaqueue.alembic.compare.diff_context import DiffContext
from sqlaqueue.postgresql.ddl import bare_table
from sqlaqueue.queue.names import SCHEDULE, TICK

# Below the logger of Alembic: by default, fileConfig() in env.py disables those that alembic.ini does not name.
log = logging.getLogger("alembic.autogenerate.sqlaqueue")


def keep_tables_with_schedules(diff: DiffContext) -> None:
    """Remove the operations that drop these tables, and let nothing compare them, where there are schedules."""
    removed = [table for table in diff.tables if table.model_table is None and table.name in {SCHEDULE, TICK}]
    schemas = {diff.catalog.resolve(table.qualified_name)[0] for table in removed}
    kept_schemas = {schema for schema in schemas if _has_schedules(diff, schema)}
    kept = [table for table in removed if diff.catalog.resolve(table.qualified_name)[0] in kept_schemas]
    if not kept:
        return
    diff.tables = [table for table in diff.tables if table not in kept]
    # Named one by one: a function is kept even if its triggers were dropped by hand.
    diff.kept_functions |= {
        (schema, name)
        for schema, name in diff.catalog.functions
        if schema in kept_schemas and name.startswith(f"{SCHEDULE}_")
    }
    diff.upgrade.ops[:] = [op for op in diff.upgrade.ops if not any(table.is_dropped_by(op) for table in kept)]
    names = sorted(".".join(filter(None, table.qualified_name)) for table in kept)
    log.warning(
        "the tables %s are in no model, but are not dropped: there are schedules in them, and those that were added or "
        "changed at run time would be lost. Import the module that declares the schedules in env.py; or, if they are "
        "not needed any more, delete the rows of %s to have the tables dropped",
        ", ".join(names),
        SCHEDULE,
    )


def _has_schedules(diff: DiffContext, schema: str) -> bool:
    connection = diff.context.connection
    if connection is None or not sa.inspect(connection).has_table(SCHEDULE, schema=schema):
        return False
    rows = sa.exists(sa.select(sa.literal_column("1")).select_from(bare_table(SCHEDULE, schema)))
    # Alembic compares schemas by their real names.
    untranslated = {"schema_translate_map": None}
    return bool(connection.scalar(sa.select(rows), execution_options=untranslated))
