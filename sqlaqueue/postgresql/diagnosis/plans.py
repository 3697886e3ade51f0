"""Whether the planner finds the claim's index: the plan of a claim, which is not executed.

A claim has no parameter by which a plan of all its executions would differ from this one: its limit is part of the
text, the time is a function, and status values are literals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog.citus import LOCAL, has_citus, placements
from sqlaqueue.postgresql.catalog.index_definitions import plan_of
from sqlaqueue.postgresql.catalog.plans import disabled_settings, table_size
from sqlaqueue.postgresql.diagnosis.sql import name_of, sql_text
from sqlaqueue.queue.diagnosis_protocol import PlannerSetting, TableRead
from sqlaqueue.queue.spec import QueueSpec

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
    """Return whether the rows of a queue are on shards of Citus."""
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
    # Without parameters, a driver leaves percent signs alone.
    explained = connection.exec_driver_sql(
        f"EXPLAIN (FORMAT JSON) {sql_text(connection, claim)}", execution_options={"no_parameters": True}
    ).scalar_one()
    plan = plan_of(explained)
    names = {table.name: table for table in tables}
    reads: list[TableRead] = []
    how: dict[str, Literal["scan", "sort"]] = {name: "sort" for name in _sorted(plan) if name in names}
    how |= {name: "scan" for name in _scanned(plan) if name in names}
    for name, read in how.items():
        size = table_size(connection, names[name])
        text = name_of(connection, names[name])
        reads.append(
            TableRead(how=read, table=text, rows=size.rows, analyzed_at=size.analyzed_at, changed=size.changed)
        )
    return reads


def disabled_plans(connection: sa.Connection) -> list[PlannerSetting]:
    """Return the settings that keep the planner from using indexes, and how to remove them."""
    return [
        PlannerSetting(
            name=row.name,
            repair=_RESETS.get(row.source, "").format(name=row.name, database=row.database, role=row.role),
        )
        for row in disabled_settings(connection)
    ]


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from _nodes(part)


def _scanned(plan: dict[str, Any]) -> Iterator[str]:
    """Yield the tables that are read whole."""
    for node in _nodes(plan):
        if node["Node Type"] == "Seq Scan":
            yield node["Relation Name"]


def _sorted(plan: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of which many rows are sorted."""
    for node in _nodes(plan):
        if node["Node Type"] == "Sort":
            yield from (each["Relation Name"] for each in _input(node) if _is_long(each))


def _is_long(scan: dict[str, Any]) -> bool:
    """Return whether a scan reads many rows, or an index from its beginning to its end."""
    index = scan["Plans"][0] if scan["Node Type"] == "Bitmap Heap Scan" else scan
    return bool(scan["Plan Rows"] > _SORTED or "Index Cond" not in index)


def _input(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the scans of tables whose rows a node receives."""
    for part in node.get("Plans", ()):
        if part.get("Parent Relationship") not in {"InitPlan", "SubPlan"}:
            if "Relation Name" in part:
                yield part
            yield from _input(part)
