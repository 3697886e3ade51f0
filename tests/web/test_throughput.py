"""What has ended in each period, from the attempt history, from an index of finished jobs, or not at all."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from sqlaqueue import States
from sqlaqueue.web.data.past import DAY, HOUR, Throughput, read_throughput
from sqlaqueue.web.data.reader import Unavailable
from tests.admin.models import Setup
from tests.unique.models import KEEPING_ROWS, KINDS
from tests.web.queue_data import HISTORY, attempt, counting_rows, fill, finish, no_table_is_small, read


def throughput(engine: sa.Engine, model: Any, *args: Any, **options: Any) -> Throughput:
    found = read(engine, model, read_throughput, *args, **options)
    assert isinstance(found, Throughput), found
    return found


def unavailable(engine: sa.Engine, model: Any) -> Unavailable:
    found = read(engine, model, read_throughput)
    assert isinstance(found, Unavailable), found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_attempts_are_counted_by_outcome(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None, **HISTORY)
    attempt(setup, "completed", 10, 20, 130)
    attempt(setup, "retried", 15)
    attempt(setup, "rescued", 700)
    attempt(setup, "failed", 3000)
    attempt(setup, "released", 5)
    attempt(setup, "completed", 3700)
    found = throughput(engine, setup.model)
    assert found.totals == {"completed": 3, "retried": 2, "failed": 1, "cancelled": 0}
    assert (found.counts_attempts, found.is_capped, found.bucket) == (True, False, timedelta(minutes=1))
    assert found.ends - found.begins == HOUR.length
    # Retried attempts are no finished jobs.
    assert found.per_minute == pytest.approx(4 / 60)


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_jobs_of_a_small_table_are_counted(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None)
    finish(setup, "completed", 10, 20)
    finish(setup, "failed", 30)
    finish(setup, "cancelled", 4000)
    assert throughput(engine, setup.model).totals == {"completed": 2, "failed": 1, "cancelled": 0}
    assert throughput(engine, setup.model, DAY).totals == {"completed": 2, "failed": 1, "cancelled": 1}


def test_buckets_have_no_gaps_and_begin_at_even_times(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    attempt(setup, "completed", 0, 60, 600, 3599)
    found = throughput(engine, setup.model)
    begins = [bucket.begins for bucket in found.buckets]
    assert {later - earlier for earlier, later in itertools.pairwise(begins)} == {timedelta(minutes=1)}
    assert all(each.second == 0 for each in begins)
    assert begins[0] <= found.begins < begins[1]
    assert begins[-1] <= found.ends < begins[-1] + found.bucket
    assert sum(bucket.total for bucket in found.buckets) == found.total == 4


def test_a_capped_chart_covers_the_newest_and_says_so(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    attempt(setup, "completed", *range(50))
    found = throughput(engine, setup.model, limit=20)
    assert (found.is_capped, found.total) == (True, 20)
    assert timedelta(seconds=19) <= found.ends - found.begins < timedelta(seconds=25)
    # Shorter periods, so that the chart is not one bar.
    assert found.bucket == timedelta(seconds=5)
    assert found.per_minute == pytest.approx(20 / 19 * 60, rel=0.3)


def test_other_queues_of_the_history_are_left_out(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    attempt(setup, "completed", 10)
    setup.execute("UPDATE sqlaqueue_attempt SET queue = 'other'")
    assert throughput(engine, setup.model).total == 0


def test_without_an_index_a_large_table_is_not_read(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    setup = Setup.of(engine, "update_status", unique=None)
    fill(setup, 2000)
    with counting_rows(engine) as reads:
        found = unavailable(engine, setup.model)
    assert reads.by_scan["job"] == 0
    assert "No index has the finished jobs" in found.reason
    history, index = found.fixes
    assert "attempt_history=" in history.code
    # What it says to execute is enough.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(index.code)
    assert throughput(engine, setup.model).totals == {"completed": 1800, "failed": 200, "cancelled": 0}


@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.parametrize(
    "index", ["(finished_at)", "(finished_at) WHERE finished_at IS NOT NULL", "(finished_at DESC NULLS LAST, id)"]
)
def test_an_index_of_the_end_serves_all_states(
    engine: sa.Engine, index: str, monkeypatch: pytest.MonkeyPatch, *, analyzed: bool
) -> None:
    no_table_is_small(monkeypatch)
    setup = Setup.of(engine, "update_status", unique=None)
    fill(setup, 5000)
    setup.execute(f"CREATE INDEX ON job {index}")
    if analyzed:
        setup.execute("ANALYZE job")
    with counting_rows(engine) as reads:
        found = read(engine, setup.model, read_throughput, limit=300)
    if "DESC" in index:
        # Its order is not that of the statement, whose rows without an end come first.
        assert isinstance(found, Unavailable)
        assert (reads.by_scan["job"], reads.by_index["job"]) == (0, 0)
        return
    assert isinstance(found, Throughput)
    assert (found.total, found.is_capped) == (300, True)
    assert reads.by_scan["job"] == 0
    assert reads.by_index["job"] <= 310


def test_the_index_of_the_retention_serves_its_states(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    setup = Setup.of(engine, "update_status", unique=None, retention={"completed": 86400, "failed": 86400})
    fill(setup, 5000)
    finish(setup, "cancelled", 5)
    with counting_rows(engine) as reads:
        found = throughput(engine, setup.model, limit=500)
    assert found.outcomes == ["completed", "failed"]
    assert found.missing is not None
    assert "cancelled" in found.missing.reason
    assert (found.total, found.is_capped) == (500, True)
    # The newest of each state, of which the newest of both are counted.
    assert reads.by_scan["job"] == 0
    assert reads.by_index["job"] <= 2 * 500 + 10


def test_an_index_by_which_rows_are_left_out_does_not_serve(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    setup = Setup.of(engine, "update_status", unique=None)
    fill(setup, 3000)
    setup.execute("CREATE INDEX ON job (status)")
    setup.execute("CREATE INDEX ON job (created_at)")
    with counting_rows(engine) as reads:
        unavailable(engine, setup.model)
    assert (reads.by_scan["job"], reads.by_index["job"]) == (0, 0)


def test_a_history_is_read_by_its_index(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    setup.execute(
        "INSERT INTO sqlaqueue_attempt (queue, key, attempt, started_at, ended_at, outcome) "
        "SELECT 'job', jsonb_build_array(n), 1, now() - n * interval '1 s', now() - n * interval '100 ms', 'completed' "
        "FROM generate_series(1, 5000) AS n"
    )
    with counting_rows(engine) as reads:
        assert throughput(engine, setup.model, limit=300).is_capped
    assert reads.by_scan["sqlaqueue_attempt"] == 0
    assert reads.by_index["sqlaqueue_attempt"] <= 310


def test_deleted_jobs_are_not_counted_and_this_is_said(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "rows_are_messages", unique=None)
    assert "delete the rows" in unavailable(engine, setup.model).reason


def test_completed_jobs_that_are_deleted_are_missing(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, on_complete="delete")
    finish(setup, "failed", 5)
    found = throughput(engine, setup.model)
    assert found.totals == {"failed": 1, "cancelled": 0}
    assert found.missing is not None
    assert "on_complete" in found.missing.reason


def test_a_model_without_the_end_of_jobs_says_so(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, columns={"finished_at": None})
    assert "'finished_at'" in unavailable(engine, setup.model).reason


def test_states_of_other_values_are_found(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, states=States(completed="it's done"))
    finish(setup, "completed", 5, 6)
    assert throughput(engine, setup.model).totals["completed"] == 2
