"""What is wrong with a queue's tables, columns, triggers and functions in the database, each with its repair.

The doctor reports each :class:`Fault`. The check at the start of a Consumer, in :mod:`.start_checks`, sends fewer
statements, and shares what reads and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.postgresql import catalog, catalog_schemas, ddl, waits
from sqlaqueue.postgresql import triggers as triggers_module
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
from sqlaqueue.postgresql.facts import Severity
from sqlaqueue.postgresql.server import server_state
from sqlaqueue.queue.names import SCHEDULE, TICK
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import sqlstate
from sqlaqueue.sql.types import NEUTRAL


class Fault(NamedTuple):
    """Something that the database lacks for a queue, or has in another way than the model declares it."""

    severity: Severity
    code: str
    """As in the list of the doctor's codes."""
    name: str
    """The object's, quoted, with its schema or its table if it is a table or a column."""
    summary: str
    consequence: str
    fixes: tuple[str, ...]
    """What repairs it, the first to be tried first: SQL, one statement a line, or a command."""
    facts: Mapping[str, Any]
    state: str = ""
    """Of an index: missing, invalid, building, altered or leftover."""
    is_of_claims: bool = False
    """Of an index: whether claims or rescues are found by it."""
    waited: float | None = None
    """Of an index that is being built: for how many seconds the transaction has been open that it waits for."""


MIGRATION = ddl.UPDATE_COMMAND.strip("`")


def only_wakes(name: str) -> bool:
    """Return whether a trigger or a function of this name only wakes idle Consumers, which poll without it."""
    return name.startswith(triggers_module.PREFIX)


def consequence_of(names: Sequence[str]) -> str:
    """Return what follows until triggers or functions of these names are repaired, as a clause."""
    if all(map(only_wakes, names)):
        return "idle Consumers are not notified of new jobs, and find them at their next poll"
    if all(name.startswith(waits.TRIGGER_PREFIX) for name in names):
        return "jobs that wait for other jobs may wait for too long, or run too early"
    return "jobs may get no message, or be admitted wrongly, and so are not claimed"


def _consequence(name: str) -> str:
    clause = consequence_of([name])
    return f"{clause[0].upper()}{clause[1:]}."


def tables_of(spec: QueueSpec) -> Sequence[sa.Table]:
    """Return the tables of a queue: of jobs, the side tables, and those of schedules if the program declares any."""
    metadata, prefix = spec.table.metadata, f"{spec.table.schema}." if spec.table.schema else ""
    declared = (metadata.tables.get(f"{prefix}{name}") for name in (SCHEDULE, TICK))
    return list(
        dict.fromkeys([spec.table, *spec.side_tables.values(), *(each for each in declared if each is not None)])
    )


def table_faults(connection: sa.Connection, spec: QueueSpec) -> Iterator[Fault]:
    """Yield missing tables; or else missing columns, and tables that the search path finds in several schemas."""
    tables, model = tables_of(spec), spec.model.__name__
    missing = catalog.missing_tables(connection, tables)
    names = [name_of(connection, table) for table in missing]
    creates = [sql_texts(connection, creation(table, ddl.objects_of(table))) for table in missing]
    hints = [f": {hint}" if hint else "" for hint in (other_schemas(connection, each).strip(" ()") for each in missing)]
    if missing and len(missing) == len(tables):
        database = server_state(connection).database
        yield Fault(
            "critical",
            "missing_table",
            names[0],
            f"The database {database} has no table of this queue{hints[0]}. Is it the right database?",
            f"{model} cannot be used: jobs are not enqueued, and no Consumer starts.",
            (MIGRATION, "\n".join(creates)),
            {"database": database, "tables": names},
        )
        return
    for table, name, create, hint in zip(missing, names, creates, hints, strict=True):
        yield Fault(
            "critical",
            "missing_table",
            name,
            f"The table {name} is missing{hint}.",
            "No schedule is fired: Consumers with schedules= and Schedulers do not start."
            if table.name in {SCHEDULE, TICK}
            else f"{model} cannot be used: jobs are not enqueued, or no Consumer starts.",
            (MIGRATION, create),
            {"table": name},
        )
    if missing:
        return
    # Only a part of a statement is compiled.
    compiler: Any = cast("Any", NEUTRAL.ddl_compiler)(NEUTRAL, None)
    for column in catalog.missing_columns(connection, tables):
        name = f"{name_of(connection, column.table)}.{quoted(column.name)}"
        add = f"ALTER TABLE {{table}} ADD COLUMN {compiler.get_column_specification(column)}"
        yield Fault(
            "critical",
            "missing_column",
            name,
            f"The column {name} is missing.",
            f"Statements of {model} fail, and no Consumer starts.",
            (MIGRATION, sql_text(connection, ddl.SqlTemplate(add, table=column.table))),
            {"column": name},
        )
    yield from _split_schemas(connection, spec)


def tables_apart(session: Session | sa.Connection, spec: QueueSpec) -> tuple[str, list[str], bool]:
    """Return the schema in which the search path finds the jobs, the side tables elsewhere, and whether Citus is there.

    It finds them in different schemas when its first one has side tables of other queues, and a later one has the jobs.
    """
    mine = [table for table in spec.side_tables.values() if table.schema == spec.table.schema]
    schemas, has_citus = catalog.schemas_and_citus(session, [spec.table, *mine])
    home = schemas[spec.table.name]
    return home, [f"{name} in {schema}" for name, schema in schemas.items() if schema != home], has_citus


def _split_schemas(connection: sa.Connection, spec: QueueSpec) -> Iterator[Fault]:
    home, others, _ = tables_apart(connection, spec)
    if not others:
        return
    database, role, path = connection.execute(
        sa.select(
            sa.func.quote_ident(sa.func.current_database()),
            catalog.quoted_role(),
            sa.func.current_setting(sa.literal_column("'search_path'")),
        )
    ).one()
    after = [each for each in map(str.strip, path.split(",")) if each and each.strip('"') != home]
    repair = f"ALTER ROLE {role} IN DATABASE {database} SET search_path = {', '.join([quoted(home), *after])};"
    yield Fault(
        "critical",
        "split_schemas",
        home,
        f"By the search_path the jobs are in the schema {home}, but {', '.join(others)}.",
        "Statements use the side tables of another schema, and no Consumer starts.",
        (repair,),
        {"schema": home, "others": others},
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


def missing_defaults(connection: sa.Connection, spec: QueueSpec) -> Iterator[Fault]:
    compiler: Any = cast("Any", NEUTRAL.ddl_compiler)(NEUTRAL, None)
    tables = [spec.table, *spec.side_tables.values()]
    there = catalog.columns_with_default(connection, tables)
    mine = {*spec.columns.values(), *(column for table in spec.side_tables.values() for column in table.c)}
    for column in (column for table in tables for column in table.c):
        # Not FetchedValue, by which a model says that something else sets the value, such as a trigger.
        if not isinstance(column.server_default, sa.DefaultClause) or column in there:
            continue
        name, default = quoted(column.name), compiler.get_column_default_string(column)
        repair = ddl.SqlTemplate(f"ALTER TABLE {{table}} ALTER COLUMN {name} SET DEFAULT {default}", table=column.table)
        whole = f"{name_of(connection, column.table)}.{name}"
        yield Fault(
            "critical" if column in mine else "warning",
            "missing_default",
            whole,
            f"The column {whole} has no DEFAULT, and the model declares one.",
            "An INSERT that leaves it out fails or stores NULL, and such a job may never be claimed.",
            (sql_text(connection, repair),),
            {"column": whole},
        )


def trigger_faults(connection: sa.Connection, spec: QueueSpec) -> Iterator[Fault]:
    """Yield the triggers that are missing or disabled; two statements for each table that has any."""
    for table in tables_of(spec):
        triggers = [each for each in ddl.objects_of(table) if isinstance(each, ddl.Trigger)]
        if not triggers:
            continue
        there = catalog.trigger_names(connection, table)
        enabled = catalog.trigger_names(connection, table, enabled_only=True)
        for each in (one for one in triggers if one.name not in enabled):
            name, is_missing = name_of(connection, table), each.name not in there
            # Its function may be missing as well, and both statements may be repeated.
            create = sql_texts(connection, [*each.function.created(), replace(each, replace=True)])
            enable = f"ALTER TABLE {name} ENABLE TRIGGER {quoted(each.name)};"
            yield Fault(
                "warning" if only_wakes(each.name) else "critical",
                "missing_trigger" if is_missing else "disabled_trigger",
                each.name,
                f"The trigger {each.name} of {name} is {'missing' if is_missing else 'disabled'}.",
                _consequence(each.name),
                (MIGRATION, create) if is_missing else (enable,),
                {"trigger": each.name, "table": name},
            )


def other_versions(
    functions: Sequence[ddl.Function], comments: Mapping[str, str | None]
) -> Iterator[tuple[ddl.Function, str, int, int]]:
    """Yield the functions that are missing, outdated or newer: each with that state, and the found and wanted version.

    The comment of a function stores its version. An upgrade of sqlaqueue may bring a newer one, which a migration
    creates; until then jobs may get no message, or wake no Consumer.

    :param comments: the comments of those that exist, by name.
    """
    for function in functions:
        wanted, found = ddl.version_in(function.comment), ddl.version_in(comments.get(function.name))
        if function.name not in comments:
            yield function, "missing", found, wanted
        elif found != wanted:
            yield function, "outdated" if found < wanted else "newer", found, wanted


def function_faults(connection: sa.Connection, spec: QueueSpec) -> Iterator[Fault]:
    for table in tables_of(spec):
        functions = [each for each in ddl.objects_of(table) if isinstance(each, ddl.Function)]
        called = [each for each in functions if not isinstance(each, ddl.TriggerFunction)]
        if not functions:
            continue
        comments = catalog.function_comments(connection, table, [each.name for each in functions if each not in called])
        existing = catalog.existing_functions(connection, table, called)
        comments |= {each.name: existing[each.signature].comment for each in called if each.signature in existing}
        for each, state, found, wanted in other_versions(functions, comments):
            what = {
                "missing": "is missing",
                "outdated": f"is of version {found}, and {wanted} is needed",
                "newer": f"is of version {found}, and this process knows version {wanted}",
            }
            consequence = _consequence(each.name)
            fixes: tuple[str, ...] = (MIGRATION, sql_texts(connection, each.created()))
            if state == "newer":
                consequence = "The database was migrated for a newer sqlaqueue; this process may not work with it."
                fixes = ("pip install --upgrade sqlaqueue",)
            yield Fault(
                "critical" if state == "missing" and not only_wakes(each.name) else "warning",
                f"{state}_function",
                each.name,
                f"The {each.kind} {each.name} {what[state]}.",
                consequence,
                fixes,
                {"function": each.name, "found": found, "wanted": wanted},
            )


def altered_objects(connection: sa.Connection, spec: QueueSpec) -> Iterator[Fault]:
    """Yield the triggers and functions that are there, and not as the model declares them, in three statements.

    The condition of a trigger is not compared: the server prints it in a form of its own, and its name ends in a
    digest of it. Nor is the version of a function, and whether a trigger is enabled: these are faults of other kinds.
    """
    tables = tables_of(spec)
    if not any(isinstance(each, ddl.Trigger | ddl.Function) for table in tables for each in ddl.objects_of(table)):
        return
    schemas, _ = catalog.schemas_and_citus(connection, tables)
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
    for table in tables:
        schema = schemas.get(table.name, "")
        for each in (one for one in ddl.objects_of(table) if isinstance(one, ddl.Function)):
            function = functions.get((schema, each.signature))
            is_version = function is not None and ddl.version_in(function.comment) == ddl.version_in(each.comment)
            if function is not None and is_version and not function.is_as_declared(each):
                yield _altered(each.kind, each.name, "", sql_texts(connection, each.created()))
        for declared in (one for one in ddl.objects_of(table) if isinstance(one, ddl.Trigger)):
            trigger = triggers.get((schema, table.name, declared.name))
            if trigger is not None and not replace(trigger, enabled="O").equals(declared):
                repair = sql_texts(connection, [replace(declared, replace=True)])
                yield _altered("trigger", declared.name, name_of(connection, table), repair)


def _altered(kind: str, name: str, table: str, repair: str) -> Fault:
    return Fault(
        "warning" if only_wakes(name) else "critical",
        "altered_trigger" if table else "altered_function",
        name,
        f"The {kind} {name}{f' of {table}' if table else ''} is not as this version of sqlaqueue creates it.",
        _consequence(name),
        (repair, MIGRATION),
        {"name": name, "table": table},
    )


def _rows(connection: sa.Connection, query: sa.TextClause, bound: dict[str, Any]) -> Sequence[Any]:
    arrays = [sa.bindparam(name, type_=sa.ARRAY(sa.Text())) for name in bound]
    return connection.execute(query.bindparams(*arrays), bound).all()


_INVALID_VALUE = "22P02"

# Of constraints with several columns it is not known what the other columns will be.
_CONSTRAINTS = sa.text("""
    SELECT c.conname::text AS name, pg_get_expr(c.conbin, c.conrelid) AS expression,
           format_type(a.atttypid, a.atttypmod) AS type
    FROM pg_constraint AS c JOIN pg_attribute AS a ON a.attrelid = c.conrelid AND c.conkey = ARRAY[a.attnum]
    WHERE c.contype = 'c' AND c.conrelid = CAST(CAST(:oid AS bigint) AS oid) AND a.attname = :column
    ORDER BY c.conname
""")


_REFUSED = {
    "pending": "No job can be enqueued or retried.",
    "processing": "Each claim of a job fails, so that no job runs; Consumers are alive, and log the error.",
    "completed": "Jobs that have succeeded cannot be stored as completed, and run again.",
    "failed": "Jobs that have failed cannot be stored as failed, and run again.",
    "cancelled": "No job can be cancelled.",
}


def refused_states(connection: sa.Connection, spec: QueueSpec) -> Iterator[Fault]:
    """Yield the states of jobs whose status value a CHECK constraint or the type of the status column refuses."""
    if not spec.has("status"):
        return
    # A held transaction writes no status when it claims.
    written = [
        state
        for state in STATES
        if getattr(spec.config.states, state) is not None
        and not (state == "processing" and spec.strategy.holds_transaction)
    ]
    unknown = [state for state in written if not _is_known(connection, spec, state)]
    by_type = f"the type of the column {spec.columns['status'].name}"
    by_constraints = _by_constraints(connection, spec, [state for state in written if state not in unknown])
    for state, by, repairs in [
        # Autogenerate does not compare the values of a type.
        *((state, by_type, (_add_value(connection, spec, state),)) for state in unknown),
        *((state, by, (*repairs, MIGRATION)) for state, by, repairs in by_constraints),
    ]:
        yield Fault(
            "warning" if state == "cancelled" else "critical",
            "refused_status",
            spec.columns["status"].name,
            f"In {spec.table.fullname} {by} refuses the status of {state} jobs.",
            _REFUSED[state],
            repairs,
            {"state": state, "by": by},
        )


def _is_known(connection: sa.Connection, spec: QueueSpec, state: str) -> bool:
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


def _add_value(connection: sa.Connection, spec: QueueSpec, state: str) -> str:
    type_: Any = spec.columns["status"].type.dialect_impl(connection.dialect)
    dialect: Any = connection.dialect
    return f"ALTER TYPE {dialect.identifier_preparer.format_type(type_)} ADD VALUE {spec.literal(state)};"


def _by_constraints(
    connection: sa.Connection, spec: QueueSpec, states: Sequence[str]
) -> Iterator[tuple[str, str, tuple[str]]]:
    """Yield states, each with the constraint that refuses it, and its repair."""
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
            yield state, f"the CHECK constraint {name}", (repair,)
