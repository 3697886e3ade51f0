"""Whether the database has the tables, columns and triggers of a queue, and all of them in one schema."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.postgresql.catalog import queue_objects
from sqlaqueue.postgresql.checks.placement import misplaced
from sqlaqueue.postgresql.ddl import wake_triggers
from sqlaqueue.postgresql.ddl.attach import functions_of, objects_of
from sqlaqueue.postgresql.ddl.objects import Trigger
from sqlaqueue.queue.spec import QueueSpec

UPDATE_COMMAND: str = "`alembic revision --autogenerate -m sqlaqueue && alembic upgrade head`"
"""The command that migrates a database, in a project whose ``env.py`` imports the plug-in."""


def missing_objects(session: Session | sa.Connection, spec: QueueSpec) -> list[str]:
    """Return the tables that a queue needs and the database lacks, or else its missing columns, triggers and functions.

    The triggers that wake idle Consumers are left out: without them Consumers poll, see :mod:`.versions`.
    """
    tables = [spec.table, *spec.side_tables.values()]
    missing = _missing_tables(session, tables)
    if missing:
        return missing
    triggers = queue_objects.trigger_names(session, spec.table)
    names = [each.name for each in objects_of(spec.table) if isinstance(each, Trigger)]
    wanted = [name for name in names if not name.startswith(wake_triggers.PREFIX)]
    called = functions_of(spec)
    functions = queue_objects.existing_functions(session, spec.table, called)
    return [
        *_missing_columns(session, tables),
        *(f"the trigger {name} of {spec.table.fullname}" for name in wanted if name not in triggers),
        *(
            f"the function {each.signature} of {each.table.fullname}"
            for each in called
            if each.signature not in functions
        ),
    ]


def check_complete(session: Session | sa.Connection, spec: QueueSpec) -> None:
    """Raise an error if the database lacks tables, columns, triggers or functions of a queue.

    :raises DatabaseNotReadyError: naming what is missing, and the command that creates it.
    """
    _refuse(missing_objects(session, spec), spec.model.__name__)


def check_tables(session: Session | sa.Connection, tables: Sequence[sa.Table], needed_by: str) -> None:
    """Raise an error if the database lacks tables or columns of them.

    :param needed_by: what needs them, for the error.
    :raises DatabaseNotReadyError: naming what is missing, and the command that creates it.
    """
    _refuse(_missing_tables(session, tables) or _missing_columns(session, tables), needed_by)


def _missing_tables(session: Session | sa.Connection, tables: Sequence[sa.Table]) -> list[str]:
    missing = queue_objects.missing_tables(session, tables)
    return [f"the table {table.fullname}{other_schemas(session, table)}" for table in missing]


def _missing_columns(session: Session | sa.Connection, tables: Sequence[sa.Table]) -> list[str]:
    columns = queue_objects.missing_columns(session, tables)
    return [f"the column {column.table.fullname}.{column.name}" for column in columns]


def _refuse(missing: Sequence[str], needed_by: str) -> None:
    if missing:
        msg = (
            f"the database lacks what {needed_by} needs: {', '.join(missing)}; {UPDATE_COMMAND} makes it, where env.py "
            "has the plug-in sqlaqueue.alembic; metadata.create_all(engine) makes tables that are not there yet, once "
            "the classes and Schedules are defined"
        )
        raise DatabaseNotReadyError(msg)


def split_schemas(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return what is wrong if a queue's tables are in different schemas, or on the wrong nodes of Citus; else None.

    The search path finds them in different schemas when its first one has side tables of other queues, and a later one
    has the jobs.
    """
    mine = [table for table in spec.side_tables.values() if table.schema == spec.table.schema]
    schemas, has_citus = queue_objects.schemas_and_citus(session, [spec.table, *mine])
    home = schemas[spec.table.name]
    strangers = [f"{name} in {schema}" for name, schema in schemas.items() if schema != home]
    if not strangers:
        return misplaced(session, spec) if has_citus else None
    path = session.execute(sa.select(sa.func.current_setting(sa.literal_column("'search_path'")))).scalar_one()
    return (
        f"{spec.model.__name__}: by the search_path of this session ({path}) the table {spec.table.name} is found in "
        f"the schema {home}, but {', '.join(strangers)}; they have to be in one schema: let the search_path begin with "
        f"{home}, or name it in the model, as __table_args__ = {{'schema': {home!r}}}"
    )


def other_schemas(session: Session | sa.Connection, table: sa.Table) -> str:
    """Return a hint at the schemas outside the search path that have a table of this name."""
    if table.schema is not None:
        return ""
    hints = [
        f"it is in the schema {schema}, "
        + ("to which the search_path does not lead" if may else "which the role may not use")
        for schema, may in queue_objects.schemas_with_table(session, table.name)
    ]
    return f" ({'; '.join(hints)})" if hints else ""
