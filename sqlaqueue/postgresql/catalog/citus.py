"""Where Citus places tables, from its catalog; read only where the extension is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.catalog.table_id import TableId, system_table

Kind = Literal["local", "reference", "one shard", "distributed"]
"""``one shard`` is a table of a distributed schema, or one that is distributed without a column."""


class Placement(NamedTuple):
    """Where the rows of a table are."""

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
    """Return where tables are, in a database that has the extension."""
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
