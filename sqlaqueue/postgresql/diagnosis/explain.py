"""The plan of any statement, by EXPLAIN; executed by EXPLAIN (ANALYZE, BUFFERS)."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.diagnosis.sql import sql_text
from sqlaqueue.queue.executed_plan import Buffers, PlanNode, StatementPlan

_CONDITIONS = ("Index Cond", "Hash Cond", "Merge Cond", "Recheck Cond", "TID Cond")
_FILTERS = ("Filter", "Join Filter", "One-Time Filter")


def explain(connection: sa.Connection, statement: Any, *, execute: bool = False) -> StatementPlan:
    """Return the plan of a statement.

    :param execute: whether to execute it as well. The caller rolls back what it changes.
    """
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
    return PlanNode(
        kind=_kind(plan),
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


def _kind(plan: dict[str, Any]) -> str:
    """Return the kind of a step; of one that changes rows, what it does with them."""
    kind: str = plan["Node Type"]
    return str(plan.get("Operation", kind)) if kind == "ModifyTable" else kind


def _joined(plan: dict[str, Any], names: tuple[str, ...]) -> str:
    return " AND ".join(str(plan[name]) for name in names if name in plan)
