"""The foreign keys that refer to a queue's table, as the database has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, aggregate_order_by

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql.catalog.table_id import TableId, system_table


@dataclass(frozen=True)
class ForeignKey:
    """A foreign key in the database."""

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
