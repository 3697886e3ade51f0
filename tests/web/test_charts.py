"""The SVG of charts: well-formed, of numbers only, with a text for readers who do not see it."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from sqlaqueue.web.charts import Bar, Range, bar_chart, nice_maximum, range_chart, sparkline

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
