"""What the start of a Consumer refuses or warns of, in words: whatever the database lacks for its queue.

Other databases have such a module too, see :class:`~sqlaqueue.postgresql.checks_of.Checks`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.postgresql import catalog
from sqlaqueue.postgresql.catalog import Placement, foreign_keys_to, placements, table_comments
from sqlaqueue.postgresql.catalog_indexes import partitioned_tables
from sqlaqueue.postgresql.ddl import UPDATE_COMMAND, Function, Trigger, TriggerFunction, functions_of, objects_of
from sqlaqueue.postgresql.faults import consequence_of, only_wakes, other_schemas, other_versions, tables_apart
from sqlaqueue.postgresql.faults_of_indexes import concurrently, has_index, missing_indexes, unique_index, validity_of
from sqlaqueue.postgresql.privileges import (
    grants_for,
    missing_grants,
    missing_schema_grants,
    policies_for,
    row_security,
)
from sqlaqueue.queue.names import CONTROL, SCHEDULE
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import UNDEFINED_COLUMN, UNDEFINED_TABLE, sqlstate
from sqlaqueue.sql.types import NEUTRAL
from sqlaqueue.texts import older_models, states_text

__all__ = [
    "check_complete",
    "check_tables",
    "foreign_keys_to",
    "grants_for",
    "has_index",
    "missing_grants",
    "missing_index_advice",
    "missing_indexes",
    "missing_objects",
    "missing_schema_grants",
    "outdated_functions",
    "outdated_triggers_of",
    "policies_for",
    "row_security",
    "split_schemas",
    "table_comments",
    "undefined_object_advice",
]


def missing_objects(session: Session | sa.Connection, spec: QueueSpec) -> list[str]:
    """Return the tables that a queue needs and the database lacks, or else its missing columns, triggers and functions.

    The triggers that wake idle Consumers are left out: without them Consumers poll.
    """
    tables = [spec.table, *spec.side_tables.values()]
    missing = _missing_tables(session, tables)
    if missing:
        return missing
    triggers = catalog.trigger_names(session, spec.table)
    names = (each.name for each in objects_of(spec.table) if isinstance(each, Trigger))
    called = functions_of(spec)
    functions = catalog.existing_functions(session, spec.table, called)
    return [
        *_missing_columns(session, tables),
        *(
            f"the trigger {name} of {spec.table.fullname}"
            for name in names
            if not only_wakes(name) and name not in triggers
        ),
        *(
            f"the function {each.signature} of {each.table.fullname}"
            for each in called
            if each.signature not in functions
        ),
    ]


def check_complete(session: Session | sa.Connection, spec: QueueSpec) -> None:
    _refuse(missing_objects(session, spec), spec.model.__name__)


def check_tables(session: Session | sa.Connection, tables: Sequence[sa.Table], needed_by: str) -> None:
    _refuse(_missing_tables(session, tables) or _missing_columns(session, tables), needed_by)


def _missing_tables(session: Session | sa.Connection, tables: Sequence[sa.Table]) -> list[str]:
    missing = catalog.missing_tables(session, tables)
    return [f"the table {table.fullname}{other_schemas(session, table)}" for table in missing]


def _missing_columns(session: Session | sa.Connection, tables: Sequence[sa.Table]) -> list[str]:
    columns = catalog.missing_columns(session, tables)
    return [f"the column {column.table.fullname}.{column.name}" for column in columns]


def _refuse(missing: Sequence[str], needed_by: str) -> None:
    if missing:
        msg = (
            f"the database lacks what {needed_by} needs: {', '.join(missing)}; {UPDATE_COMMAND} makes it, where env.py "
            "has the plug-in sqlaqueue.alembic; metadata.create_all(engine) makes tables that are not there yet, once "
            "the classes and Schedules are defined. If a newer version of the program has dropped it, start "
            "that version"
        )
        raise DatabaseNotReadyError(msg)


def split_schemas(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return what is wrong if a queue's tables are in different schemas, or on the wrong nodes of Citus; else None."""
    home, others, has_citus = tables_apart(session, spec)
    if not others:
        return misplaced(session, spec) if has_citus else None
    path = session.execute(sa.select(sa.func.current_setting(sa.literal_column("'search_path'")))).scalar_one()
    return (
        f"{spec.model.__name__}: by the search_path of this session ({path}) the table {spec.table.name} is found in "
        f"the schema {home}, but {', '.join(others)}; they have to be in one schema: let the search_path start with "
        f"{home}, or name it in the model, as __table_args__ = {{'schema': {home!r}}}"
    )


def outdated_triggers_of(session: Session | sa.Connection, table: sa.Table, needed_by: str) -> str | None:
    """Return what is wrong with the triggers of one table, and how to fix it; None if nothing is.

    It sends two small queries of the catalog, and none for a table without triggers.

    :param needed_by: what needs them, for the text.
    """
    objects = objects_of(table)
    functions = [each for each in objects if isinstance(each, TriggerFunction)]
    triggers = [each.name for each in objects if isinstance(each, Trigger)]
    if not functions and not triggers:
        return None
    comments = catalog.function_comments(session, table, [each.name for each in functions])
    other_version = _other_version(table, functions, comments, needed_by)
    if other_version is not None:
        return other_version
    enabled = catalog.trigger_names(session, table, enabled_only=True)
    silent = [name for name in triggers if name not in enabled]
    if not silent:
        return None
    there = catalog.trigger_names(session, table)
    missing, disabled = ([each for each in silent if (each in there) is found] for found in (False, True))
    what = states_text("trigger", "triggers", {"missing": missing, "disabled": disabled})
    return _outdated(table, needed_by, what, silent)


def outdated_functions(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    functions = functions_of(spec)
    existing = catalog.existing_functions(session, spec.table, functions)
    comments = {each.name: existing[each.signature].comment for each in functions if each.signature in existing}
    return _other_version(spec.table, functions, comments, spec.model.__name__)


def _other_version(
    table: sa.Table, functions: Sequence[Function], comments: Mapping[str, str | None], needed_by: str
) -> str | None:
    for function, state, found, wanted in other_versions(functions, comments):
        if state == "newer":
            return (
                f"{needed_by}: the {function.kind} {function.name} is of version {found}, and this process knows "
                f"version {wanted}: its sqlaqueue is older than the one that the database was migrated for; upgrade it"
            )
        there = "is missing" if state == "missing" else f"is of version {found}"
        what = f"the {function.kind} {function.name} {there}, and version {wanted} is needed"
        return _outdated(table, needed_by, what, [function.name])
    return None


def undefined_object_advice(error: BaseException, spec: QueueSpec, *, worked: bool = False) -> str | None:
    """Return how to fix an error about a table or a column that does not exist; None for any other error.

    A migration of a newer version of the program drops columns that processes of the older version use, and one that
    changes a queue's strategy drops tables.

    :param worked: whether this process has used the queue before.
    """
    if not isinstance(error, DBAPIError) or sqlstate(error) not in {UNDEFINED_TABLE, UNDEFINED_COLUMN}:
        return None
    return f"{spec.model.__name__}: {str(error.orig).splitlines()[0]}; {older_models(worked=worked)}"


def _outdated(table: sa.Table, needed_by: str, what: str, names: Sequence[str]) -> str:
    consequence = "" if table.name == SCHEDULE else f"; until then {consequence_of(names)}"
    return (
        f"{needed_by}: the table {table.fullname} is not up to date: {what}. Run {UPDATE_COMMAND}; "
        f"env.py needs the line `import sqlaqueue.alembic` for that{consequence}"
    )


def missing_index_advice(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return how to create the indexes that are missing, and to rebuild those that are invalid; None without any."""
    faulty = missing_indexes(session, spec)
    if not faulty:
        return None
    unique = unique_index(spec)
    is_invalid = {index: validity_of(session, index) is False for index in faulty}
    names = {index: f"{index.name} of {index.table.fullname}" for index in faulty if index.table is not None}
    missing, invalid = ([names[each] for each in names if is_invalid[each] is given] for given in (False, True))
    consequences = ["claims may read the whole table"] if any(index is not unique for index in faulty) else []
    if any(index is unique for index in faulty):
        consequences.append("jobs are not unique, and enqueue() fails")
    partitioned = partitioned_tables(session, [index.table for index in names if index.table is not None])
    statements = "; ".join(_repair(each, is_invalid=is_invalid[each], partitioned=partitioned) for each in faulty)
    migrate = f"Run {UPDATE_COMMAND}, where env.py has the plug-in sqlaqueue.alembic, or let" if missing else "Let"
    return (
        f"{spec.model.__name__}: {states_text('index', 'indexes', {'missing': missing, 'invalid': invalid})}, "
        f"so {', '.join(consequences)}. {migrate} the owner execute, not in a transaction: {statements}"
    )


def _repair(index: sa.Index, *, is_invalid: bool, partitioned: Collection[sa.Table]) -> str:
    element = sa.schema.DropIndex(index) if is_invalid else sa.schema.CreateIndex(index)
    statement = str(element.compile(dialect=NEUTRAL)).strip().replace("DROP INDEX", "REINDEX INDEX", 1)
    return statement if index.table in partitioned else concurrently(statement)


# -- Citus -------------------------------------------------------------------------------------------------------------
# Whether Citus places the tables of a queue where its Consumers can serve them.


def misplaced(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return why no Consumer can serve a queue in a database with Citus, and what to do; None if one can.

    :param spec: the queue; of a distributed table with the shard that its statements are limited to.
    """
    tables = [spec.table, *spec.side_tables.values()]
    found = dict(zip(tables, placements(session, tables), strict=True))
    reason = next(reasons(spec, found), None)
    return None if reason is None else f"{spec.model.__name__}: {reason}"


def reasons(spec: QueueSpec, found: Mapping[sa.Table, Placement]) -> Iterator[str]:
    """Yield why no Consumer can serve a queue whose tables are placed so."""
    table, mine = spec.table.fullname, found[spec.table]
    if mine.kind == "reference":
        yield (
            f"{table} is a reference table of Citus, of which each claim and each insert waits for every other one; "
            f"create it again as a local table, in a distributed schema, or distributed by a column of its key"
        )
    elif mine.kind == "distributed":
        yield from _of_columns(spec, mine)
        yield from _on_shards(spec, table)
        yield from _beside_distributed(spec, found)
    else:
        if spec.shard is not None:
            yield _not_distributed(spec, spec.shard[0], mine)
        if mine.kind == "one shard":
            yield from _on_shards(spec, table)
        for other, placement in found.items():
            if (placement.kind, placement.colocation) != (mine.kind, mine.colocation):
                where = "a local table" if mine.kind == "local" else "on one shard"
                yield (
                    f"{other.fullname} is {_text(placement)} and {table} is {where}, so its statements would need "
                    f"several nodes; create both {'as local tables' if mine.kind == 'local' else 'in one schema'}"
                )


def _not_distributed(spec: QueueSpec, column: sa.Column[Any], mine: Placement) -> str:
    table, given, first = spec.table.fullname, _attribute(spec, column), ""
    if mine.kind == "local":
        first = f"execute SELECT create_distributed_table('{table}', '{column.name}'), or "
        if spec.config.notify:
            first = f"use QueueConfig(notify=False), migrate, as Citus distributes no table with triggers, and {first}"
    return (
        f"the Consumer has distribution=Distribution({given!r}), but {table} is not distributed by a column; "
        f"{first}leave the argument out"
    )


def _attribute(spec: QueueSpec, column: sa.Column[Any]) -> str:
    name: str = spec.mapper.get_property_by_column(column).key
    return name


def _text(placement: Placement) -> str:
    return {
        "local": "a local table",
        "reference": "a reference table",
        "one shard": "on another shard",
        "distributed": f"distributed by {placement.column}",
    }[placement.kind]


def _of_columns(spec: QueueSpec, mine: Placement) -> Iterator[str]:
    column, table = mine.column, spec.table.fullname
    key = next((key for key in spec.keys if key.name == column), None)
    if key is None or len(spec.keys) == 1:
        keys = ", ".join(key.name for key in spec.keys)
        yield (
            f"{table} is distributed by {column}, and its key is {keys}; distribute it by one of several columns of "
            "the key, so that the jobs with one value are on one shard"
        )
    elif spec.shard is None:
        yield (
            f"{table} is distributed by {column}, and Citus locks rows on one shard only; give the Consumer "
            f"distribution=Distribution({_attribute(spec, key)!r}, values), with the values to work on"
        )
    elif spec.shard[0] is not key:
        given = spec.shard[0]
        yield (
            f"{table} is distributed by {column}, but the Consumer has Distribution({_attribute(spec, given)!r}); give "
            f"it distribution=Distribution({_attribute(spec, key)!r}, values), with the values to work on, or execute "
            f"SELECT alter_distributed_table('{table}', distribution_column := '{given.name}')"
        )


def _on_shards(spec: QueueSpec, table: str) -> Iterator[str]:
    """Yield what the config of a queue on shards must not have."""
    config = spec.config
    if config.strategy != "update_status":
        yield (
            f"{table} is on shards of Citus, where strategy={config.strategy!r} cannot hold rows in a transaction; use "
            'strategy="update_status"'
        )
    refused = {
        "notify=True": config.notify,
        "unique": config.unique is not None,
        " and ".join(spec.flow_rules): bool(spec.flow_rules),
        "attempt_history": config.attempt_history is not None,
        "statistics": config.statistics,
        "waits_for": bool(config.waits),
    }
    for option, is_used in refused.items():
        if is_used:
            instead = "use notify=False, so that Consumers poll" if option == "notify=True" else "leave it out"
            yield (
                f"{table} is on shards of Citus, which carries out neither the triggers nor the statements of {option} "
                f"in QueueConfig; {instead}, or create it as a local table"
            )


def _beside_distributed(spec: QueueSpec, found: Mapping[sa.Table, Placement]) -> Iterator[str]:
    for other, placement in found.items():
        name = other.fullname
        if other.name == CONTROL and placement.kind != "reference":
            yield (
                f"{name} is {_text(placement)}, but each claim reads it on the shard; execute "
                f"SELECT create_reference_table('{name}')"
            )
        elif other is not spec.table and other.name != CONTROL and placement.kind != "local":
            yield (
                f"{name} is {_text(placement)}, so that the heartbeats of all Consumers wait for each other or for "
                f"every node; execute SELECT undistribute_table('{name}')"
            )
