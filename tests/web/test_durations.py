"""Percentiles of wait and run times, and the kinds of errors of failed jobs."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue.web.data.past import (
    CappedCount,
    Durations,
    FailureKinds,
    Percentiles,
    count_failed,
    read_durations,
    read_failure_kinds,
)
from sqlaqueue.web.data.reader import Unavailable
from tests.admin.models import Setup
from tests.unique.models import KEEPING_ROWS, KINDS
from tests.web.queue_data import HISTORY, attempt, counting_rows, fill, finish, no_table_is_small, read

STARTED = {"columns": {"started_at": "started_at"}}


def durations(engine: sa.Engine, model: Any) -> Durations:
    return read(engine, model, read_durations)


def values(found: Any) -> tuple[float, ...]:
    assert isinstance(found, Percentiles), found
    return (*tuple(round(each, 2) for each in (found.p50, found.p95, found.p99, found.longest)), found.number)


@pytest.mark.parametrize("kind", KINDS)
def test_run_times_of_attempts(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None, **HISTORY)
    for took in range(1, 101):
        attempt(setup, "completed", 10, took=took)
    # Neither its end nor a claim is the handler's.
    attempt(setup, "rescued", 10, took=5000)
    assert values(durations(engine, setup.model).runs) == (50.5, 95.05, 99.01, 100, 100)


def test_wait_times_are_those_of_the_last_attempt(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    # Enqueued 100 s before it was due, and started 4 s after that.
    finish(setup, "completed", 10, created_at=105, run_at=5)
    setup.execute("UPDATE job SET attempts = 1")
    attempt(setup, "completed", 10, key=1, took=1)
    # Retried: of the first attempt it is not known any more when the job was due.
    finish(setup, "completed", 10, created_at=500, run_at=3)
    setup.execute("UPDATE job SET attempts = 2 WHERE id = 2")
    attempt(setup, "retried", 300, key=2, took=1)
    attempt(setup, "completed", 10, key=2, number=2, took=1)
    # Requeued after it had failed, as the first and the second attempt.
    finish(setup, "completed", 5, created_at=500, run_at=4)
    setup.execute("UPDATE job SET attempts = 1 WHERE id = 3")
    attempt(setup, "failed", 200, key=3, took=1)
    attempt(setup, "failed", 1, key=3, number=2, took=1)
    attempt(setup, "completed", 5, key=3, took=0.5)
    # Its row is deleted.
    attempt(setup, "completed", 10, key=99, took=1)
    # Between two statements some time passes.
    assert values(durations(engine, setup.model).waits) == pytest.approx((3.5, 3.95, 3.99, 4, 3), abs=0.4)


@pytest.mark.parametrize("kind", [kind for kind in KEEPING_ROWS if kind != "existing_messages"])
def test_times_of_rows_with_a_start(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None, **STARTED)
    finish(setup, "completed", 10, 20, started_at=2, run_at=5, created_at=50)
    finish(setup, "failed", 30, started_at=2, run_at=5, created_at=50)
    found = durations(engine, setup.model)
    assert values(found.runs) == (2, 2, 2, 2, 3)
    assert values(found.waits) == (3, 3, 3, 3, 3)


def test_without_a_start_the_fix_is_named(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    found = durations(engine, setup.model).runs
    assert isinstance(found, Unavailable)
    assert [fix.code for fix in found.fixes] == [
        "__queue__ = QueueConfig(..., attempt_history=timedelta(days=14))",
        "QueueConfig(columns={'started_at': 'started_at'})",
    ]


def test_nothing_has_run(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    assert durations(engine, setup.model) == Durations(waits=None, runs=None)


def test_deleted_rows_have_no_wait_times(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "rows_are_messages", unique=None, **HISTORY)
    attempt(setup, "completed", 5)
    found = durations(engine, setup.model)
    assert isinstance(found.waits, Unavailable)
    assert isinstance(found.runs, Percentiles)


def test_clocks_that_differ_make_no_negative_times(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, **STARTED)
    finish(setup, "completed", 10, started_at=-1, run_at=-3, created_at=50)
    found = durations(engine, setup.model)
    assert (values(found.runs)[0], values(found.waits)[0]) == (0, 0)


def test_few_rows_are_read_of_a_large_table(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    monkeypatch.setattr("sqlaqueue.web.data.past.SAMPLE", 200)
    monkeypatch.setattr("sqlaqueue.web.data.past.JOINED", 100)
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    fill(setup, 5000)
    setup.execute(
        "INSERT INTO sqlaqueue_attempt (queue, key, attempt, started_at, ended_at, outcome) "
        "SELECT 'job', jsonb_build_array(id), 1, finished_at, finished_at, status FROM job"
    )
    setup.execute("ANALYZE")
    with counting_rows(engine) as reads:
        found = durations(engine, setup.model)
    assert (values(found.runs)[-1], values(found.waits)[-1]) == (200, 100)
    assert (reads.by_scan["job"], reads.by_scan["sqlaqueue_attempt"]) == (0, 0)
    assert reads.by_index["job"] <= 110
    assert reads.by_index["sqlaqueue_attempt"] <= 320


def kinds_of(found: Any) -> list[tuple[str, int]]:
    assert isinstance(found, FailureKinds), found
    return [(each.kind, each.number) for each in found.kinds]


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_failures_are_grouped_by_kind(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None)
    finish(setup, "failed", 30, error="ValueError: old")
    finish(setup, "failed", 10, error="ValueError: new")
    finish(setup, "failed", 20, error="no_stock: order 1")
    finish(setup, "cancelled", 5, error="Cancel: no")
    finish(setup, "failed", 40)
    found = read(engine, setup.model, read_failure_kinds)
    assert kinds_of(found) == [("ValueError", 2), ("", 1), ("no_stock", 1)]
    assert isinstance(found, FailureKinds)
    assert found.kinds[0].error == "ValueError: new"
    assert read(engine, setup.model, count_failed) == CappedCount(number=4, is_capped=False)


def test_failures_of_dead_letters(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "rows_are_messages", unique=None)
    for key, state in enumerate(("failed", "failed", "cancelled")):
        setup.execute(
            "INSERT INTO sqlaqueue_dead_letter (queue, key, row, state, error) "
            "VALUES ('job', jsonb_build_array(CAST(:key AS int)), '{}', :state, 'KeyError: x')",
            key=key,
            state=state,
        )
    assert kinds_of(read(engine, setup.model, read_failure_kinds)) == [("KeyError", 2)]
    assert read(engine, setup.model, count_failed) == CappedCount(number=2, is_capped=False)


def test_failures_of_a_large_table(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    monkeypatch.setattr("sqlaqueue.web.data.past.COUNTED", 50)
    monkeypatch.setattr("sqlaqueue.web.data.past.GROUPED", 50)
    setup = Setup.of(engine, "update_status", unique=None)
    fill(setup, 5000)
    with counting_rows(engine) as reads:
        counted, grouped = (read(engine, setup.model, each) for each in (count_failed, read_failure_kinds))
    assert reads.by_scan["job"] == reads.by_index["job"] == 0
    assert isinstance(grouped, Unavailable)
    assert isinstance(counted, Unavailable)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(counted.fixes[0].code)
    with counting_rows(engine) as reads:
        assert read(engine, setup.model, count_failed) == CappedCount(number=50, is_capped=True)
        found = read(engine, setup.model, read_failure_kinds)
    assert kinds_of(found) == [("ValueError", 50)]
    assert isinstance(found, FailureKinds)
    assert found.is_capped
    assert reads.by_scan["job"] == 0
    assert reads.by_index["job"] <= 110


def test_failures_of_attempts_where_no_index_has_the_jobs(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    finish(setup, "failed", 10, error="ValueError: x")
    attempt(setup, "failed", 10, error="ValueError: x")
    attempt(setup, "retried", 20, error="ValueError: x")
    found = read(engine, setup.model, read_failure_kinds)
    assert kinds_of(found) == [("ValueError", 1)]
    assert isinstance(found, FailureKinds)
    assert found.of_attempts


def test_an_index_by_which_rows_are_left_out_does_not_serve(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    monkeypatch.setattr("sqlaqueue.web.data.past.LIMIT", 100)
    setup = Setup.of(engine, "update_status", unique=None)
    fill(setup, 5000)
    setup.execute("CREATE INDEX ON job (finished_at)")
    setup.execute("ANALYZE job")
    with counting_rows(engine) as reads:
        found = read(engine, setup.model, read_failure_kinds)
    # Those among the newest hundred; to find more, the index would be read to its end.
    assert kinds_of(found) == [("ValueError", 10)]
    assert reads.by_scan["job"] == 0
    assert reads.by_index["job"] <= 110
