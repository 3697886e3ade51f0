"""What is wrong with a queue's tables, columns, triggers and functions in the database, each with its repair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.postgresql import catalog, catalog_schemas
from sqlaqueue.postgresql import triggers as triggers_module
from sqlaqueue.postgresql.catalog import Placement, placements, schemas_of
from sqlaqueue.postgresql.catalog_schemas import ReflectedFunction, ReflectedTrigger
from sqlaqueue.postgresql.catalog_text import (
    creation,
    literal,
    name_of,
    quoted,
    sql_text,
    sql_texts,
    table_name,
    table_oid,
)
from sqlaqueue.postgresql.ddl import (
    Function,
    SqlTemplate,
    Trigger,
    TriggerFunction,
    functions_of,
    objects_of,
    version_in,
)
from sqlaqueue.postgresql.facts import (
    AlteredObject,
    FunctionFault,
    MissingDefault,
    MissingObject,
    RefusedState,
    SplitSchemas,
    TriggerFault,
)
from sqlaqueue.queue.names import CONTROL, SCHEDULE
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.errors import UNDEFINED_COLUMN, UNDEFINED_TABLE, sqlstate
from sqlaqueue.sql.types import NEUTRAL
from sqlaqueue.texts import states_text

# -- placement ---------------------------------------------------------------------------------------------------------
# Whether Citus places the tables of a queue where its Consumers can serve them.


def misplaced(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return why no Consumer can serve a queue in a database with Citus, and what to do; None if one can.

    :param spec: the queue; of a distributed table with the shard that its statements are limited to.
    """
    tables = [spec.table, *spec.side_tables.values()]
    found = dict(zip(tables, placements(session, tables), strict=True))
    reason = next(_reasons(spec, found), None)
    return None if reason is None else f"{spec.model.__name__}: {reason}"


def _reasons(spec: QueueSpec, found: Mapping[sa.Table, Placement]) -> Iterator[str]:
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
    texts = {
        "local": "a local table",
        "reference": "a reference table",
        "one shard": "on another shard",
        "distributed": f"distributed by {placement.column}",
    }
    return texts[placement.kind]


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
            f"distribution=Distribution({_attribute(spec, key)!r}, values), with the values to serve"
        )
    elif spec.shard[0] is not key:
        given = spec.shard[0]
        yield (
            f"{table} is distributed by {column}, but the Consumer has Distribution({_attribute(spec, given)!r}); give "
            f"it distribution=Distribution({_attribute(spec, key)!r}, values), with the values to serve, or execute "
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
        " and ".join(spec.flow_options): bool(spec.flow_options),
        "attempt_history": config.attempt_history is not None,
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


# -- missing objects ---------------------------------------------------------------------------------------------------
# Whether the database has the tables, columns and triggers of a queue, and all of them in one schema.


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
    triggers = catalog.trigger_names(session, spec.table)
    names = [each.name for each in objects_of(spec.table) if isinstance(each, Trigger)]
    wanted = [name for name in names if not name.startswith(triggers_module.PREFIX)]
    called = functions_of(spec)
    functions = catalog.existing_functions(session, spec.table, called)
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
            "the classes and Schedules are defined"
        )
        raise DatabaseNotReadyError(msg)


def split_schemas(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return what is wrong if a queue's tables are in different schemas, or on the wrong nodes of Citus; else None.

    The search path finds them in different schemas when its first one has side tables of other queues, and a later one
    has the jobs.
    """
    mine = [table for table in spec.side_tables.values() if table.schema == spec.table.schema]
    schemas, has_citus = catalog.schemas_and_citus(session, [spec.table, *mine])
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
        for schema, may in catalog.schemas_with_table(session, table.name)
    ]
    return f" ({'; '.join(hints)})" if hints else ""


# -- versions ----------------------------------------------------------------------------------------------------------
# Whether the functions and triggers in the database are those of this version of sqlaqueue.
#
# The comment of a function stores its version. An upgrade of sqlaqueue may bring a newer one, which a migration
# creates; until then jobs may get no message, or wake no Consumer.


def outdated_triggers(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return what is wrong with a queue's triggers in the database, and how to fix it; None if nothing is.

    It sends two small queries of the catalog, and none for a queue without triggers.
    """
    return outdated_triggers_of(session, spec.table, spec.model.__name__)


def outdated_triggers_of(session: Session | sa.Connection, table: sa.Table, needed_by: str) -> str | None:
    """Return what is wrong with the triggers of one table, as above.

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
    """Return what is wrong with the functions that statements of a queue call, as above."""
    functions = functions_of(spec)
    existing = catalog.existing_functions(session, spec.table, functions)
    comments = {each.name: existing[each.signature].comment for each in functions if each.signature in existing}
    return _other_version(spec.table, functions, comments, spec.model.__name__)


def _other_version(
    table: sa.Table, functions: Sequence[Function], comments: Mapping[str, str | None], needed_by: str
) -> str | None:
    """Return which function is missing or of another version; None if none is."""
    for function in functions:
        wanted = version_in(function.comment)
        found = version_in(comments.get(function.name))
        if function.name not in comments or found < wanted:
            there = f"is of version {found}" if function.name in comments else "is missing"
            what = f"the {function.kind} {function.name} {there}, and version {wanted} is needed"
            return _outdated(table, needed_by, what, [function.name])
        if found > wanted:
            return (
                f"{needed_by}: the {function.kind} {function.name} is of version {found}, and this process knows "
                f"version {wanted}: its sqlaqueue is older than the one that the database was migrated for; upgrade it"
            )
    return None


def undefined_object_advice(error: BaseException, spec: QueueSpec) -> str | None:
    """Return how to fix an error about a table or a column that does not exist; None for any other error.

    A migration that changes a queue's strategy drops objects that Consumers of the old models use.
    """
    if not isinstance(error, DBAPIError) or sqlstate(error) not in {UNDEFINED_TABLE, UNDEFINED_COLUMN}:
        return None
    return (
        f"{spec.model.__name__}: the database does not have what this process works with. If a migration has changed "
        f"the queue, restart this consumer with the models of today; if it has not been run, run `alembic upgrade head`"
    )


def _outdated(table: sa.Table, needed_by: str, what: str, names: Sequence[str]) -> str:
    return (
        f"{needed_by}: the table {table.fullname} is not up to date: {what}. Run {UPDATE_COMMAND}; "
        f"env.py needs the line `import sqlaqueue.alembic` for that{_consequence(table, names)}"
    )


def _consequence(table: sa.Table, names: Sequence[str]) -> str:
    """Return what follows until triggers or functions of a table are repaired, as the doctor says it."""
    if table.name == SCHEDULE:
        return ""
    if all(name.startswith(triggers_module.PREFIX) for name in names):
        return "; until then idle Consumers are not notified of new jobs, and find them at their next poll"
    return "; until then jobs may get no message, or be admitted wrongly, and so are not claimed"


# -- altered -----------------------------------------------------------------------------------------------------------
# Triggers and functions that were changed by hand: the right name and version, and not what the model declares.


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
        for row in _rows(connection, catalog_schemas.FUNCTIONS, bound)
    }
    triggers = {
        (row.schema, row.table, row.name): ReflectedTrigger.from_row(row, row.schema)
        for row in _rows(
            connection, catalog_schemas.TRIGGERS_OF_TABLES, {**bound, "tables": [each.name for each in tables]}
        )
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
        wakes = each.name.startswith(triggers_module.PREFIX)
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
            wakes=each.name.startswith(triggers_module.PREFIX),
            repair=sql_texts(connection, [replace(each, replace=True)]),
        )


def _rows(connection: sa.Connection, query: sa.TextClause, bound: dict[str, Any]) -> Sequence[Any]:
    arrays = [sa.bindparam(name, type_=sa.ARRAY(sa.Text())) for name in bound]
    return connection.execute(query.bindparams(*arrays), bound).all()


# -- functions ---------------------------------------------------------------------------------------------------------
# Triggers that do not fire, and functions of another version.


def trigger_faults(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[TriggerFault]:
    """Return the triggers that are missing or disabled; two statements for each table that has any."""
    faults = []
    for table in tables:
        triggers = [each for each in objects_of(table) if isinstance(each, Trigger)]
        if not triggers:
            continue
        there = catalog.trigger_names(connection, table)
        enabled = catalog.trigger_names(connection, table, enabled_only=True)
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
                    wakes=each.name.startswith(triggers_module.PREFIX),
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
        comments = catalog.function_comments(connection, table, [each.name for each in functions if each not in called])
        existing = catalog.existing_functions(connection, table, called)
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
                    wakes=each.name.startswith(triggers_module.PREFIX),
                    repair=sql_texts(connection, each.created()),
                )
            )
    return faults


# -- missing -----------------------------------------------------------------------------------------------------------
# Tables and columns of a queue that the database lacks, or has in several schemas.


def missing_tables(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[MissingObject]:
    """Return the tables that do not exist."""
    return [
        MissingObject(
            name=name_of(connection, table),
            create=sql_texts(connection, creation(table, objects_of(table))),
            hint=other_schemas(connection, table).strip(" ()"),
        )
        for table in catalog.missing_tables(connection, tables)
    ]


def missing_columns(connection: sa.Connection, tables: Sequence[sa.Table]) -> list[MissingObject]:
    """Return the columns that do not exist."""
    # Only a part of a statement is compiled.
    compiler: Any = cast("Any", NEUTRAL.ddl_compiler)(NEUTRAL, None)
    return [
        MissingObject(
            name=f"{name_of(connection, column.table)}.{quoted(column.name)}",
            create=sql_text(
                connection,
                SqlTemplate(
                    f"ALTER TABLE {{table}} ADD COLUMN {compiler.get_column_specification(column)}", table=column.table
                ),
            ),
        )
        for column in catalog.missing_columns(connection, tables)
    ]


def missing_defaults(connection: sa.Connection, spec: QueueSpec) -> list[MissingDefault]:
    """Return the columns without the DEFAULT that the model declares."""
    compiler: Any = cast("Any", NEUTRAL.ddl_compiler)(NEUTRAL, None)
    tables = [spec.table, *spec.side_tables.values()]
    there = catalog.columns_with_default(connection, tables)
    mine = {*spec.columns.values(), *(column for table in spec.side_tables.values() for column in table.c)}
    return [
        MissingDefault(
            name=f"{name_of(connection, table)}.{quoted(column.name)}",
            is_of_queue=column in mine,
            repair=sql_text(
                connection,
                SqlTemplate(
                    f"ALTER TABLE {{table}} ALTER COLUMN {quoted(column.name)} "
                    f"SET DEFAULT {compiler.get_column_default_string(column)}",
                    table=table,
                ),
            ),
        )
        for table in tables
        for column in table.c
        # Not FetchedValue, by which a model says that something else sets the value, such as a trigger.
        if isinstance(column.server_default, sa.DefaultClause) and column not in there
    ]


def read_split_schemas(connection: sa.Connection, spec: QueueSpec) -> SplitSchemas | None:
    """Return the schemas in which the search path finds a queue's tables, if there are several."""
    mine = [table for table in spec.side_tables.values() if table.schema == spec.table.schema]
    schemas = catalog.schemas_of(connection, [spec.table, *mine])
    home = schemas[spec.table.name]
    others = [f"{name} in {schema}" for name, schema in schemas.items() if schema != home]
    if not others:
        return None
    database, role, path = connection.execute(
        sa.select(
            catalog.quoted_name(sa.func.current_database()),
            catalog.quoted_role(),
            sa.func.current_setting(sa.literal_column("'search_path'")),
        )
    ).one()
    after = [each for each in map(str.strip, path.split(",")) if each and each.strip('"') != home]
    repair = f"ALTER ROLE {role} IN DATABASE {database} SET search_path = {', '.join([quoted(home), *after])};"
    return SplitSchemas(home=home, others=others, repair=repair)


# -- refused -----------------------------------------------------------------------------------------------------------
# Status values that the database refuses: by a CHECK constraint of the status column, or by its type.


_INVALID_VALUE = "22P02"

# Of constraints with several columns it is not known what the other columns will be.
_CONSTRAINTS = sa.text("""
    SELECT c.conname::text AS name, pg_get_expr(c.conbin, c.conrelid) AS expression,
           format_type(a.atttypid, a.atttypmod) AS type
    FROM pg_constraint AS c JOIN pg_attribute AS a ON a.attrelid = c.conrelid AND c.conkey = ARRAY[a.attnum]
    WHERE c.contype = 'c' AND c.conrelid = CAST(CAST(:oid AS bigint) AS oid) AND a.attname = :column
    ORDER BY c.conname
""")


def refused_states(connection: sa.Connection, spec: QueueSpec) -> list[RefusedState]:
    """Return the states that a constraint or the type of the status column refuses."""
    if not spec.has("status"):
        return []
    # A held transaction writes no status when it claims.
    written = [
        state
        for state in STATES
        if getattr(spec.config.states, state) is not None
        and not (state == "processing" and spec.strategy.holds_transaction)
    ]
    unknown = [state for state in written if not _is_known(connection, spec, state)]
    by_type = f"the type of the column {spec.columns['status'].name}"
    return [
        *(RefusedState(state=state, by=by_type, repair="") for state in unknown),
        *_by_constraints(connection, spec, [state for state in written if state not in unknown]),
    ]


def _is_known(connection: sa.Connection, spec: QueueSpec, state: str) -> bool:
    """Return whether the type of the status column has the value of a state."""
    if not isinstance(spec.columns["status"].type, sa.Enum):
        return True
    try:
        with connection.begin_nested():
            connection.execute(sa.select(sa.cast(spec.literal(state), spec.columns["status"].type)))
    except DBAPIError as error:
        if sqlstate(error) != _INVALID_VALUE:
            raise
        return False
    return True


def _by_constraints(connection: sa.Connection, spec: QueueSpec, states: Sequence[str]) -> Iterator[RefusedState]:
    column = spec.columns["status"]
    bound = {"oid": table_oid(connection, spec.table), "column": column.name}
    for name, expression, type_ in connection.execute(_CONSTRAINTS, bound).all():
        for state in states:
            # The type of the database, as the expression has its operators; the model may declare another one.
            given = literal_text(spec.status_value(state), column.type)
            stored: sa.ColumnElement[Any] = sa.literal_column(f"CAST({given} AS {type_})")
            row = sa.select(stored.label(column.name)).subquery("sqlaqueue_row")
            # As for an INSERT: NULL counts as true.
            fits = sa.literal_column(f"({expression}) IS NOT FALSE", sa.Boolean())
            value = sa.cast(row.c[column.name], sa.Text())
            found: Any = connection.execute(sa.select(fits.label("fits"), value.label("value")).select_from(row)).one()
            if found.fits:
                continue
            table, constraint = table_name(connection, spec.table), quoted(name)
            wider = f"CHECK (({expression}) OR {quoted(column.name)} = {literal(found.value)})"
            repair = (
                f"ALTER TABLE {table} DROP CONSTRAINT {constraint}, ADD CONSTRAINT {constraint} {wider} NOT VALID;\n"
                f"ALTER TABLE {table} VALIDATE CONSTRAINT {constraint};"
            )
            yield RefusedState(state=state, by=f"the CHECK constraint {name}", repair=repair)
