"""Whether the database has what this process takes for granted: trigger functions of its version, and its tables.

A trigger function carries its version in its comment. Upgrading sqlaqueue may bring a newer one, which a migration
puts in place; until then jobs may go without a message, or be claimed by rules that no longer hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.postgresql import wake_triggers
from sqlaqueue.postgresql.catalog.indexes import index_validity
from sqlaqueue.postgresql.ddl import NEUTRAL, TableId, Trigger, TriggerFunction, objects_of, version_in
from sqlaqueue.postgresql.error_codes import UNDEFINED_COLUMN, UNDEFINED_TABLE, sqlstate
from sqlaqueue.queue.spec import QueueSpec

UPDATE = "`alembic revision --autogenerate -m sqlaqueue && alembic upgrade head`"
"""The command that brings a database up to date, for a project whose ``env.py`` has the plug-in."""


_TRIGGER = sa.table("pg_trigger", *map(sa.column, ("tgname", "tgrelid", "tgenabled")))


def what_is_missing(session: Session | sa.Connection, spec: QueueSpec) -> list[str]:
    """Return what a queue needs and the database does not have: tables, or else columns and triggers.

    Not those that only wake idle consumers: without them these poll, which :func:`what_is_outdated` says.
    """
    tables = [spec.table, *spec.side_tables.values()]
    found = session.execute(sa.select(*map(TableId, tables))).one()
    missing = [table for table, number in zip(tables, found, strict=True) if number is None]
    if missing:
        return [f"the table {table.fullname}{_where_else(session, table)}" for table in missing]
    rows: Any = session.execute(_columns(tables))
    columns = {(name, at) for name, *of in rows for at, is_its in enumerate(of) if is_its}
    triggers = set(session.execute(_triggers(spec)).scalars())
    names = [each.name for each in objects_of(spec.table) if isinstance(each, Trigger)]
    wanted = [name for name in names if not name.startswith(wake_triggers.PREFIX)]
    return [
        *(
            f"the column {table.fullname}.{each.name}"
            for at, table in enumerate(tables)
            for each in table.c
            if (each.name, at) not in columns
        ),
        *(f"the trigger {name} of {spec.table.fullname}" for name in wanted if name not in triggers),
    ]


def check_complete(session: Session | sa.Connection, spec: QueueSpec) -> None:
    """Refuse a database that lacks what a queue needs.

    :raises DatabaseNotReadyError: naming what is missing, and what makes it.
    """
    missing = what_is_missing(session, spec)
    if missing:
        msg = (
            f"the database lacks what {spec.model.__name__} needs: {', '.join(missing)}; {UPDATE} makes it, where "
            "env.py has the plug-in sqlaqueue.alembic; metadata.create_all(engine) makes tables that are not there yet"
        )
        raise DatabaseNotReadyError(msg)


def what_is_apart(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return what is wrong when the search path leads to tables of two queues in two schemas; None if it does not.

    That happens where the first schema of the path has side tables, of other queues, and the second one the jobs.
    """
    mine = [table for table in spec.side_tables.values() if table.schema == spec.table.schema]
    relation = sa.table("pg_class", *map(sa.column, ("oid", "relname", "relnamespace")))
    space = sa.table("pg_namespace", *map(sa.column, ("oid", "nspname")))
    places: Any = session.execute(
        sa.select(sa.cast(relation.c.relname, sa.Text), sa.cast(space.c.nspname, sa.Text))
        .join_from(relation, space, space.c.oid == relation.c.relnamespace)
        .where(relation.c.oid.in_([TableId(table) for table in (spec.table, *mine)]))
    ).all()
    schemas: dict[str, str] = dict(places)
    home = schemas[spec.table.name]
    strangers = [f"{name} in {schema}" for name, schema in schemas.items() if schema != home]
    if not strangers:
        return None
    path = session.execute(sa.select(sa.func.current_setting(sa.literal_column("'search_path'")))).scalar_one()
    return (
        f"{spec.model.__name__}: by the search_path of this session ({path}) the table {spec.table.name} is found in "
        f"the schema {home}, but {', '.join(strangers)}; they have to be in one schema: let the search_path begin with "
        f"{home}, or name it in the model, as __table_args__ = {{'schema': {home!r}}}"
    )


def what_is_outdated(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return what is wrong with a queue's triggers in the database, and what to do about it; None if nothing is.

    It asks two small questions of the catalog, and none for a queue without triggers. On a database other than
    PostgreSQL there are none.
    """
    objects = objects_of(spec.table)
    functions = {each.name: each for each in objects if isinstance(each, TriggerFunction)}
    triggers = [each.name for each in objects if isinstance(each, Trigger)]
    if not functions and not triggers:
        return None
    rows: Any = session.execute(_comments(spec, [*functions])).all()
    comments: dict[str, str | None] = dict(rows)
    for name, function in functions.items():
        wanted = version_in(function.comment)
        found = version_in(comments.get(name))
        if name not in comments or found < wanted:
            there = f"is of version {found}" if name in comments else "is missing"
            return _outdated(spec, f"the trigger function {name} {there}, and version {wanted} is needed")
        if found > wanted:
            return (
                f"{spec.model.__name__}: the trigger function {name} is of version {found}, and this process knows "
                f"version {wanted}: its sqlaqueue is older than the one that the database was migrated for; upgrade it"
            )
    firing = set(session.execute(_firing(spec)).scalars())
    silent = [name for name in triggers if name not in firing]
    if silent:
        return _outdated(spec, f"these triggers are missing or disabled: {', '.join(silent)}")
    return None


def why_undefined(error: BaseException, spec: QueueSpec) -> str | None:
    """Return what to do about an error that says that a table or a column does not exist; None for any other error.

    A migration that switches the strategy of a queue takes away what the consumers of the old one work with.
    """
    if not isinstance(error, DBAPIError):
        return None
    if sqlstate(error) not in {UNDEFINED_TABLE, UNDEFINED_COLUMN}:
        return None
    return (
        f"{spec.model.__name__}: the database does not have what this process works with. If a migration has changed "
        f"the queue, restart this consumer with the models of today; if it has not been run, run `alembic upgrade head`"
    )


def _outdated(spec: QueueSpec, what: str) -> str:
    return (
        f"{spec.model.__name__}: the table {spec.table.fullname} is not up to date: {what}. Run {UPDATE}; "
        "env.py needs the line `import sqlaqueue.alembic` for that"
    )


def _where_else(session: Session | sa.Connection, table: sa.Table) -> str:
    """Return in which schemas there is a table of a name that the search path does not lead to."""
    if table.schema is not None:
        return ""
    relation = sa.table("pg_class", *map(sa.column, ("relname", "relnamespace", "relkind")))
    space = sa.table("pg_namespace", *map(sa.column, ("oid", "nspname")))
    usable = sa.func.has_schema_privilege(space.c.oid, sa.literal_column("'USAGE'"))
    query = (
        sa.select(sa.cast(space.c.nspname, sa.Text), usable)
        .join_from(relation, space, space.c.oid == relation.c.relnamespace)
        .where(relation.c.relname == table.name, sa.cast(relation.c.relkind, sa.Text).in_(["r", "p"]))
    )
    hints = [
        f"it is in the schema {schema}, "
        + ("to which the search_path does not lead" if may else "which the role may not use")
        for schema, may in session.execute(query)
    ]
    return f" ({'; '.join(hints)})" if hints else ""


def _comments(spec: QueueSpec, names: list[str]) -> AnySelect:
    function = sa.table("pg_proc", *map(sa.column, ("oid", "proname", "pronamespace")))
    relation = sa.table("pg_class", *map(sa.column, ("oid", "relnamespace")))
    comment = sa.func.obj_description(function.c.oid, "pg_proc")
    return (
        sa.select(sa.cast(function.c.proname, sa.Text), comment)
        .join_from(function, relation, relation.c.relnamespace == function.c.pronamespace)
        .where(relation.c.oid == TableId(spec.table), function.c.proname.in_(names))
    )


def _columns(tables: Sequence[sa.Table]) -> AnySelect:
    attribute = sa.table("pg_attribute", *map(sa.column, ("attname", "attrelid", "attisdropped")))
    ids = [TableId(table) for table in tables]
    # Which of the tables it is: each driver shows the identity of a table in another way.
    its: list[Any] = [attribute.c.attrelid == number for number in ids]
    theirs = sa.and_(attribute.c.attrelid.in_(ids), ~attribute.c.attisdropped)
    columns: list[Any] = [sa.cast(attribute.c.attname, sa.Text), *its]
    return sa.select(*columns).where(theirs)


def _triggers(spec: QueueSpec) -> AnySelect:
    return sa.select(sa.cast(_TRIGGER.c.tgname, sa.Text)).where(_TRIGGER.c.tgrelid == TableId(spec.table))


def _firing(spec: QueueSpec) -> AnySelect:
    return _triggers(spec).where(sa.cast(_TRIGGER.c.tgenabled, sa.Text).in_(["O", "A"]))


# -- what claims are quick by ------------------------------------------------------------------------------------------


def missing_indexes(session: Session | sa.Connection, spec: QueueSpec) -> list[sa.Index]:
    """Return the indexes of claims and rescues that the database does not have, or has left invalid.

    One of another name will do when it begins with the same columns. On a database other than PostgreSQL none is
    missing.
    """
    own = {str(index.name) for index in spec.claim_indexes}
    there: dict[sa.Table | None, list[tuple[str, list[str]]]] = {}
    for table in {index.table for index in spec.claim_indexes if index.table is not None}:
        rows: Any = session.execute(_indexed_columns(table)).all()
        there[table] = [(name, columns) for name, columns in rows]

    def serves(index: sa.Index, name: str, columns: list[str]) -> bool:
        wanted = [column.name for column in index.columns]
        return name == index.name or (name not in own and columns[: len(wanted)] == wanted)

    return [
        index
        for index in spec.claim_indexes
        if not any(serves(index, name, columns) for name, columns in there.get(index.table, []))
    ]


def _indexed_columns(table: sa.Table) -> AnySelect:
    """Return the valid indexes of a table, each with its columns in order."""
    index = sa.table("pg_index", *map(sa.column, ("indexrelid", "indrelid", "indkey", "indisvalid")))
    relation = sa.table("pg_class", *map(sa.column, ("oid", "relname")))
    attribute = sa.table("pg_attribute", *map(sa.column, ("attname", "attrelid", "attnum")))
    place = sa.func.array_position(sa.cast(index.c.indkey, ARRAY(sa.SmallInteger())), attribute.c.attnum)
    names = sa.func.array_agg(aggregate_order_by(sa.cast(attribute.c.attname, sa.Text), place), type_=ARRAY(sa.Text()))
    mine = sa.and_(attribute.c.attrelid == index.c.indrelid, place.is_not(None))
    listed = sa.select(names).select_from(attribute).where(mine).correlate(index).scalar_subquery()
    found: Any = (
        sa.select(sa.cast(relation.c.relname, sa.Text), sa.func.coalesce(listed, sa.cast([], ARRAY(sa.Text()))))
        .join_from(index, relation, relation.c.oid == index.c.indexrelid)
        .where(index.c.indrelid == TableId(table), index.c.indisvalid)
    )
    selected: AnySelect = found
    return selected


def what_is_slow(session: Session | sa.Connection, spec: QueueSpec) -> str | None:
    """Return what to do about indexes that are missing; None when none is."""
    missing = missing_indexes(session, spec)
    if not missing:
        return None
    names = ", ".join(f"{index.name} of {index.table.fullname}" for index in missing if index.table is not None)
    statements = "; ".join(str(sa.schema.CreateIndex(each).compile(dialect=NEUTRAL)).strip() for each in missing)
    return (
        f"{spec.model.__name__}: the database lacks {'an index' if len(missing) == 1 else 'indexes'} of this queue: "
        f"{names}, so claims may read the whole table. Run {UPDATE}, where env.py has the plug-in sqlaqueue.alembic, "
        f"or let the owner execute: {statements}"
    )


# -- what the deletion of jobs depends on ------------------------------------------------------------------------------


def has_index(connection: sa.Connection, table: sa.Table, name: str) -> bool:
    """Return whether a table has an index of this name, complete and fit for use."""
    return index_validity(connection, table, name) is True


@dataclass(frozen=True)
class ForeignKey:
    """A foreign key as the database knows it."""

    name: str
    """Its table's name and its own."""
    schema: str
    table: str
    columns: Sequence[str]
    referred: Sequence[str]
    is_to_itself: bool


def foreign_keys_to(connection: sa.Connection, table: sa.Table) -> list[ForeignKey]:
    """Return the foreign keys that forbid to delete rows of a table to which others refer.

    Only those of tables that the current user may read.
    """
    constraint = sa.table(
        "pg_constraint",
        *map(sa.column, ("conname", "contype", "conrelid", "confrelid", "conkey", "confkey", "confdeltype")),
        sa.column("conparentid"),
    )
    relation = sa.table("pg_class", *map(sa.column, ("oid", "relname", "relnamespace")))
    schema = sa.table("pg_namespace", *map(sa.column, ("oid", "nspname")))

    def names(numbers: sa.ColumnElement[Any], of: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        attribute = sa.table("pg_attribute", *map(sa.column, ("attname", "attrelid", "attnum")))
        each = sa.func.unnest(numbers).table_valued("number", with_ordinality="place", name="each").render_derived()
        listed = sa.func.array_agg(
            aggregate_order_by(sa.cast(attribute.c.attname, sa.Text), each.c.place),
            type_=ARRAY(sa.Text()),
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
