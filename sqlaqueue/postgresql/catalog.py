"""The objects of one queue in the catalog: tables, columns, triggers, functions, policies, foreign keys, and Citus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.visitors import InternalTraversal

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql.ddl import Function, qualified_name


class TableName(ColumnElement[str]):
    """The name of a table in SQL, as a text; its schema is translated as in any statement."""

    # Without a key for SQLAlchemy's cache of statements, each start of a Consumer would compile ten queries anew.
    _traverse_internals = [  # noqa: RUF012 - as SQLAlchemy declares it
        ("name", InternalTraversal.dp_string),
        ("schema", InternalTraversal.dp_string),
    ]

    def __init__(self, table: sa.Table) -> None:
        self.name, self.schema = table.name, table.schema


@compiles(TableName)
def _table_name(element: TableName, compiler: SQLCompiler, **_: Any) -> str:
    # Dollar-quoted: a schema that is inserted later may have a quote in its name.
    return f"$sqlaqueue${qualified_name(compiler.preparer, element.name, element.schema)}$sqlaqueue$"


class TableId(ColumnElement[Any]):
    """The OID of a table (regclass); null when the search path has no table of its name."""

    _traverse_internals = [("table_name", InternalTraversal.dp_clauseelement)]  # noqa: RUF012 - as SQLAlchemy declares it

    def __init__(self, table: sa.Table) -> None:
        self.table_name = TableName(table)


@compiles(TableId)
def _table_id(element: TableId, compiler: SQLCompiler, **_: Any) -> str:
    return f"to_regclass({compiler.process(element.table_name)})"


def system_table(name: str, *columns: str) -> sa.TableClause:
    return sa.table(name, *map(sa.column, columns))


def sees_all(table: sa.Table) -> sa.ColumnElement[bool]:
    """Return the condition that row-level security hides no row of a table from the current role."""
    hidden: sa.ColumnElement[bool] = sa.func.row_security_active(TableName(table), type_=sa.Boolean())
    return ~hidden


Kind = Literal["local", "reference", "one shard", "distributed"]
"""``one shard`` is a table of a distributed schema, or one that is distributed without a column."""


class Placement(NamedTuple):
    kind: Kind
    colocation: int = 0
    """Tables on the same nodes have the same number."""
    column: str | None = None
    """The column that distributes the rows."""


LOCAL = Placement("local")

_EXTENSION = system_table("pg_extension", "extname")
_PARTITION = system_table("pg_dist_partition", "logicalrelid", "partmethod", "partkey", "colocationid", "repmodel")

has_citus: sa.ColumnElement[bool] = sa.exists(
    sa.select(sa.literal_column("1")).where(_EXTENSION.c.extname == sa.literal_column("'citus'"))
)
"""Whether the database has the extension, as a condition of another query of the catalog."""


def placements(session: Session | sa.Connection, tables: Sequence[sa.Table]) -> list[Placement]:
    ids = [TableId(table) for table in tables]
    column = sa.func.column_to_column_name(_PARTITION.c.logicalrelid, _PARTITION.c.partkey)
    method, model = (sa.cast(each, sa.Text()) for each in (_PARTITION.c.partmethod, _PARTITION.c.repmodel))
    rows = session.execute(
        sa.select(
            *(_PARTITION.c.logicalrelid == each for each in ids), method, model, _PARTITION.c.colocationid, column
        ).where(_PARTITION.c.logicalrelid.in_(ids))
    )
    found = [LOCAL] * len(tables)
    for row in rows:
        *flags, partition_method, replication, colocation, name = tuple(row)
        found[flags.index(True)] = _placement(partition_method, replication, colocation, name)
    return found


def _placement(method: str, replication: str, colocation: int, column: str | None) -> Placement:
    if method != "n":
        return Placement("distributed", colocation, column)
    if replication == "t":
        return Placement("reference", colocation)
    # A local table that Citus knows of, because a foreign key leads to it, has no colocation.
    return Placement("one shard", colocation) if colocation else LOCAL


class ForeignKey(NamedTuple):
    name: str
    """Its own name and that of its table."""
    schema: str
    table: str
    columns: Sequence[str]
    referred: Sequence[str]
    is_to_itself: bool


def foreign_keys_to(connection: sa.Connection, table: sa.Table) -> list[ForeignKey]:
    """Return the foreign keys under which a row of ``table`` cannot be deleted while other rows refer to it.

    Only those of tables that the current role may read.
    """
    constraint = system_table(
        "pg_constraint",
        *("conname", "contype", "conrelid", "confrelid", "conkey", "confkey", "confdeltype", "conparentid"),
    )
    relation = system_table("pg_class", "oid", "relname", "relnamespace")
    schema = system_table("pg_namespace", "oid", "nspname")

    def names(numbers: sa.ColumnElement[Any], of: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        attribute = system_table("pg_attribute", "attname", "attrelid", "attnum")
        each = (
            sa.func.unnest(numbers)
            .table_valued("number", with_ordinality="place", name="sqlaqueue_each")
            .render_derived("sqlaqueue_each")
        )
        listed = sa.func.array_agg(
            aggregate_order_by(sa.cast(attribute.c.attname, sa.Text), each.c.place), type_=ARRAY(sa.Text())
        )
        here = sa.and_(attribute.c.attrelid == of, attribute.c.attnum == each.c.number)
        return sa.select(listed).select_from(each.join(attribute, here)).correlate(constraint).scalar_subquery()

    found: AnySelect = (
        sa.select(
            sa.cast(constraint.c.conname, sa.Text).label("name"),
            sa.cast(schema.c.nspname, sa.Text).label("schema"),
            sa.cast(relation.c.relname, sa.Text).label("table"),
            names(constraint.c.conkey, constraint.c.conrelid).label("columns"),
            names(constraint.c.confkey, constraint.c.confrelid).label("referred"),
            (constraint.c.conrelid == constraint.c.confrelid).label("is_to_itself"),
        )
        .join_from(constraint, relation, relation.c.oid == constraint.c.conrelid)
        .join(schema, schema.c.oid == relation.c.relnamespace)
        .where(
            constraint.c.contype == sa.literal_column("'f'"),
            constraint.c.confrelid == TableId(table),
            constraint.c.confdeltype.in_([sa.literal_column("'a'"), sa.literal_column("'r'")]),
            constraint.c.conparentid == 0,
            sa.func.has_table_privilege(constraint.c.conrelid, "SELECT"),
        )
        .order_by(schema.c.nspname, relation.c.relname, constraint.c.conname)
    )
    return [
        ForeignKey(f"{row.name} of {row.table}", row.schema, row.table, row.columns, row.referred, row.is_to_itself)
        for row in connection.execute(found)
    ]


# -- queue objects -----------------------------------------------------------------------------------------------------
# The tables, columns, triggers, functions and policies of one queue, as the current session finds them.
#
# The queries name tables as any statement does, by the search path and ``schema_translate_map``, and run at each
# start of a Consumer. :mod:`.catalog_schemas` reads whole schemas for migrations.


Executor = Session | sa.Connection

_FUNCTION = system_table("pg_proc", "oid", "proname", "pronamespace")


class ExistingFunction(NamedTuple):
    comment: str | None
    executable: bool
    """Whether the current role may call it."""
    name: str
    """With the types of its arguments, for GRANT."""


def missing_tables(session: Executor, tables: Sequence[sa.Table]) -> list[sa.Table]:
    found = session.execute(sa.select(*map(TableId, tables))).one()
    return [table for table, oid in zip(tables, found, strict=True) if oid is None]


def table_comments(session: Executor, tables: Sequence[sa.Table]) -> dict[sa.Table, str | None]:
    """Return the comments of tables; that of a missing table is None, like that of a table without one."""
    comments = [sa.func.obj_description(TableId(table), sa.literal_column("'pg_class'")) for table in tables]
    return dict(zip(tables, session.execute(sa.select(*comments)).one(), strict=True))


_ATTRIBUTE = system_table("pg_attribute", "attname", "attrelid", "attisdropped", "atthasdef", "attidentity")


def missing_columns(session: Executor, tables: Sequence[sa.Table]) -> list[sa.Column[Any]]:
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
    trigger = system_table("pg_trigger", "tgname", "tgrelid", "tgenabled")
    query = sa.select(sa.cast(trigger.c.tgname, sa.Text)).where(trigger.c.tgrelid == TableId(table))
    if enabled_only:
        query = query.where(sa.cast(trigger.c.tgenabled, sa.Text).in_(["O", "A"]))
    return set(session.execute(query).scalars())


def function_comments(session: Executor, table: sa.Table, names: Sequence[str]) -> dict[str, str | None]:
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


def schemas_and_citus(session: Executor, tables: Sequence[sa.Table]) -> tuple[dict[str, str], bool]:
    """Return the schema of each table by its name, and whether the database has the extension Citus, in one query."""
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
    role: sa.ColumnElement[str] = sa.func.quote_ident(sa.cast(sa.literal_column("current_user"), sa.Text()))
    return role


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
