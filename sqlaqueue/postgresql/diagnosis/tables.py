"""The counters that autovacuum and the planner go by, of tables and indexes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from sqlaqueue.postgresql.diagnosis.relations import index_oids, partitions, table_oid
from sqlaqueue.queue.server_facts import IndexSize, TableStatistics

# The planner multiplies the rows of a page with the pages of today.
_TABLES = sa.text("""
    SELECT format('%I.%I', n.nspname, c.relname) AS name, c.reltuples::float8 AS rows,
           CASE WHEN c.reltuples < 0 OR c.relpages = 0 THEN c.reltuples::float8
                ELSE c.reltuples / c.relpages * ceil(z.size::float8 / current_setting('block_size')::int) END
             AS planned_rows,
           z.size, coalesce(c.reloptions, '{}')::text[] AS options,
           coalesce(s.n_live_tup, 0) AS live, coalesce(s.n_dead_tup, 0) AS dead,
           coalesce(s.n_mod_since_analyze, 0) AS changed,
           m.last_vacuum, extract(epoch FROM clock_timestamp() - m.last_vacuum)::float8 AS since_vacuum,
           m.last_analyze, extract(epoch FROM clock_timestamp() - m.last_analyze)::float8 AS since_analyze,
           age(c.relfrozenxid) AS xid_age, mxid_age(c.relminmxid) AS multixact_age,
           v.pid AS vacuum_pid, v.phase AS vacuum_phase
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL (SELECT pg_relation_size(c.oid)) AS z (size)
    LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
    LEFT JOIN pg_stat_progress_vacuum AS v ON v.relid = c.oid AND v.datname = current_database()
    CROSS JOIN LATERAL (
      SELECT greatest(s.last_vacuum, s.last_autovacuum), greatest(s.last_analyze, s.last_autoanalyze)
    ) AS m (last_vacuum, last_analyze)
    WHERE c.oid = ANY (CAST(CAST(:oids AS bigint[]) AS oid[])) AND c.relkind IN ('r', 'm')
    ORDER BY n.nspname, c.relname
""").bindparams(sa.bindparam("oids", type_=ARRAY(sa.BigInteger())))

# An entry has a header of 8 bytes, a line pointer of 4, and is padded to a multiple of 8.
_INDEXES = sa.text("""
    SELECT format('%I.%I', n.nspname, c.relname) AS name, pg_relation_size(c.oid) AS size,
           c.reltuples::float8 AS rows,
           (SELECT 16 + coalesce(sum(ceil(coalesce(s.avg_width, greatest(a.attlen, 8)) / 8.0) * 8), 8)
            FROM pg_attribute AS a
            LEFT JOIN pg_attribute AS t
              ON t.attrelid = x.indrelid AND t.attnum = x.indkey[a.attnum - 1] AND t.attnum > 0
            LEFT JOIN pg_class AS r ON r.oid = x.indrelid
            LEFT JOIN pg_namespace AS q ON q.oid = r.relnamespace
            LEFT JOIN pg_stats AS s
              ON s.schemaname = q.nspname AND s.tablename = r.relname AND s.attname = t.attname AND NOT s.inherited
            WHERE a.attrelid = c.oid)::int AS entry_width
    FROM pg_class AS c
    JOIN pg_namespace AS n ON n.oid = c.relnamespace
    JOIN pg_index AS x ON x.indexrelid = c.oid
    JOIN pg_am AS m ON m.oid = c.relam AND m.amname = 'btree'
    WHERE c.oid = ANY (CAST(CAST(:oids AS bigint[]) AS oid[]))
    ORDER BY n.nspname, c.relname
""").bindparams(sa.bindparam("oids", type_=ARRAY(sa.BigInteger())))

_COMMON = sa.text("""
    SELECT CAST(CAST(s.most_common_vals AS text) AS text[])
    FROM pg_stats AS s
    JOIN pg_class AS c ON c.relname = s.tablename
    JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = s.schemaname
    WHERE c.oid = CAST(CAST(:oid AS bigint) AS oid) AND s.attname = :column
    ORDER BY s.inherited DESC LIMIT 1
""")


def table_statistics(connection: sa.Connection, table: sa.Table) -> Sequence[TableStatistics]:
    """Return the statistics of a table, or of each of its partitions; none if the table does not exist."""
    oid = table_oid(connection, table)
    oids = partitions(connection, [] if oid is None else [oid])
    return [_table(row) for row in connection.execute(_TABLES, {"oids": [*oids]}).mappings()] if oids else []


def _table(row: Any) -> TableStatistics:
    options: dict[str, str] = dict(option.split("=", 1) for option in row["options"])
    return TableStatistics(**{**row, "options": options})


def index_sizes(connection: sa.Connection, table: sa.Table, indexes: Iterable[sa.Index]) -> Sequence[IndexSize]:
    """Return the sizes of some indexes of a table by their names, or of each of their partitions, if they exist."""
    names = [str(index.name) for index in indexes]
    oids = partitions(connection, index_oids(connection, table, names)) if names else []
    return [IndexSize(**row) for row in connection.execute(_INDEXES, {"oids": [*oids]}).mappings()] if oids else []


def common_values(connection: sa.Connection, column: sa.Column[Any]) -> Sequence[str] | None:
    """Return the most common values of a column by its statistics, as texts; None if there are no statistics."""
    oid = table_oid(connection, column.table)
    row = connection.execute(_COMMON, {"oid": oid, "column": column.name}).one_or_none()
    return None if row is None else row[0] or []
