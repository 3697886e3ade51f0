"""The tables, columns, triggers, functions and policies of one queue, as the current session finds them.

The queries name tables as any statement does, by the search path and ``schema_translate_map``, and run at each start of
a Consumer. :mod:`.reader` reads whole schemas for migrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql.catalog.citus import has_citus
from sqlaqueue.postgresql.catalog.table_id import TableId, TableName, system_table
from sqlaqueue.postgresql.ddl.objects import Function

Executor = Session | sa.Connection

_FUNCTION = system_table("pg_proc", "oid", "proname", "pronamespace")


@dataclass(frozen=True)
class ExistingFunction:
    """A function in the database."""

    comment: str | None
    executable: bool
    """Whether the current role may call it."""
    name: str
    """With the types of its arguments, for GRANT."""


def missing_tables(session: Executor, tables: Sequence[sa.Table]) -> list[sa.Table]:
    """Return the tables that do not exist."""
    found = session.execute(sa.select(*map(TableId, tables))).one()
    return [table for table, oid in zip(tables, found, strict=True) if oid is None]


_ATTRIBUTE = system_table("pg_attribute", "attname", "attrelid", "attisdropped", "atthasdef", "attidentity")


def missing_columns(session: Executor, tables: Sequence[sa.Table]) -> list[sa.Column[Any]]:
    """Return the columns that do not exist in existing tables."""
    found = _columns(session, tables, sa.true())
    return [column for table in tables for column in table.c if column not in found]


def columns_with_default(session: Executor, tables: Sequence[sa.Table]) -> set[sa.Column[Any]]:
    """Return the columns of existing tables that have a DEFAULT, or are generated."""
    is_identity = sa.cast(_ATTRIBUTE.c.attidentity, sa.Text()) != sa.literal_column("''")
    return _columns(session, tables, sa.or_(_ATTRIBUTE.c.atthasdef, is_identity))


def _columns(session: Executor, tables: Sequence[sa.Table], condition: sa.ColumnElement[bool]) -> set[sa.Column[Any]]:
    ids = [TableId(table) for table in tables]
    # One flag for each table: drivers differ in how they return a regclass.
    flags: list[Any] = [_ATTRIBUTE.c.attrelid == each for each in ids]
    exists = sa.and_(_ATTRIBUTE.c.attrelid.in_(ids), ~_ATTRIBUTE.c.attisdropped, condition)
    rows: Any = session.execute(sa.select(sa.cast(_ATTRIBUTE.c.attname, sa.Text), *flags).where(exists))
    found = {(name, number) for name, *of in rows for number, is_of_table in enumerate(of) if is_of_table}
    return {column for number, table in enumerate(tables) for column in table.c if (column.name, number) in found}


def trigger_names(session: Executor, table: sa.Table, *, enabled_only: bool = False) -> set[str]:
    """Return the names of the triggers of a table."""
    trigger = system_table("pg_trigger", "tgname", "tgrelid", "tgenabled")
    query = sa.select(sa.cast(trigger.c.tgname, sa.Text)).where(trigger.c.tgrelid == TableId(table))
    if enabled_only:
        query = query.where(sa.cast(trigger.c.tgenabled, sa.Text).in_(["O", "A"]))
    return set(session.execute(query).scalars())


def function_comments(session: Executor, table: sa.Table, names: Sequence[str]) -> dict[str, str | None]:
    """Return the comments of the functions of these names in the schema of a table, by name."""
    rows: Any = session.execute(_functions(table, names)).all()
    return dict(rows)


def existing_functions(
    session: Executor, table: sa.Table, functions: Sequence[Function]
) -> dict[str, ExistingFunction]:
    """Return those of these functions that the schema of a table has, by signature; no query is sent for none."""
    if not functions:
        return {}
    query = _functions(table, [each.name for each in functions]).add_columns(
        sa.func.pg_get_function_identity_arguments(_FUNCTION.c.oid),
        sa.func.has_function_privilege(_FUNCTION.c.oid, sa.literal_column("'EXECUTE'")),
        sa.literal_column("pg_proc.oid::regprocedure::text"),
    )
    found = {
        f"{name}({arguments})": ExistingFunction(comment, executable, qualified)
        for name, comment, arguments, executable, qualified in session.execute(query)
    }
    return {each.signature: found[each.signature] for each in functions if each.signature in found}


def _functions(table: sa.Table, names: Sequence[str]) -> AnySelect:
    relation = system_table("pg_class", "oid", "relnamespace")
    return (
        sa.select(sa.cast(_FUNCTION.c.proname, sa.Text), sa.func.obj_description(_FUNCTION.c.oid, "pg_proc"))
        .join_from(_FUNCTION, relation, relation.c.relnamespace == _FUNCTION.c.pronamespace)
        .where(relation.c.oid == TableId(table), _FUNCTION.c.proname.in_(names))
    )


def schemas_of(session: Executor, tables: Sequence[sa.Table]) -> dict[str, str]:
    """Return the schema in which the session finds each table, by the table's name."""
    return schemas_and_citus(session, tables)[0]


def schemas_and_citus(session: Executor, tables: Sequence[sa.Table]) -> tuple[dict[str, str], bool]:
    """Return the same, and whether the database has the extension Citus: one query for both."""
    relation = system_table("pg_class", "oid", "relname", "relnamespace")
    schema = system_table("pg_namespace", "oid", "nspname")
    rows: Any = session.execute(
        sa.select(sa.cast(relation.c.relname, sa.Text), sa.cast(schema.c.nspname, sa.Text), has_citus)
        .join_from(relation, schema, schema.c.oid == relation.c.relnamespace)
        .where(relation.c.oid.in_([TableId(table) for table in tables]))
    ).all()
    return {name: schema_name for name, schema_name, _ in rows}, any(citus for *_, citus in rows)


def schemas_with_table(session: Executor, name: str) -> list[tuple[str, bool]]:
    """Return all schemas that have a table of a name, and whether the role has USAGE on each."""
    relation = system_table("pg_class", "relname", "relnamespace", "relkind")
    schema = system_table("pg_namespace", "oid", "nspname")
    usable = sa.func.has_schema_privilege(schema.c.oid, sa.literal_column("'USAGE'"))
    rows: Any = session.execute(
        sa.select(sa.cast(schema.c.nspname, sa.Text), usable)
        .join_from(relation, schema, schema.c.oid == relation.c.relnamespace)
        .where(relation.c.relname == name, sa.cast(relation.c.relkind, sa.Text).in_(["r", "p"]))
    )
    return [(schema_name, may_use) for schema_name, may_use in rows]


def policy_commands(connection: sa.Connection, table: sa.Table) -> set[str]:
    """Return the commands (``pg_policy.polcmd``) for which the role has a permissive policy on a table."""
    policy, applies = _policies_of_role(table)
    query = sa.select(sa.cast(policy.c.polcmd, sa.Text)).where(applies, policy.c.polpermissive)
    return set(connection.execute(query).scalars())


def shows_all_rows(connection: sa.Connection, table: sa.Table) -> bool:
    """Return whether a permissive policy without a condition shows the role all rows of a table."""
    policy, applies = _policies_of_role(table)
    command = sa.cast(policy.c.polcmd, sa.Text).in_(["r", "*"])
    condition = sa.func.pg_get_expr(policy.c.polqual, policy.c.polrelid, type_=sa.Text())
    found = connection.execute(sa.select(policy.c.polpermissive, condition).where(applies, command)).all()
    shown = {(bool(permissive), text == "true") for permissive, text in found}
    return (True, True) in shown and (False, False) not in shown


def _policies_of_role(table: sa.Table) -> tuple[sa.TableClause, sa.ColumnElement[bool]]:
    """Return the table of policies, and the condition that one applies to the role and to a table."""
    policy = system_table("pg_policy", "polrelid", "polpermissive", "polcmd", "polroles", "polqual")
    roles = sa.func.unnest(policy.c.polroles).column_valued("role")
    applies = sa.or_(roles == sa.literal_column("0"), sa.func.pg_has_role(roles, sa.literal_column("'USAGE'")))
    return policy, sa.and_(policy.c.polrelid == TableId(table), sa.exists(sa.select(roles).where(applies)))


def quoted_role() -> sa.ColumnElement[str]:
    """Return the current role as an identifier, quoted if necessary."""
    return quoted_name(sa.cast(sa.literal_column("current_user"), sa.Text()))


def quoted_name(name: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """Return a name as an identifier, quoted if necessary."""
    quoted: sa.ColumnElement[str] = sa.func.quote_ident(name)
    return quoted


def unusable_schemas(connection: sa.Connection, table: sa.Table) -> list[tuple[str, str]]:
    """Return the schema of a table and the role, both quoted, if the role lacks USAGE on the schema."""
    name = sa.func.parse_ident(TableName(table), type_=sa.ARRAY(sa.Text()))
    schema = system_table("pg_namespace", "oid", "nspname")
    usable = sa.func.has_schema_privilege(schema.c.oid, sa.literal_column("'USAGE'"))
    rows: Any = connection.execute(
        sa.select(sa.func.quote_ident(schema.c.nspname), quoted_role()).where(
            name[2].is_not(None), schema.c.nspname == name[1], ~usable
        )
    )
    return [(schema_name, role) for schema_name, role in rows]
