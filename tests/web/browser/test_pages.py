"""Every page, as a reader meets it: on a desktop and a phone, light and dark, with and without JavaScript."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.web.browser.chromium import DESKTOP, PHONE, View
from tests.web.browser.paths import PAGES
from tests.web.browser.site import Site

AUDIT = (Path(__file__).parent / "audit.js").read_text()

OpenView = Callable[..., View]


def audit(view: View) -> list[str]:
    """Return what is wrong with the page that is shown."""
    found: list[str] = view.run(AUDIT)
    return [f"{view.path or 'overview'}: {problem}" for problem in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_each_page_is_for_everybody(open_view: OpenView, site: Site, scheme: str, size: Any) -> None:
    view = open_view(site, size=size, scheme=scheme)
    problems = [problem for path in PAGES.values() for problem in audit(view.open(path))]
    assert not problems, "\n".join(problems)


def test_each_page_is_complete_without_javascript(open_view: OpenView, site: Site) -> None:
    with_script, without = open_view(site), open_view(site, javascript=False)

    def headings(view: View, path: str) -> list[str]:
        return [each.strip() for each in view.open(path).page.locator("main :is(h1, h2, h3)").all_text_contents()]

    for path in PAGES.values():
        assert headings(without, path) == headings(with_script, path)
        assert without.text("main").strip()


FOCUSED = """() => {
    const { activeElement } = document;
    if (activeElement === document.body) return null;
    const { outlineStyle, outlineWidth } = getComputedStyle(activeElement);
    return [activeElement.outerHTML.slice(0, 80), outlineStyle !== "none" && outlineWidth !== "0px"];
}"""


def test_each_page_is_read_by_keyboard_alone(open_view: OpenView, site: Site) -> None:
    view = open_view(site)
    for path in PAGES.values():
        view.open(path).press("Tab")
        assert view.run("() => document.activeElement.className") == "skip"
        view.press("Enter")
        # From the content on, the focus is always seen.
        for _ in range(12):
            view.press("Tab")
            focused = view.run(FOCUSED)
            if focused is None:
                break
            assert focused[1], f"{path}: the focus cannot be seen: {focused[0]}"


def test_times_are_those_of_the_reader(open_view: OpenView, site: Site) -> None:
    view = open_view(site, timezone="Asia/Kolkata")
    shown = 0
    for path in PAGES.values():
        for text in view.open(path).page.locator("time[datetime]").all_inner_texts():
            assert "UTC" not in text
            shown += bool(text)
    assert shown > 10


@pytest.mark.parametrize("path", ["queues/none", "queues/email/job?key=0", "nothing"])
def test_an_error_is_a_page(open_view: OpenView, site: Site, path: str) -> None:
    for options in ({}, {"size": PHONE}, {"scheme": "dark"}):
        view = open_view(site, **options).open(path, status=404)
        assert audit(view) == []
        view.follow(view.page.get_by_role("link", name="All queues"))
        assert view.text("h1") == "Queues"
