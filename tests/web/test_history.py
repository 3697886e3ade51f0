"""The history of a queue, from the minutes that Consumers write: how it is read, drawn and shown."""

import html
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.plans import explain
from sqlaqueue.postgresql.side_tables import BOUNDS, COUNTED, MEASURED, WAITS
from sqlaqueue.queue.names import MINUTE
from sqlaqueue.web import Access
from sqlaqueue.web.charts import GAP, Axis, history_charts, line_chart
from sqlaqueue.web.data.history import History, Latency, percentile, points, read_history
from sqlaqueue.web.data.past import DAY, HOUR, HOURS, MONTH, SPANS, WEEK, ChartSpan
from tests.admin.models import Setup
from tests.models import make_job, sent_statements
from tests.shared_database import each_engine
from tests.web.conftest import ask
from tests.web.jobs import HISTORY, attempt, counting_rows

__all__ = ["each_engine"]

NOW = datetime(2026, 5, 4, 12, 30, 10, tzinfo=UTC)
MOST_POINTS = 200

Rows = Mapping[int, Mapping[str, int]]
"""The columns of minutes by how many minutes ago they were."""


def number_of(moment: datetime) -> int:
    return int(moment.timestamp() // 60)


def write(engine: sa.Engine, model: Any, rows: Rows, *, now: datetime = NOW, queue: str = "job") -> None:
    table = model.metadata.tables[MINUTE]
    given = [{"queue": queue, "minute": number_of(now) - ago, **columns} for ago, columns in rows.items()]
    with engine.begin() as connection:
        for names in {tuple(row): None for row in given}:
            connection.execute(sa.insert(table), [row for row in given if tuple(row) == names])


def history_of(engine: sa.Engine, model: Any, span: ChartSpan = HOUR, now: datetime = NOW) -> History | None:
    with Session(engine) as session:
        return read_history(session, spec_of(model), span, now)


@pytest.fixture
def model(each_engine: sa.Engine) -> Any:
    made = make_job(statistics=True)
    made.metadata.create_all(each_engine)
    return made


def test_minutes_are_summed_up_to_points(each_engine: sa.Engine, model: Any) -> None:
    rows: Rows = {
        31: {"completed": 2, "failed": 1, "retried": 1, "pending": 7, "due": 3, "oldest_due": 20, "wait_3": 4},
        33: {"completed": 4, "pending": 9, "due": 1, "oldest_due": None, "wait_3": 3, "wait_10": 1},  # type: ignore[dict-item] # nothing was due
        50: {"pending": 0, "due": 0},
        # Of the day before, and of another hour.
        1500: {"completed": 100},
    }
    write(each_engine, model, rows)
    write(each_engine, model, {31: {"completed": 1000}}, queue="other")
    found = history_of(each_engine, model, HOURS)
    assert found is not None
    assert found.step == timedelta(minutes=5)
    known = {at: point for at, point in zip(found.begins, found.points, strict=True) if point is not None}
    assert [f"{at:%H:%M}" for at in known] == ["11:40", "11:55"]
    quiet, busy = known.values()
    assert busy.counts == {"completed": 6, "failed": 1, "retried": 1}
    assert (busy.pending, busy.due, busy.oldest_due) == (9, 3, 20)
    assert busy.failure_rate == pytest.approx(2 / 8)
    assert busy.waits == Latency(p50=percentile([0, 0, 0, 7, *[0] * 6, 1], 0.5), p95=pytest.approx(5, abs=3))
    assert busy.runs is None
    # A Consumer ran, but no job.
    assert (quiet.counts, quiet.pending, quiet.failure_rate, quiet.waits) == ({}, 0, None, None)
    assert found.throughput().totals == {"completed": 6, "failed": 1, "retried": 1, "cancelled": 0}


@pytest.mark.parametrize("span", SPANS, ids=lambda span: span.name)
def test_each_span_has_few_points(each_engine: sa.Engine, model: Any, span: ChartSpan) -> None:
    last = span.length // timedelta(minutes=1) - 1
    write(each_engine, model, {1: {"completed": 1}, last: {"completed": 2}, last + 1000: {"completed": 4}})
    found = history_of(each_engine, model, span)
    assert found is not None
    assert 50 <= len(found.points) <= MOST_POINTS
    assert sum(point.counts["completed"] for point in found.points if point is not None) == 3
    first, *_ = found.begins
    assert first <= NOW - span.length < first + found.step
    assert all((at - first) % found.step == timedelta(0) for at in found.begins)


def test_what_no_consumer_has_written_is_none(each_engine: sa.Engine, model: Any) -> None:
    assert history_of(each_engine, model) is None
    write(each_engine, model, {number: {"pending": 0} for number in range(10, 60) if number not in {20, 21}})
    found = history_of(each_engine, model)
    assert found is not None
    missing = {f"{at:%H:%M}" for at, point in zip(found.begins, found.points, strict=True) if point is None}
    # The last minute, which has just ended, and the one that is not over are not written yet.
    assert missing == {"12:10", "12:09", *(f"12:{minute}" for minute in range(21, 29)), "11:30"}


@pytest.mark.parametrize(("second", "last"), [(10, "12:28"), (40, "12:29")])
def test_a_minute_that_has_just_ended_is_no_gap(each_engine: sa.Engine, model: Any, second: int, last: str) -> None:
    write(each_engine, model, {number: {"pending": 0} for number in range(2, 60)})
    found = history_of(each_engine, model, now=NOW.replace(second=second))
    assert found is not None
    assert f"{found.begins[-1]:%H:%M}" == last


@pytest.mark.parametrize(
    ("numbers", "share", "seconds"),
    [
        ({0: 4}, 0.5, 0.001),
        ({1: 10}, 0.5, 0.0035),
        ({1: 10}, 1.0, 0.005),
        ({1: 5, 8: 5}, 0.5, 0.005),
        ({1: 5, 8: 5}, 0.95, 0.95),
        ({len(BOUNDS): 3}, 0.5, 86400),
    ],
)
def test_a_percentile_is_within_its_class(numbers: dict[int, int], share: float, seconds: float) -> None:
    assert percentile([numbers.get(place, 0) for place in range(len(WAITS))], share) == pytest.approx(seconds)


# -- what is read ----------------------------------------------------------------------------------------------------

FILL = """
INSERT INTO sqlaqueue_minute (queue, minute, pending, due, completed, wait_3, run_5)
SELECT queue, :now - ago, 5, 1, 10, 4, 6
FROM generate_series(0, 44000) AS ago, unnest(CAST(:queues AS text[])) AS queue
"""


def test_a_month_of_one_of_five_queues_is_read_by_the_key(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", statistics=True, unique=None)
    queues = ["a", "b", "job", "x", "y"]
    setup.execute(FILL, now=number_of(NOW), queues=queues)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("VACUUM ANALYZE sqlaqueue_minute")
    with counting_rows(engine) as reads:
        found = history_of(engine, setup.model, MONTH)
    assert found is not None
    assert len(found.points) <= MOST_POINTS
    assert found.throughput().totals["completed"] == 10 * 43_201
    assert reads.by_scan[MINUTE] == 0
    assert reads.by_index[MINUTE] == 43_201
    with engine.connect() as connection:
        last = number_of(NOW)
        statement = points(spec_of(setup.model), last - 43_200, last, 720)
        nodes = [*explain(connection, statement).root.nodes()]
    assert [node.index for node in nodes if node.index is not None] == [f"{MINUTE}_pkey"]
    assert not any(node.filtered or node.kind == "Seq Scan" for node in nodes)


def test_an_hour_reads_its_minutes_only(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", statistics=True, unique=None)
    setup.execute(FILL, now=number_of(NOW), queues=["job"])
    setup.execute("ANALYZE sqlaqueue_minute")
    with counting_rows(engine) as reads:
        history_of(engine, setup.model, HOUR)
    assert (reads.by_scan[MINUTE], reads.by_index[MINUTE]) == (0, 61)


# -- charts ----------------------------------------------------------------------------------------------------------


def paths(svg: str) -> list[str]:
    return re.findall(r'<path class="chart-steps chart-steps--\d" d="([^"]*)"/>', svg)


def drawn(values: list[float | None], gaps: list[bool] | None = None, axis: Axis | None = None) -> str:
    labels = [f"12:{place:02}" for place in range(len(values))]
    axis = axis or Axis.of_counts([value for value in values if value is not None])
    gaps = gaps or [False] * len(values)
    options = {"title": "Depth", "description": "d", "ticks": ("a", "b")}
    return str(line_chart("c", {"due": values}, axis, labels=labels, gaps=gaps, **options))  # type: ignore[arg-type] # texts


def test_a_line_ends_where_nothing_is_known() -> None:
    svg = drawn([4, 4, None, 0, 2], [False, False, True, False, False])
    (path,) = paths(svg)
    # Two lines; none goes down to zero in between.
    first, second = path.split("M")[1:]
    assert first == "0 1H200V1H400"
    assert re.fullmatch(r"600 87H800V44H1000", second), second
    assert svg.count("chart-place--gap") == 1
    assert f"<title>12:02: {GAP}</title>" in svg
    assert "<title>12:03: due 0</title>" in svg


def test_nothing_of_one_period_is_no_gap() -> None:
    svg = drawn([1, None], [False, False])
    assert "chart-place--gap" not in svg
    assert "<title>12:01: none</title>" in svg


@pytest.mark.parametrize(
    ("axis", "ticks", "heights"),
    [
        (Axis.of_counts([0]), ["2", "1"], {0: 0, 1: 0.5}),
        (Axis.of_counts([90_000, 3]), ["100,000", "50,000"], {100_000: 1}),
        (Axis.of_shares([]), ["1 %", "0.5 %"], {0.25: 0.25}),
        (Axis.of_shares([1.5, 30]), ["50 %", "25 %"], {50: 1}),
        (Axis.of_shares([100.0]), ["100 %", "50 %"], {100: 1}),
        (Axis.of_durations([400], logarithmic=False), ["10 min", "5 min"], {300: 0.5}),
        (Axis.of_durations([5 * 86400], logarithmic=False), ["6 d", "3 d"], {0: 0}),
        (Axis.of_durations([], logarithmic=False), ["1.0 s", "500 ms"], {0: 0}),
        (Axis.of_durations([0.02, 8], logarithmic=True), ["100 ms", "1 s", "10 s"], {0: 0, 0.01: 0, 10: 1}),
        (Axis.of_durations([], logarithmic=True), ["10 ms"], {0: 0, 0.01: 1}),
        (Axis.of_durations([10**8], logarithmic=True), None, {10**9: 1}),
    ],
)
def test_axes_have_round_ends(axis: Axis, ticks: list[str] | None, heights: dict[float, float]) -> None:
    if ticks is not None:
        assert [text for _, text in axis.ticks] == ticks
    for value, height in heights.items():
        assert axis.height_of(value) == pytest.approx(height)


def test_an_oldest_due_job_is_none_only_where_it_is_not_known(each_engine: sa.Engine, model: Any) -> None:
    rows: Rows = {5: {"pending": 3, "due": 0}, 4: {"pending": 3, "due": 2, "oldest_due": 90}, 3: {"completed": 1}}
    write(each_engine, model, rows)
    found = history_of(each_engine, model)
    assert found is not None
    charts = history_charts(found)
    ages = [values[charts.heads.index("Oldest due")] for _, values in charts.rows]
    # The latest first: of the last minute only the counts were written.
    assert ages == ["–", "1 min 30 s", "0 ms"]  # noqa: RUF001 - as the page has it


# -- the page --------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(engine: sa.Engine) -> Setup:
    setup = Setup.of(engine, "update_status", statistics=True, unique=None)
    now = datetime.now(UTC)
    # A day and a half, with a gap of twenty minutes.
    minutes = [ago for ago in range(2200) if ago not in range(20, 40)]
    row = {"completed": 3, "retried": 1, "pending": 4, "due": 2, "oldest_due": 30, "wait_3": 3, "run_4": 3}
    write(engine, setup.model, dict.fromkeys(minutes, row), now=now)
    return setup


async def page_of(setup: Setup, path: str = "queues/job", status: int = 200, **options: Any) -> str:
    async with ask(setup.engine, setup.model, **options) as browser:
        response = await browser.get(f"/{path}")
    assert response.status_code == status, response.text
    return html.unescape(response.text)


CHARTS = [f'id="{name}-history"' for name in ("depth", "oldest-due", "failure-rate", "wait", "run")]


@pytest.mark.few(2)
@pytest.mark.parametrize("span", SPANS, ids=lambda span: span.name)
async def test_the_page_has_a_history_of_each_span(counted: Setup, span: ChartSpan) -> None:
    page = await page_of(counted, f"queues/job?span={span.name}")
    assert 'class="problem"' not in page
    assert all(chart in page for chart in CHARTS)
    assert f'span={span.name}" aria-current="true"><span class="visually-hidden">Last </span>{span.label}<' in page
    # No script and no style: the charts are there without JavaScript, and the policy allows neither.
    panel = page.partition('<section id="history"')[2].partition("</section>")[0]
    assert not re.search(r"<script|style=", panel)
    table = panel.partition('<details class="chart-table">')[2]
    heads = re.findall(r'<th scope="col"[^>]*>([^<]+)</th>', table)
    assert heads[:5] == ["From", "Depth due", "Depth pending", "Oldest due", "Failure rate"]
    assert heads[5:] == ["Wait p50", "Wait p95", "Run p50", "Run p95"]
    assert '<td class="num nowrap">25 %</td>' in table


async def test_a_time_without_a_consumer_is_a_gap_in_each_chart(counted: Setup) -> None:
    page = await page_of(counted, "queues/job?span=hour")
    # Of throughput, and of five lines.
    assert page.count(f": {GAP}</title>") == 6 * 20
    assert len(re.findall(r'd="[^"]*"/>', page)) == 8
    for path in paths(page):
        assert path.count("M") == 2


async def test_the_page_opens_on_the_span_of_what_was_counted(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", statistics=True, unique=None)
    now = datetime.now(UTC)
    write(engine, setup.model, {200: {"completed": 1}, 5: {"pending": 1}}, now=now)
    page = await page_of(setup)
    assert 'span=6hours" aria-current="true"' in page
    assert re.search(r"completed <b>1</b>", page)


async def test_throughput_is_drawn_from_rows_until_minutes_are_written(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", statistics=True, unique=None, **HISTORY)
    attempt(setup, "completed", 100, 200)
    page = await page_of(setup)
    assert "No Consumer has written its statistics within the last hour" in page
    assert "completed <b>2</b>" in page
    assert "Consumers have counted them." not in page
    write(engine, setup.model, {3: {"completed": 9}}, now=datetime.now(UTC))
    page = await page_of(setup)
    assert "completed <b>9</b>" in page
    assert "Consumers have counted them." in page


async def test_a_queue_that_deletes_its_rows_has_throughput_by_its_minutes(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "rows_are_messages", statistics=True, unique=None)
    write(engine, setup.model, {3: {"completed": 9}}, now=datetime.now(UTC))
    page = await page_of(setup)
    assert "completed <b>9</b>" in page
    assert all(chart in page for chart in CHARTS)


async def test_without_statistics_the_page_says_how_to_have_them(engine: sa.Engine) -> None:
    setup = Setup.of(engine, "update_status", unique=None)
    with sent_statements(engine) as sent:
        page = await page_of(setup)
    assert "__queue__ = QueueConfig(..., statistics=True)" in page
    assert 'id="history"' not in page
    assert not any(MINUTE in statement for statement, _ in sent)


async def test_a_missing_table_of_minutes_hides_its_panel_only(counted: Setup) -> None:
    attempt_free = await page_of(counted)
    assert "A table is missing." not in attempt_free
    counted.execute(f"DROP TABLE {MINUTE}")
    page = await page_of(counted)
    assert "A table is missing." in page.partition('<section id="history"')[2].partition("</section>")[0]
    assert "<dt>Pending</dt>" in page


async def test_the_history_of_a_queue_that_may_not_be_read_is_hidden(counted: Setup) -> None:
    page = await page_of(counted, status=404, access=lambda _: Access(read=[]))
    assert "history" not in page


def test_the_table_of_minutes_has_no_values_of_jobs() -> None:
    """Nothing in it could be redacted: names of queues and numbers."""
    table = make_job(statistics=True).metadata.tables[MINUTE]
    texts = [column.name for column in table.c if not isinstance(column.type, sa.Integer)]
    assert texts == ["queue"]
    assert [column.name for column in table.c][2:] == [*MEASURED, *COUNTED]


def test_the_spans_are_those_of_the_page() -> None:
    assert SPANS == (HOUR, HOURS, DAY, WEEK, MONTH)
    assert [span.length.total_seconds() / 3600 for span in SPANS] == [1, 6, 24, 168, 720]
