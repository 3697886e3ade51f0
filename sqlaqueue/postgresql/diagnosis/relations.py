"""Tables and indexes in the database, each with its partitions, and names and texts in SQL for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import OID

from sqlaqueue.postgresql.catalog.table_id import TableId, system_table
from sqlaqueue.postgresql.types import NEUTRAL

_PARTS = sa.text("""
    SELECT c.oid::bigint FROM pg_class AS c
    WHERE c.oid = CAST(CAST(:root AS bigint) AS oid) AND c.relkind NOT IN ('p', 'I')
    UNION ALL
    SELECT p.relid::oid::bigint FROM pg_class AS c, pg_partition_tree(c.oid) AS p
    WHERE c.oid = CAST(CAST(:root AS bigint) AS oid) AND c.relkind IN ('p', 'I') AND p.isleaf
""")


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


def index_oid(connection: sa.Connection, index: sa.Index) -> int | None:
    """Return the OID of an index; None if it does not exist."""
    found, relation = system_table("pg_index", "indexrelid", "indrelid"), system_table("pg_class", "oid", "relname")
    return connection.scalar(
        sa.select(_number(relation.c.oid))
        .join_from(found, relation, relation.c.oid == found.c.indexrelid)
        .where(found.c.indrelid == TableId(index.table), relation.c.relname == index.name)  # type: ignore[arg-type]  # its table is set once it is attached
    )


def partitions(connection: sa.Connection, root: int | None) -> Sequence[int]:
    """Return the OIDs of the partitions of a table or an index; of itself if it is not partitioned."""
    return [] if root is None else connection.scalars(_PARTS, {"root": root}).all()


def quoted(name: str) -> str:
    """Return a name as an identifier in SQL."""
    return NEUTRAL.identifier_preparer.quote(name)


def literal(text: str) -> str:
    """Return a text as a literal in SQL."""
    return "'" + text.replace("'", "''") + "'"
