"""How large tables are, when they were analysed, and which settings the planner works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog.table_id import TableId, system_table

_USUAL_ROWS_OF_A_PAGE = 80
"""For a table that was never analysed."""


_SETTINGS = sa.text("""
    SELECT s.name, s.source, quote_ident(current_database()) AS database, quote_ident(current_user) AS role
    FROM pg_settings AS s
    WHERE s.name IN ('enable_indexscan', 'enable_indexonlyscan') AND s.setting = 'off'
    ORDER BY s.name
""")


@dataclass(frozen=True)
class TableSize:
    """How large a table is, as the planner sees it."""

    rows: int
    analyzed_at: datetime | None
    changed: int
    """Number of rows that were written since."""


def table_size(connection: sa.Connection, table: sa.Table) -> TableSize:
    """Return the size of an existing table."""
    relation = system_table("pg_class", "oid", "relpages", "reltuples")
    statistics = sa.table(
        "pg_stat_all_tables",
        *map(sa.column, ("relid", "last_analyze", "last_autoanalyze", "n_mod_since_analyze", "n_live_tup")),
    )
    pages = sa.func.pg_relation_size(relation.c.oid) / sa.cast(
        sa.func.current_setting(sa.literal_column("'block_size'")), sa.Integer()
    )
    query = (
        sa.select(
            pages,
            relation.c.relpages,
            relation.c.reltuples,
            sa.func.greatest(*list(statistics.c)[1:3]),
            statistics.c.n_mod_since_analyze,
            statistics.c.n_live_tup,
        )
        .select_from(relation.outerjoin(statistics, statistics.c.relid == relation.c.oid))
        .where(relation.c.oid == TableId(table))
    )
    row: Any = connection.execute(query).one()
    size, relpages, reltuples, analyzed_at, changed, live = row
    density = reltuples / relpages if reltuples >= 0 and relpages > 0 else _USUAL_ROWS_OF_A_PAGE
    rows = int(size) * density
    # The pages of a queue's table are full of rows that are dead; their number tells little.
    counted = max(reltuples, live or 0)
    return TableSize(round(min(rows, counted) if counted > 0 else rows), analyzed_at, int(changed or 0))


def disabled_settings(connection: sa.Connection) -> Sequence[Any]:
    """Return the planner settings that are off though claims need them, each with its source."""
    return connection.execute(_SETTINGS).all()
