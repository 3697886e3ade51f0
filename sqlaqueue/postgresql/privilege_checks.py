"""What the role of a Consumer may do, compared with what its queue needs: said when it starts, as GRANT statements.

What is needed comes from :meth:`~sqlaqueue.strategies.base.ClaimStrategy.required_privileges`. Without this a missing
right would show when a statement first needs it: by a job that cannot be settled, or a lease that is not extended.
Row-level security without a policy for the role would show by nothing at all, since to this role the table is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from sqlaqueue.postgresql.ddl import NameOf, TableId
from sqlaqueue.postgresql.wake_triggers import wakes
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy import RequiredPrivilege

_COMMANDS = {"SELECT": "r", "INSERT": "a", "UPDATE": "w", "DELETE": "d"}
"""How ``pg_policy`` writes what a policy is for."""


def what_is_hidden(connection: sa.Connection, spec: QueueSpec) -> list[str]:
    """Return the GRANTs for schemas that the role may not use; without them no table in these can be looked up."""
    name = sa.func.parse_ident(NameOf(spec.table), type_=ARRAY(sa.Text()))
    space = sa.table("pg_namespace", *map(sa.column, ("oid", "nspname")))
    usable = sa.func.has_schema_privilege(space.c.oid, sa.literal_column("'USAGE'"))
    query = sa.select(sa.func.quote_ident(space.c.nspname), _role()).where(
        name[2].is_not(None), space.c.nspname == name[1], ~usable
    )
    return [f"GRANT USAGE ON SCHEMA {schema} TO {role}" for schema, role in connection.execute(query)]


def what_is_not_granted(connection: sa.Connection, spec: QueueSpec) -> list[str]:
    """Return the statements that give the role what a Consumer of this queue needs and the role does not have."""
    rights = list(spec.strategy.required_privileges(spec))
    has = [
        sa.func.has_table_privilege(TableId(each.table), sa.literal_column(f"'{each.privilege}'")) for each in rights
    ]
    notify = sa.func.has_function_privilege(
        sa.literal_column("'pg_catalog.pg_notify(text,text)'"), sa.literal_column("'EXECUTE'")
    )
    row: Any = connection.execute(sa.select(_role(), notify, *has)).one()
    role, may_notify, *found = row
    grants: dict[sa.Table, list[str]] = {}
    for right, granted in zip(rights, found, strict=True):
        lacking = [] if granted else _lacking(connection, right)
        if not granted and (lacking or not right.columns):
            columns = "" if len(lacking) == len(right.columns) and right.whole else f" ({', '.join(lacking)})"
            grants.setdefault(right.table, []).append(f"{right.privilege}{columns}")
    names = _names(connection, [*grants])
    statements = [f"GRANT {', '.join(each)} ON TABLE {names[table]} TO {role}" for table, each in grants.items()]
    sequences = _sequences(connection, [right for right in rights if right.privilege == "INSERT"])
    statements += [f"GRANT USAGE ON SEQUENCE {sequence} TO {role}" for sequence in sequences]
    if wakes(spec) and not may_notify:
        statements.append(f"GRANT EXECUTE ON FUNCTION pg_notify(text, text) TO {role}")
    return statements


def what_policies_hide(connection: sa.Connection, spec: QueueSpec) -> list[str]:
    """Return the policies that the role needs on tables with row-level security, where it has none at all.

    Whether one that it has shows it all of its jobs cannot be told from here; it may be meant to serve some only.
    """
    rights = list(spec.strategy.required_privileges(spec))
    tables = list(dict.fromkeys(right.table for right in rights))
    active = [sa.func.row_security_active(NameOf(table)) for table in tables]
    row: Any = connection.execute(sa.select(_role(), *active)).one()
    role, *secured = row
    missing = []
    for table in (table for table, on in zip(tables, secured, strict=True) if on):
        commands = set(connection.execute(_commands(table)).scalars())
        needed = [right.privilege for right in rights if right.table is table]
        hidden = [] if "*" in commands else [each for each in needed if _COMMANDS[each] not in commands]
        name = _names(connection, [table])[table]
        missing += [
            f"CREATE POLICY {role}_{each.lower()} ON {name} FOR {each} TO {role} {_all_rows(each)}" for each in hidden
        ]
    return missing


def _all_rows(privilege: str) -> str:
    return "WITH CHECK (true)" if privilege == "INSERT" else "USING (true)"


def _role() -> sa.ColumnElement[str]:
    role: sa.ColumnElement[str] = sa.func.quote_ident(sa.cast(sa.literal_column("current_user"), sa.Text()))
    return role


def _lacking(connection: sa.Connection, right: RequiredPrivilege) -> list[str]:
    """Return the columns on which a right is missing, quoted; it may have been given column by column."""
    if not right.columns:
        return []
    privilege: sa.ColumnElement[str] = sa.literal_column(f"'{right.privilege}'")
    has = [
        sa.func.has_column_privilege(TableId(right.table), sa.literal(column.name, sa.Text()), privilege)
        for column in right.columns
    ]
    quote = connection.dialect.identifier_preparer.quote
    found = connection.execute(sa.select(*has)).one()
    return [quote(column.name) for column, granted in zip(right.columns, found, strict=True) if not granted]


def _names(connection: sa.Connection, tables: Sequence[sa.Table]) -> dict[sa.Table, str]:
    """Return how tables are called in this session: their schemas may be translated."""
    if not tables:
        return {}
    found = connection.execute(sa.select(*(sa.cast(TableId(table), sa.Text()) for table in tables))).one()
    return dict(zip(tables, found, strict=True))


def _sequences(connection: sa.Connection, inserts: Sequence[RequiredPrivilege]) -> Iterator[str]:
    """Yield the sequences that rows of these tables take their keys from, and the role may not use."""
    for right in inserts:
        for column in right.generated:
            sequence = sa.func.pg_get_serial_sequence(NameOf(right.table), sa.literal(column.name, sa.Text()))
            usable = sa.func.has_sequence_privilege(sequence, sa.literal_column("'USAGE'"))
            name, may = connection.execute(sa.select(sequence, usable)).one()
            if name is not None and not may:
                yield name


def _commands(table: sa.Table) -> sa.Select[Any]:
    policy = sa.table("pg_policy", *map(sa.column, ("polrelid", "polpermissive", "polcmd", "polroles")))
    roles = sa.func.unnest(policy.c.polroles).column_valued("role")
    applies = sa.or_(roles == sa.literal_column("0"), sa.func.pg_has_role(roles, sa.literal_column("'USAGE'")))
    return sa.select(sa.cast(policy.c.polcmd, sa.Text)).where(
        policy.c.polrelid == TableId(table), policy.c.polpermissive, sa.exists(sa.select(roles).where(applies))
    )
