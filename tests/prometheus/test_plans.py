"""The depth of a queue is read from the indexes of claims and leases, and no more of them than is counted."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from tests.admin.models import Setup
from tests.prometheus.values import collect
from tests.sent_statements import sent_statements
from tests.strategies.explain import buffers_of, nodes_of

JOBS = 10_000
FILL = """
INSERT INTO job (status, priority, run_at, attempts, max_attempts, created_at)
SELECT %s, number %% 3, now() + number * interval '1 ms' - interval '1 hour', 0, 5, now()
FROM generate_series(1, %s) number
"""


def plan_of_depth(engine: sa.Engine, model: Any, limit: int) -> dict[str, Any]:
    """Execute the statement of a scrape that counts jobs under EXPLAIN, with the settings of its transaction."""
    with sent_statements(engine) as seen:
        assert collect(engine, model, count_limit=limit)["due_jobs", "job"] == limit
    settings, (statement, parameters), *_ = seen
    with engine.connect() as connection:
        connection.exec_driver_sql(*settings)
        explained = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
        plan: dict[str, Any] = explained.scalar_one()[0]["Plan"]
        return plan


@pytest.mark.parametrize("kind", ["update_status", "batch_select", "delete_returning"])
@pytest.mark.parametrize("analyzed", [True, False])
def test_a_backlog_costs_as_much_as_is_counted(engine: sa.Engine, kind: str, *, analyzed: bool) -> None:
    setup = Setup.of(engine, kind, unique=None)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE job SET (autovacuum_enabled = false)")
        columns = {column.name for column in setup.model.__table__.c}
        assert {"status", "priority", "run_at", "attempts", "max_attempts", "created_at"} <= columns
        for status in ("completed", "pending"):
            connection.exec_driver_sql(FILL, (status, JOBS))
    if analyzed:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")
    plan = plan_of_depth(engine, setup.model, 100)
    scans = [node for node in nodes_of(plan) if "Relation Name" in node]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}
    # The three priorities, a hundred jobs of each, and the first hundred of all; the server rounds the means of loops.
    assert round(sum(node["Actual Rows"] * node["Actual Loops"] for node in scans)) <= 3 + 3 * 100 + 100 + 10
    if analyzed:
        assert buffers_of(plan) < 100
