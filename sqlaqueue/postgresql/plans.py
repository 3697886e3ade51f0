"""Whether the planner finds the claim's index: the plan of a claim, which is not executed.

A claim has no parameter by which a plan of all its executions would differ from this one: its limit is part of the
text, the time is a function, and status values are literals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog import LOCAL, TableId, has_citus, placements, system_table
from sqlaqueue.postgresql.catalog_text import name_of, sql_text
from sqlaqueue.postgresql.facts import Buffers, PlannerSetting, PlanNode, StatementPlan, TableRead
from sqlaqueue.queue.spec import QueueSpec

_USUAL_ROWS_OF_A_PAGE = 80
"""For a table that was never analysed."""


_SETTINGS = sa.text("""
    SELECT s.name, s.source, quote_ident(current_database()) AS database, quote_ident(current_user) AS role
    FROM pg_settings AS s
    WHERE s.name IN ('enable_indexscan', 'enable_indexonlyscan') AND s.setting = 'off'
    ORDER BY s.name
""")


def _read_of(connection: sa.Connection, table: sa.Table, how: Literal["scan", "sort"]) -> TableRead:
    """Return a table of which all rows are read or sorted, with its size as the planner sees it."""
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
    return TableRead(
        how=how,
        table=name_of(connection, table),
        rows=round(min(rows, counted) if counted > 0 else rows),
        analyzed_at=analyzed_at,
        changed=int(changed or 0),
    )


_SORTED = 1000
"""Number of rows up to which a claim may sort: several messages or jobs may be due at the same time."""

_RESETS = {
    "database": "ALTER DATABASE {database} RESET {name};",
    "user": "ALTER ROLE {role} RESET {name};",
    "database user": "ALTER ROLE {role} IN DATABASE {database} RESET {name};",
    "configuration file": "ALTER SYSTEM SET {name} = on;\nSELECT pg_reload_conf();",
}
"""By the source of a setting."""


def on_shards(connection: sa.Connection, spec: QueueSpec) -> bool:
    return bool(connection.scalar(sa.select(has_citus))) and placements(connection, [spec.table]) != [LOCAL]


def shard_column(connection: sa.Connection, spec: QueueSpec) -> sa.Column[Any] | None:
    """Return the column of the key by which Citus distributes a queue's table; None for any other table."""
    # A table that is distributed by its whole key has one row a shard, and no Consumer.
    if len(spec.keys) == 1 or not connection.scalar(sa.select(has_citus)):
        return None
    (placement,) = placements(connection, [spec.table])
    return next((key for key in spec.keys if key.name == placement.column), None)


def whole_reads(connection: sa.Connection, claim: Any, tables: Sequence[sa.Table]) -> list[TableRead]:
    """Return which of the tables a claim would read or sort whole."""
    plan = explain(connection, claim).root
    names = {table.name: table for table in tables}
    how: dict[str, Literal["scan", "sort"]] = {}
    for node in plan.nodes():
        if node.kind == "Sort":
            how |= {str(each.relation): "sort" for each in _input(node) if _is_long(each)}
    how |= {str(node.relation): "scan" for node in plan.nodes() if node.kind == "Seq Scan"}
    return [_read_of(connection, names[name], read) for name, read in how.items() if name in names]


def disabled_plans(connection: sa.Connection) -> list[PlannerSetting]:
    """Return the settings that keep the planner from using indexes, and how to remove them."""
    found = connection.execute(_SETTINGS).mappings()
    return [PlannerSetting(name=row["name"], repair=_RESETS.get(row["source"], "").format(**row)) for row in found]


def _is_long(scan: PlanNode) -> bool:
    """Return whether a scan reads many rows, or an index from its beginning to its end."""
    index = scan.parts[0] if scan.kind == "Bitmap Heap Scan" else scan
    return scan.planned_rows > _SORTED or not index.condition


def _input(node: PlanNode) -> Iterator[PlanNode]:
    """Yield the scans of tables whose rows a node receives."""
    for part in node.parts:
        # A part with a name is a subplan, which is executed for itself.
        if not part.name:
            if part.relation is not None:
                yield part
            yield from _input(part)


_CONDITIONS = ("Index Cond", "Hash Cond", "Merge Cond", "Recheck Cond", "TID Cond")
_FILTERS = ("Filter", "Join Filter", "One-Time Filter")


def explain(connection: sa.Connection, statement: Any, *, execute: bool = False) -> StatementPlan:
    """Return the plan of a statement. With ``execute`` it is executed as well, and the caller rolls it back."""
    text = sql_text(connection, statement)
    options = "ANALYZE, BUFFERS, FORMAT JSON" if execute else "FORMAT JSON"
    # Without parameters, a driver leaves percent signs alone.
    explained: Any = connection.exec_driver_sql(
        f"EXPLAIN ({options}) {text}", execution_options={"no_parameters": True}
    ).scalar_one()
    # Some drivers return a text.
    found: dict[str, Any] = (json.loads(explained) if isinstance(explained, str) else explained)[0]
    return StatementPlan(
        sql=text,
        root=_node(found["Plan"]),
        planning_milliseconds=found.get("Planning Time"),
        execution_milliseconds=found.get("Execution Time"),
    )


def _node(plan: dict[str, Any]) -> PlanNode:
    loops, total = plan.get("Actual Loops"), plan.get("Actual Total Time")
    kind: str = plan["Node Type"]
    return PlanNode(
        kind=plan.get("Operation", kind) if kind == "ModifyTable" else kind,
        relation=plan.get("Relation Name"),
        index=plan.get("Index Name"),
        name=plan.get("Subplan Name") or plan.get("CTE Name", ""),
        condition=_joined(plan, _CONDITIONS),
        filtered=_joined(plan, _FILTERS),
        planned_rows=plan["Plan Rows"],
        rows=plan.get("Actual Rows"),
        loops=loops,
        removed=sum(plan.get(f"Rows Removed by {each}", 0) for each in _FILTERS[:2]),
        milliseconds=None if loops is None or total is None else loops * total,
        buffers=Buffers(
            hit=plan.get("Shared Hit Blocks", 0),
            read=plan.get("Shared Read Blocks", 0),
            dirtied=plan.get("Shared Dirtied Blocks", 0),
            written=plan.get("Shared Written Blocks", 0),
        ),
        parts=tuple(_node(part) for part in plan.get("Plans", ())),
    )


def _joined(plan: dict[str, Any], names: tuple[str, ...]) -> str:
    return " AND ".join(str(plan[name]) for name in names if name in plan)
