"""What a page of a list of jobs costs: as much at the end of a large table as at its beginning, whatever the filter."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.web.data.job_filters import parse_filter
from sqlaqueue.web.data.job_orders import orders_of
from sqlaqueue.web.data.job_pages import CAP, Count, count_states, cursor_text, set_planner
from sqlaqueue.web.data.job_sources import source_of
from tests.sent_statements import sent_statements
from tests.strategies.explain import buffers_of, nodes_of
from tests.web.job_lists import columns, create, make_messages, make_rows, make_window_small, page

ROWS = 30_000
WINDOW = 1000

FILL = """
INSERT INTO row (id, few, many, other, status, priority, run_at, attempts, created_at)
SELECT n, n % 2, n / 10, n % 1000,
       CASE WHEN n % 100 = 0 THEN 'failed' WHEN n > 29000 THEN 'pending' ELSE 'completed' END,
       0, now(), 0, now()
FROM generate_series(1, 30000) n
"""


@pytest.fixture(params=["analyzed", "never analyzed"])
def large(engine: sa.Engine, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    make_window_small(monkeypatch, WINDOW)
    model = make_rows()
    create(engine, model)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ALTER TABLE row SET (autovacuum_enabled = false)")
        connection.execute(sa.text(FILL))
        if request.param == "analyzed":
            connection.exec_driver_sql("VACUUM ANALYZE row")
    return model


def cost(engine: sa.Engine, model: Any, *pairs: tuple[str, str]) -> tuple[int, int]:
    """Return the buffers of all statements of a page, and the rows that their scans of the table return."""
    with sent_statements(engine) as sent:
        page(engine, model, *pairs)
    buffers, rows = 0, 0
    with Session(engine) as session:
        set_planner(session, columns(model))
        for statement, parameters in sent:
            if "FROM row" not in statement:
                continue
            explained = session.connection().exec_driver_sql(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
            )
            plan = explained.scalar_one()[0]["Plan"]
            buffers += buffers_of(plan)
            scans = [node for node in nodes_of(plan) if "Relation Name" in node]
            assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}, statement
            rows += round(
                sum(
                    (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
                    for node in scans
                )
            )
    return buffers, rows


def cursor(engine: sa.Engine, model: Any, *pairs: tuple[str, str], key: int) -> str:
    """Return the cursor after the job of a key."""
    with Session(engine) as session:
        source = source_of(columns(model), parse_filter(columns(model), pairs))
        sort = dict(pairs).get("sort", "-id")
        order = orders_of(session, source, source.parts()).by(sort.removeprefix("-"), is_descending=sort[0] == "-")
        assert order is not None
        values = [sa.cast(each.column, sa.Text()) for each in order.all]
        return cursor_text(order, session.execute(sa.select(*values).where(model.id == key)).one())


@pytest.mark.each_value
@pytest.mark.parametrize("sort", ["id", "-id", "many", "-many", "few", "other"])
def test_every_page_costs_the_same(engine: sa.Engine, large: Any, sort: str) -> None:
    first = cost(engine, large, ("sort", sort))
    middle = cost(engine, large, ("sort", sort), ("after", cursor(engine, large, ("sort", sort), key=15_000)))
    back = cost(engine, large, ("sort", sort), ("before", cursor(engine, large, ("sort", sort), key=15_000)))
    # Of `few`, half of the table is equal: up to a window of a group is counted, and as many rows are walked over.
    limit = WINDOW + 400 if sort == "few" else 300
    for buffers, rows in (first, middle, back):
        assert rows <= limit
        assert buffers <= limit


@pytest.mark.each_value
@pytest.mark.parametrize(
    "pairs",
    [
        [("state", "cancelled")],
        [("error", "ValueError")],
        [("f.other.max", "-1"), ("sort", "many")],
        [("f.few", "1"), ("f.other", "2")],
        [("f.few", "0"), ("state", "failed"), ("sort", "-many")],
        [("f.few.min", "1"), ("state", "cancelled")],
        [("state", "pending"), ("f.other", "-1")],
    ],
)
def test_filter_without_an_index_examines_a_window(engine: sa.Engine, large: Any, pairs: list[tuple[str, str]]) -> None:
    _, rows = cost(engine, large, *pairs)
    assert rows <= 2 * WINDOW + 10


def test_filter_with_an_index_examines_its_rows(engine: sa.Engine, large: Any) -> None:
    for pairs, limit in (
        ([("job", "77")], 2),
        ([("f.other", "7")], 52),
        ([("f.many", "7"), ("f.few", "1")], 30),
        ([("state", "pending"), ("sort", "priority")], 52),
        ([("f.other", "7"), ("f.few", "1"), ("sort", "many")], 120),
        ([("state", "processing")], 0),
        # Half of the table.
        ([("f.few", "1"), ("sort", "-many")], 1070),
        ([("f.few.null", "yes"), ("sort", "-many")], 0),
        ([("state", "other")], 1070),
    ):
        _, rows = cost(engine, large, *pairs)
        assert rows <= limit, pairs


def test_counts_are_capped_and_examine_a_window(engine: sa.Engine, large: Any) -> None:
    with sent_statements(engine) as sent, Session(engine) as session:
        counts = count_states(session, parse_filter(columns(large), []))
    assert counts[None] == Count(CAP, is_complete=False)
    assert counts["pending"] == Count(990, is_complete=True)
    assert counts["processing"] == Count(0, is_complete=True)
    assert counts["failed"] == Count(11, is_complete=False)
    assert counts["cancelled"] == Count(0, is_complete=False)
    assert not counts["cancelled"].is_known
    assert counts["other"] == Count(0, is_complete=False)
    rows = 0
    with Session(engine) as session:
        set_planner(session, columns(large))
        for statement, parameters in sent:
            if "FROM row" in statement:
                explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
                plan = session.connection().exec_driver_sql(explain, parameters).scalar_one()[0]["Plan"]
                rows += sum(node["Actual Rows"] for node in nodes_of(plan) if "Relation Name" in node)
    # The pending jobs, and which of them are due: all are.
    assert rows <= CAP + 1 + 2 * 990 + WINDOW + 10
    with Session(engine) as session:
        filtered = count_states(session, parse_filter(columns(large), [("f.many", "7")]))
    assert filtered[None] == Count(10, is_complete=True)
    assert filtered["completed"] == Count(10, is_complete=True)


def test_dead_letters_of_other_queues_are_not_examined(engine: sa.Engine) -> None:
    model = make_messages()
    create(engine, model)
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO sqlaqueue_dead_letter (queue, key, row, state) "
                "SELECT q, jsonb_build_array(n), jsonb_build_object('id', n), 'failed' "
                "FROM generate_series(1, 2000) n, (VALUES ('a'), ('note'), ('z')) AS queues (q)"
            )
        )
    with sent_statements(engine) as sent:
        found = page(engine, model, ("state", "failed"), ("sort", "id"))
    assert [job.key for job in found.jobs] == [str(number) for number in range(1, 51)]
    with Session(engine) as session:
        set_planner(session, columns(model))
        (statement, parameters) = next(each for each in sent if "jsonb_to_record" in each[0])
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
        plan = session.connection().exec_driver_sql(explain, parameters).scalar_one()[0]["Plan"]
    assert sum(node["Actual Rows"] for node in nodes_of(plan) if node.get("Relation Name")) <= 52
