"""What has ended: throughput, wait and run times, kinds of errors, and the charts that show them."""

import itertools
import re
from datetime import timedelta
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import sqlalchemy as sa

from sqlaqueue import States
from sqlaqueue.web.charts import Bar, Range, bar_chart, nice_maximum, range_chart, sparkline
from sqlaqueue.web.data.failures import CappedCount, Failures, count_failed, read_failures
from sqlaqueue.web.data.past import (
    DAY,
    HOUR,
    Durations,
    Percentiles,
    Throughput,
    read_durations,
    read_throughput,
)
from sqlaqueue.web.data.reader import Unavailable
from tests.admin.models import Setup
from tests.web.jobs import (
    HISTORY,
    KEEPING_ROWS,
    KINDS,
    attempt,
    counting_rows,
    fill_finished,
    finish,
    no_table_is_small,
    read,
)


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
    fill_finished(setup, 2000)
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
    fill_finished(setup, 5000)
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
    fill_finished(setup, 5000)
    finish(setup, "cancelled", 5)
    with counting_rows(engine) as reads:
        found = throughput(engine, setup.model, limit=500)
    assert found.outcomes == ["completed", "failed"]
    assert "cancelled" in found.missing.reason
    assert (found.total, found.is_capped) == (500, True)
    # The newest of each state, of which the newest of both are counted.
    assert reads.by_scan["job"] == 0
    assert reads.by_index["job"] <= 2 * 500 + 10


def test_an_index_by_which_rows_are_left_out_does_not_serve(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    setup = Setup.of(engine, "update_status", unique=None)
    fill_finished(setup, 3000)
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
    assert "on_complete" in found.missing.reason


def test_a_model_without_the_end_of_jobs_says_so(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, columns={"finished_at": None})
    assert "'finished_at'" in unavailable(engine, setup.model).reason


def test_states_of_other_values_are_found(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None, states=States(completed="it's done"))
    finish(setup, "completed", 5, 6)
    assert throughput(engine, setup.model).totals["completed"] == 2


# -- percentiles of wait and run times, and the kinds of errors of failed jobs -------------------------------------

STARTED = {"extra_columns": ("started_at",)}


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
        "QueueConfig(extra_columns=('started_at',))",
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
    no_table_is_small(monkeypatch, SAMPLE=200, JOINED=100)
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    fill_finished(setup, 5000, attempts=True)
    with counting_rows(engine) as reads:
        found = durations(engine, setup.model)
    assert (values(found.runs)[-1], values(found.waits)[-1]) == (200, 100)
    assert (reads.by_scan["job"], reads.by_scan["sqlaqueue_attempt"]) == (0, 0)
    assert reads.by_index["job"] <= 110
    assert reads.by_index["sqlaqueue_attempt"] <= 320


def kinds_of(found: Any) -> list[tuple[str, int]]:
    assert isinstance(found, Failures), found
    return [*found.kinds]


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_failures_are_grouped_by_kind(engine: sa.Engine, kind: str) -> None:
    setup = Setup.of(engine, kind, unique=None)
    finish(setup, "failed", 30, error="ValueError: old")
    finish(setup, "failed", 10, error="ValueError: new")
    finish(setup, "failed", 20, error="no_stock: order 1")
    finish(setup, "cancelled", 5, error="Cancel: no")
    finish(setup, "failed", 40)
    found = read(engine, setup.model, read_failures)
    assert kinds_of(found) == [("ValueError", 2), ("", 1), ("no_stock", 1)]
    assert isinstance(found, Failures)
    assert [each.error for each in found.groups if each.message == "new"] == ["ValueError: new"]
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
    assert kinds_of(read(engine, setup.model, read_failures)) == [("KeyError", 2)]
    assert read(engine, setup.model, count_failed) == CappedCount(number=2, is_capped=False)


def test_failures_of_a_large_table(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch, COUNTED=50, GROUPED=50)
    setup = Setup.of(engine, "update_status", unique=None)
    fill_finished(setup, 5000)
    with counting_rows(engine) as reads:
        counted, grouped = (read(engine, setup.model, each) for each in (count_failed, read_failures))
    assert reads.by_scan["job"] == reads.by_index["job"] == 0
    assert isinstance(grouped, Unavailable)
    assert isinstance(counted, Unavailable)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(counted.fixes[0].code)
    with counting_rows(engine) as reads:
        assert read(engine, setup.model, count_failed) == CappedCount(number=50, is_capped=True)
        found = read(engine, setup.model, read_failures)
    assert kinds_of(found) == [("ValueError", 50)]
    assert isinstance(found, Failures)
    assert found.is_capped
    assert reads.by_scan["job"] == 0
    assert reads.by_index["job"] <= 110


def test_failures_of_attempts_where_no_index_has_the_jobs(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    no_table_is_small(monkeypatch)
    setup = Setup.of(engine, "update_status", unique=None, **HISTORY)
    finish(setup, "failed", 10, error="ValueError: x")
    attempt(setup, "failed", 10, error="ValueError: x")
    attempt(setup, "retried", 20, error="ValueError: x")
    found = read(engine, setup.model, read_failures)
    assert kinds_of(found) == [("ValueError", 1)]
    assert isinstance(found, Failures)
    assert found.of_attempts


def test_an_index_by_which_rows_are_left_out_does_not_serve_failures(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_table_is_small(monkeypatch, LIMIT=100)
    setup = Setup.of(engine, "update_status", unique=None)
    fill_finished(setup, 5000)
    setup.execute("CREATE INDEX ON job (finished_at)")
    setup.execute("ANALYZE job")
    with counting_rows(engine) as reads:
        found = read(engine, setup.model, read_failures)
    # Those among the newest hundred; to find more, the index would be read to its end.
    assert kinds_of(found) == [("ValueError", 10)]
    assert reads.by_scan["job"] == 0
    assert reads.by_index["job"] <= 110


# -- the SVG of charts: well-formed, of numbers only, with a text for readers who do not see it --------------------

SERIES = ("completed", "failed")


def parse(markup: Any) -> ET.Element:
    """Return a chart as XML; nothing in it needs inline styles or code."""
    text = str(markup)
    assert not re.search(r"\bstyle=|<script|\bon\w+=|nan|inf\b|e[+-]\d\d", text)
    return ET.fromstring(text.replace(' tabindex="0"', ""))  # noqa: S314 - made by the test


def chart(*bars: Bar, ticks: Any = ("1 h ago", "now")) -> ET.Element:
    return parse(bar_chart("c", bars, SERIES, title="Title", description="Description", ticks=ticks))


def bar(label: str = "12:00 UTC", **parts: int) -> Bar:
    return Bar(label=label, parts=parts)


def rects(element: ET.Element, name: str) -> list[dict[str, float]]:
    found = element.iter("rect")
    keys = ("x", "y", "width", "height")
    return [{key: float(each.attrib[key].rstrip("%")) for key in keys} for each in found if each.get("class") == name]


@pytest.mark.parametrize(
    ("value", "end"), [(0, 2), (1, 2), (3, 4), (7, 8), (10, 10), (11, 12), (23, 24), (102, 120), (10**19, 10**19)]
)
def test_axes_end_at_round_numbers(value: int, end: int) -> None:
    assert nice_maximum(value) == end
    assert nice_maximum(value) % 2 == 0


def test_bars_are_stacked_in_order() -> None:
    drawn = chart(bar(completed=6, failed=2), bar(completed=10))
    completed, failed = rects(drawn, "chart-completed"), rects(drawn, "chart-failed")
    # The axis ends at ten, and is 120 pixels high.
    assert [each["y"] for each in completed] == [120 - 72, 0]
    assert [each["y"] for each in failed] == [120 - 96]
    # The failed part is drawn first and lies behind the completed one.
    assert failed[0]["x"] == completed[0]["x"]
    assert completed[1]["x"] - completed[0]["x"] == 50


def test_one_failure_among_thousands_is_seen() -> None:
    drawn = chart(bar(completed=100_000, failed=1))
    (failed,), (completed,) = rects(drawn, "chart-failed"), rects(drawn, "chart-completed")
    assert completed["y"] - failed["y"] >= 1.5
    assert failed["y"] >= 0


def test_bars_stay_within_the_plot() -> None:
    many = [bar(completed=number, failed=50 - number) for number in range(50)]
    for each in rects(chart(*many), "chart-completed") + rects(chart(*many), "chart-failed"):
        assert 0 <= each["x"] <= 100 - each["width"]
        assert 0 <= each["y"] <= 120


def test_a_chart_has_a_title_a_description_and_a_table() -> None:
    drawn = chart(bar("12:00 UTC", completed=1200), bar("12:01 UTC"), bar("12:02 UTC", failed=3))
    svg = drawn.find(".//svg")
    assert svg is not None
    ids = {each.attrib["id"] for each in drawn.iter() if "id" in each.attrib}
    assert set(svg.attrib["aria-labelledby"].split()) <= ids
    rows = [[*row.itertext()] for row in drawn.iter("tr")]
    # The newest first, without empty periods.
    assert rows == [["From", *SERIES], ["12:02 UTC", "0", "3"], ["12:00 UTC", "1,200", "0"]]
    tooltips = [each.findtext("title") for each in drawn.iter("g")]
    assert tooltips == ["12:00 UTC: 1,200 completed", "12:01 UTC: none", "12:02 UTC: 3 failed"]


def test_texts_are_escaped() -> None:
    drawn = parse(bar_chart("c", [bar("<b>", completed=1)], SERIES, title="<&>", description="'\"", ticks=["<i>"]))
    assert drawn.findtext(".//svg/title") == "<&>"
    assert drawn.find(".//b") is None


@pytest.mark.parametrize("values", [[], [0, 0], [5], [0, 10**15, 3]])
def test_sparklines_of_any_numbers(values: list[int]) -> None:
    drawn = parse(sparkline(values, title="12 finished"))
    assert drawn.findtext("title") == "12 finished"
    assert len(rects(drawn, "spark-bar")) == sum(value > 0 for value in values)
    assert all(0 <= each["y"] < 28 for each in rects(drawn, "spark-bar"))


def test_no_bars_at_all() -> None:
    assert rects(chart(), "chart-completed") == []
    assert rects(chart(bar()), "chart-completed") == []


@pytest.mark.parametrize(
    "times", [(0, 0, 0), (0.0001, 0.0002, 0.5), (0.5, 0.5, 0.5), (3, 70, 4000), (1, 10**6, 10**9), (9e6, 1e7, 2e7)]
)
def test_ranges_are_in_order_and_within_the_chart(times: tuple[float, float, float]) -> None:
    p50, p95, p99 = times
    rows = [Range(label="Wait", p50=p50, p95=p95, p99=p99), Range(label="Run", p50=0.01, p95=0.02, p99=0.03)]
    drawn = parse(range_chart("r", rows, title="Times", description="Of runs"))
    for group in drawn.iter("g"):
        places = {each.get("class"): each for each in group}
        median = float(places["chart-median"].attrib["cx"].rstrip("%"))
        body, tail = (float(places[name].attrib["x2"].rstrip("%")) for name in ("chart-body", "chart-tail"))
        assert 0 < median <= body <= tail <= 97
    ticks = [each.text for each in drawn.iter("text") if each.get("class") is None]
    assert len(ticks) >= 2


def test_a_range_is_told_in_words() -> None:
    drawn = parse(range_chart("r", [Range(label="Run", p50=0.25, p95=2, p99=75)], title="T", description="D"))
    assert drawn.findtext(".//g/title") == "Run: p50 250 ms, p95 2.0 s, p99 1 min 15 s"
