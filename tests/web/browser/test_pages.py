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

pages = pytest.mark.parametrize("page", PAGES)


def audit(view: View) -> None:
    problems = view.run(AUDIT)
    assert not problems, "\n".join(problems)


@pages
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_page_is_for_everybody(open_view: OpenView, site: Site, page: str, scheme: str, size: Any) -> None:
    audit(open_view(site, size=size, scheme=scheme).open(PAGES[page]))


@pages
def test_a_page_is_complete_without_javascript(open_view: OpenView, site: Site, page: str) -> None:
    with_script, without = open_view(site), open_view(site, javascript=False)
    headings = "() => [...document.querySelectorAll('h1, h2, h3')].map(each => each.textContent.trim())"
    shown = with_script.open(PAGES[page]).run(headings)
    without.open(PAGES[page])
    assert [each.strip() for each in without.page.locator("h1, h2, h3").all_text_contents()] == shown
    assert without.text("main").strip()


@pages
def test_a_page_is_read_by_keyboard_alone(open_view: OpenView, site: Site, page: str) -> None:
    view = open_view(site).open(PAGES[page])
    view.press("Tab")
    assert view.run("() => document.activeElement.className") == "skip"
    view.press("Enter")
    seen: set[str] = set()
    # From the content on, the focus is always visible and always moves on.
    for _ in range(12):
        view.press("Tab")
        found = view.run(
            """() => {
                const active = document.activeElement;
                if (active === document.body) return null;
                const style = getComputedStyle(active);
                return [active.outerHTML.slice(0, 80), style.outlineStyle !== "none" && style.outlineWidth !== "0px"];
            }"""
        )
        if found is None:
            break
        assert found[1], f"the focus cannot be seen: {found[0]}"
        seen.add(found[0])


@pages
def test_times_are_those_of_the_reader(open_view: OpenView, site: Site, page: str) -> None:
    view = open_view(site, timezone="Asia/Kolkata").open(PAGES[page])
    for element in view.page.locator("time[datetime]").all()[:5]:
        assert "UTC" not in element.inner_text()


@pytest.mark.parametrize("path", ["queues/none", "queues/email/job?key=0", "nothing"])
def test_an_error_is_a_page(open_view: OpenView, site: Site, path: str) -> None:
    for options in ({}, {"size": PHONE}, {"scheme": "dark"}):
        view = open_view(site, **options).open(path, status=404)
        audit(view)
        view.follow(view.page.get_by_role("link", name="All queues"))
        assert view.text("h1") == "Queues"
