"""The indexes of a table that give its rows in an order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog.table_id import TableId
from sqlaqueue.queue.listing_protocol import OrderedIndex

# A column of another collation or operator class has an order of its own, for which ORDER BY does not ask.
_INDEXES = sa.text("""
    SELECT i.relname::text AS name, x.indisunique AS is_unique, x.indpred IS NOT NULL AS is_partial,
           ARRAY(SELECT CASE WHEN o.opcdefault AND x.indcollation[n.k] = a.attcollation THEN a.attname::text END
                 FROM generate_series(0, x.indnkeyatts - 1) AS n (k)
                 LEFT JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[n.k] AND a.attnum > 0
                 LEFT JOIN pg_opclass AS o ON o.oid = x.indclass[n.k]
                 ORDER BY n.k) AS columns,
           ARRAY(SELECT NOT coalesce(a.attnotnull, false) FROM generate_series(0, x.indnkeyatts - 1) AS n (k)
                 LEFT JOIN pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = x.indkey[n.k]
                 ORDER BY n.k) AS nullable,
           ARRAY(SELECT x.indoption[n.k]::int FROM generate_series(0, x.indnkeyatts - 1) AS n (k)
                 ORDER BY n.k) AS options
    FROM pg_index AS x
    JOIN pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_am AS m ON m.oid = i.relam
    WHERE x.indrelid = CAST(CAST(:table AS bigint) AS oid) AND x.indisvalid AND x.indisready AND m.amname = 'btree'
    ORDER BY i.relname
""")
_DESCENDING, _NULLS_FIRST = 1, 2


def table_id(connection: sa.Connection, table: sa.Table) -> int | None:
    """Return the OID of a table; None if the search path has no table of its name."""
    found: int | None = connection.scalar(sa.select(sa.cast(sa.cast(TableId(table), _Oid()), sa.BigInteger())))
    return found


def ordered_indexes(connection: sa.Connection, table_id: int) -> Sequence[OrderedIndex]:
    """Return the valid B-tree indexes of a table."""
    found: list[OrderedIndex] = []
    for row in connection.execute(_INDEXES, {"table": table_id}):
        number = next((place for place, name in enumerate(row.columns) if name is None), len(row.columns))
        options: list[int] = row.options[:number]
        found.append(
            OrderedIndex(
                name=row.name,
                columns=tuple(row.columns[:number]),
                is_whole=number == len(row.columns),
                descending=tuple(bool(option & _DESCENDING) for option in options),
                nulls_first=tuple(bool(option & _NULLS_FIRST) for option in options),
                nullable=tuple(row.nullable[:number]),
                is_unique=row.is_unique,
                is_partial=row.is_partial,
            )
        )
    return found


class _Oid(sa.types.UserDefinedType[int]):
    """The type of an object's number."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "oid"
