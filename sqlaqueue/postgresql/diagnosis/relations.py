"""Tables and indexes in the database, each with its partitions, and names and texts in SQL for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, OID

from sqlaqueue.postgresql.catalog.table_id import TableId, system_table
from sqlaqueue.postgresql.types import NEUTRAL

_PARTS = sa.text("""
    SELECT c.oid::bigint FROM pg_class AS c
    WHERE c.oid = ANY (CAST(CAST(:roots AS bigint[]) AS oid[])) AND c.relkind NOT IN ('p', 'I')
    UNION ALL
    SELECT p.relid::oid::bigint FROM pg_class AS c, pg_partition_tree(c.oid) AS p
    WHERE c.oid = ANY (CAST(CAST(:roots AS bigint[]) AS oid[])) AND c.relkind IN ('p', 'I') AND p.isleaf
""").bindparams(sa.bindparam("roots", type_=ARRAY(sa.BigInteger())))


_NAME = sa.text("""
    SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.oid = CAST(CAST(:oid AS bigint) AS oid)
""")


def _number(oid: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    return sa.cast(sa.cast(oid, OID()), sa.BigInteger())


def table_oid(connection: sa.Connection, table: sa.Table) -> int | None:
    """Return the OID of a table; None if it does not exist."""
    return connection.scalar(sa.select(_number(TableId(table))))


def table_name(connection: sa.Connection, table: sa.Table) -> str:
    """Return the name of a table with the schema in which it is found, quoted."""
    name: str | None = connection.scalar(_NAME, {"oid": table_oid(connection, table)})
    return name or table.fullname


def index_oids(connection: sa.Connection, table: sa.Table, names: Sequence[str]) -> Sequence[int]:
    """Return the OIDs of those indexes of a table that exist."""
    found, relation = system_table("pg_index", "indexrelid", "indrelid"), system_table("pg_class", "oid", "relname")
    named = relation.c.relname == sa.any_(sa.literal([*names], ARRAY(sa.Text())))
    return connection.scalars(
        sa.select(_number(relation.c.oid))
        .join_from(found, relation, relation.c.oid == found.c.indexrelid)
        .where(found.c.indrelid == TableId(table), named)
    ).all()


def partitions(connection: sa.Connection, roots: Sequence[int]) -> Sequence[int]:
    """Return the OIDs of the partitions of tables or indexes; of those themselves that are not partitioned."""
    return connection.scalars(_PARTS, {"roots": [*roots]}).all() if roots else []


def quoted(name: str) -> str:
    """Return a name as an identifier in SQL."""
    return NEUTRAL.identifier_preparer.quote(name)


def literal(text: str) -> str:
    """Return a text as a literal in SQL."""
    return "'" + text.replace("'", "''") + "'"
