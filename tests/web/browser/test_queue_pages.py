"""The pages of queues in a browser: charts, their tables, and the way from a number to its jobs."""

from __future__ import annotations

from tests.web.browser.chromium import View


def test_a_chart_has_a_table_that_opens_by_keyboard(view: View) -> None:
    view.open("queues/email")
    summary = view.page.locator("#throughput-chart summary")
    assert not view.page.locator("#throughput-chart table").is_visible()
    summary.focus()
    view.press("Enter")
    rows = view.page.locator("#throughput-chart tbody tr")
    assert rows.first.is_visible()
    # All that the bars show is in the table.
    counted, legend = (
        sum(map(int, view.page.locator(cells).all_inner_texts()))
        for cells in ("#throughput-chart td", "#throughput .legend b")
    )
    assert counted == legend > 0


def test_bars_fill_their_chart_at_any_width(view: View) -> None:
    view.open("queues/email")
    for width in (390, 1280, 2000):
        view.page.set_viewport_size({"width": width, "height": 900})
        plot, bars = (view.page.locator(f"#throughput-chart {name}").first for name in (".chart-bars", ".chart-place"))
        whole, first = plot.bounding_box(), bars.bounding_box()
        assert whole is not None
        assert first is not None
        assert abs(first["x"] - whole["x"]) < 2
        number = view.page.locator("#throughput-chart .chart-place").count()
        assert abs(first["width"] * number - whole["width"]) < 2


def test_from_the_overview_to_the_last_day_of_a_queue(view: View) -> None:
    view.open()
    view.follow(view.page.get_by_role("link", name="email", exact=True))
    assert view.path == "queues/email"
    view.follow(view.page.get_by_role("link", name="Last day"))
    assert view.path == "queues/email?span=day"
    assert view.page.get_by_role("link", name="Last day").get_attribute("aria-current") == "true"
    view.follow(view.page.get_by_role("link", name="Claim plan"))
    assert "rolled back" in view.text("#plan")
