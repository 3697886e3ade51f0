"""The privileges that a Consumer's role lacks, as GRANT and CREATE POLICY statements; checked when it starts.

:meth:`~sqlaqueue.strategies.base.ClaimStrategy.required_privileges` lists what is needed. Without this check a missing
privilege would appear with the first statement that needs it, as a job that cannot be settled or a lease that is not
extended. Row-level security without a policy for the role would not appear at all: the role sees an empty table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql import catalog
from sqlaqueue.postgresql.ddl import functions_of
from sqlaqueue.postgresql.triggers import wakes
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import RequiredPrivilege

_COMMANDS = {"SELECT": "r", "INSERT": "a", "UPDATE": "w", "DELETE": "d"}
"""The codes of commands in ``pg_policy``."""


def missing_schema_grants(connection: sa.Connection, spec: QueueSpec) -> list[str]:
    """Return the GRANTs for schemas on which the role lacks USAGE; no table in them can be looked up without it."""
    hidden = catalog.unusable_schemas(connection, spec.table)
    return [f"GRANT USAGE ON SCHEMA {schema} TO {role}" for schema, role in hidden]


def missing_grants(connection: sa.Connection, spec: QueueSpec) -> list[str]:
    """Return the GRANTs for the privileges that a Consumer of this queue needs and the role lacks."""
    grants = grants_for(connection, list(spec.strategy.required_privileges(spec)), notifies=wakes(spec))
    # By default every role may execute a function.
    functions = catalog.existing_functions(connection, spec.table, functions_of(spec))
    refused = [each.name for each in functions.values() if not each.executable]
    role = connection.execute(sa.select(catalog.quoted_role())).scalar_one() if refused else None
    return [*grants, *(f"GRANT EXECUTE ON FUNCTION {name} TO {role}" for name in refused)]


def grants_for(connection: sa.Connection, required: Sequence[RequiredPrivilege], *, notifies: bool = True) -> list[str]:
    """Return the GRANTs for required privileges that the role lacks; with ``notifies`` also that for pg_notify()."""
    has = [
        sa.func.has_table_privilege(catalog.TableId(each.table), sa.literal_column(f"'{each.privilege}'"))
        for each in required
    ]
    notify = sa.func.has_function_privilege(
        sa.literal_column("'pg_catalog.pg_notify(text,text)'"), sa.literal_column("'EXECUTE'")
    )
    row: Any = connection.execute(sa.select(catalog.quoted_role(), notify, *has)).one()
    role, may_notify, *found = row
    grants: dict[sa.Table, list[str]] = {}
    for each, granted in zip(required, found, strict=True):
        lacking = [] if granted else _lacking(connection, each)
        if not granted and (lacking or not each.columns):
            columns = "" if len(lacking) == len(each.columns) and each.whole else f" ({', '.join(lacking)})"
            grants.setdefault(each.table, []).append(f"{each.privilege}{columns}")
    names = _names(connection, [*grants])
    statements = [f"GRANT {', '.join(each)} ON TABLE {names[table]} TO {role}" for table, each in grants.items()]
    sequences = _sequences(connection, [each for each in required if each.privilege == "INSERT"])
    statements += [f"GRANT USAGE ON SEQUENCE {sequence} TO {role}" for sequence in sequences]
    if notifies and not may_notify:
        statements.append(f"GRANT EXECUTE ON FUNCTION pg_notify(text, text) TO {role}")
    return statements


def row_security(connection: sa.Connection, spec: QueueSpec) -> tuple[list[str], str | None]:
    """Return the policies that the role needs on tables with row-level security for which it has none, and a warning.

    The warning says that the policies hide every row. Whether they show all jobs is not checked: a role may be meant to
    run some of them only.
    """
    secured, missing = _policies(connection, list(spec.strategy.required_privileges(spec)))
    return missing, None if missing or spec.table not in secured else _hidden_rows(connection, spec)


def policies_for(connection: sa.Connection, required: Sequence[RequiredPrivilege]) -> list[str]:
    return _policies(connection, required)[1]


def _policies(connection: sa.Connection, required: Sequence[RequiredPrivilege]) -> tuple[Sequence[sa.Table], list[str]]:
    """Return the tables whose policies apply to the role, and the policies that it needs."""
    tables = list(dict.fromkeys(each.table for each in required))
    active = [sa.func.row_security_active(catalog.TableName(table)) for table in tables]
    row: Any = connection.execute(sa.select(catalog.quoted_role(), *active)).one()
    role, *found = row
    secured = [table for table, on in zip(tables, found, strict=True) if on]
    missing = []
    for table in secured:
        commands = catalog.policy_commands(connection, table)
        needed = [each.privilege for each in required if each.table is table]
        hidden = [] if "*" in commands else [each for each in needed if _COMMANDS[each] not in commands]
        name = _names(connection, [table])[table]
        missing += [
            f"CREATE POLICY {_policy_name(role, each)} ON {name} FOR {each} TO {role} "
            f"{'WITH CHECK (true)' if each == 'INSERT' else 'USING (true)'}"
            for each in hidden
        ]
    return secured, missing


def _hidden_rows(connection: sa.Connection, spec: QueueSpec) -> str | None:
    """Return a warning if the role sees no row, and the statistics of the table count some.

    They lag behind by a second or more, so a queue that is emptied again and again would look like that as well. It is
    left out if a policy shows all rows.
    """
    if catalog.shows_all_rows(connection, spec.table):
        return None
    seen = sa.exists(sa.select(sa.literal_column("1")).select_from(spec.table))
    counted = sa.func.pg_stat_get_live_tuples(catalog.TableId(spec.table), type_=sa.BigInteger())
    row: Any = connection.execute(sa.select(seen, counted, catalog.quoted_role())).one()
    sees, number, role = row
    if sees or not number:
        return None
    return (
        f"row-level security shows the role {role} no row of {spec.table.fullname}, which has {number} or so: jobs of "
        "its queue do not run here; if it should see them, correct the condition of its policy, or what that reads, "
        "such as a setting of the session"
    )


def _policy_name(role: str, privilege: str) -> str:
    """Return the name of a policy, from a role that is quoted if necessary."""
    end = f"_{privilege.lower()}"
    return f'{role[:-1]}{end}"' if role.endswith('"') else f"{role}{end}"


def _lacking(connection: sa.Connection, each: RequiredPrivilege) -> list[str]:
    """Return the columns, quoted, on which a privilege is missing; it may have been granted by column."""
    if not each.columns:
        return []
    privilege: sa.ColumnElement[str] = sa.literal_column(f"'{each.privilege}'")
    has = [
        sa.func.has_column_privilege(catalog.TableId(each.table), sa.literal(column.name, sa.Text()), privilege)
        for column in each.columns
    ]
    quote = connection.dialect.identifier_preparer.quote
    found = connection.execute(sa.select(*has)).one()
    return [quote(column.name) for column, granted in zip(each.columns, found, strict=True) if not granted]


def _names(connection: sa.Connection, tables: Sequence[sa.Table]) -> dict[sa.Table, str]:
    if not tables:
        return {}
    found = connection.execute(sa.select(*(sa.cast(catalog.TableId(table), sa.Text()) for table in tables))).one()
    return dict(zip(tables, found, strict=True))


def _sequences(connection: sa.Connection, inserts: Sequence[RequiredPrivilege]) -> Iterator[str]:
    """Yield the sequences that supply keys of these tables and on which the role lacks USAGE."""
    for each in inserts:
        for column in each.generated:
            sequence = sa.func.pg_get_serial_sequence(catalog.TableName(each.table), sa.literal(column.name, sa.Text()))
            usable = sa.func.has_sequence_privilege(sequence, sa.literal_column("'USAGE'"))
            name, may = connection.execute(sa.select(sequence, usable)).one()
            if name is not None and not may:
                yield name
