"""``dashboard.js``: live updates that disturb nothing, times in the reader's zone, keys, selections and copying."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.browser.chromium import View, viewing
from tests.web.browser.script_page import ScriptPage
from tests.web.browser.site import serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DEADLINE = 30


def wait_until(condition: Callable[[], Any], view: View) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        # Not by sleeping: what the browser reports is received meanwhile.
        view.page.wait_for_timeout(20)


@pytest.fixture
def script() -> Iterator[ScriptPage]:
    page = ScriptPage()
    with serving(page.app) as (root, _):
        page.root = root  # type: ignore[attr-defined] # for the fixture below
        yield page
        # The server waits for its open responses.
        if page.open_streams:
            page.end_streams()


@pytest.fixture
def view(script: ScriptPage, browser: Browser) -> Iterator[View]:
    with viewing(browser, script.root) as view:  # type: ignore[attr-defined] # set above
        view.open()
        wait_until(lambda: script.open_streams == 1 and script.pages == 2, view)
        yield view


def shows(view: View, number: int) -> None:
    view.wait_for("n => document.getElementById('number').textContent === String(n)", number)


def test_a_section_is_replaced_when_something_has_changed(script: ScriptPage, view: View) -> None:
    script.change(number=2, classes="bad")
    shows(view, 2)
    assert view.text("#still") == "Still 1"
    assert view.page.get_attribute("#numbers", "class") == "bad"
    script.change(number=3, rows=[5])
    shows(view, 3)
    assert view.text("tbody").strip() == "Job 5"


def test_what_the_reader_has_done_is_kept(script: ScriptPage, view: View) -> None:
    page = view.page
    page.click("summary")
    page.check("input[value='2']")
    page.fill("[name=note]", "call back")
    page.focus("tbody tr:nth-child(3) a")
    script.change(number=2, rows=[0, 1, 2, 3])
    shows(view, 2)
    assert page.locator("details").get_attribute("open") is not None
    assert page.locator("tbody input:checked").evaluate_all("all => all.map(each => each.value)") == ["2"]
    assert page.input_value("[name=note]") == "call back"
    assert page.evaluate("document.activeElement.textContent") == "Job 3"
    assert view.text("[data-selected]") == "1 selected"


def test_the_focus_goes_to_what_takes_the_place_of_a_job_that_is_gone(script: ScriptPage, view: View) -> None:
    view.page.focus("tbody tr:nth-child(2) a")
    script.change(number=2, rows=[1, 3, 4])
    shows(view, 2)
    view.wait_for("() => document.querySelector('tbody').contains(document.activeElement)")
    assert view.run("() => document.activeElement.textContent") == "Job 3"


def test_a_text_that_is_being_typed_or_selected_is_left_alone(script: ScriptPage, view: View) -> None:
    page = view.page
    page.type("[name=note]", "ca")
    script.change(number=2, rows=[9])
    view.wait_for("() => document.querySelector('tbody').textContent.includes('Job 9')")
    assert view.text("#number") == "1"
    page.type("[name=note]", "ll")
    page.evaluate("document.activeElement.blur()")
    script.send()
    shows(view, 2)
    assert page.input_value("[name=note]") == "call"
    view.run("() => getSelection().selectAllChildren(document.querySelector('summary'))")
    script.change(number=3, rows=[10])
    view.wait_for("() => document.querySelector('tbody').textContent.includes('Job 10')")
    assert view.text("#number") == "2"


def test_a_click_is_not_lost(script: ScriptPage, view: View) -> None:
    page = view.page
    page.hover("tbody tr:nth-child(2) a")
    page.mouse.down()
    script.change(number=2, rows=[7])
    wait_until(lambda: script.pages == 3, view)
    page.wait_for_timeout(200)
    assert view.text("#number") == "1"
    page.mouse.up()
    page.wait_for_url("**/?page=2")


def test_the_place_on_the_page_is_kept(script: ScriptPage, view: View) -> None:
    script.change(rows=[*range(200)])
    view.wait_for("() => document.querySelectorAll('tbody tr').length === 200")
    view.run("() => window.scrollTo(0, 2500)")
    script.change(number=2, rows=[*range(1, 201)])
    shows(view, 2)
    view.wait_for("() => document.querySelector('tbody').textContent.includes('Job 200')")
    assert view.run("() => window.scrollY") == 2500


def test_a_stream_that_ends_is_opened_again(script: ScriptPage, view: View) -> None:
    script.end_streams()
    wait_until(lambda: script.streams == 2 and script.open_streams == 1, view)
    script.change(number=2)
    shows(view, 2)
    assert view.text("[role=status]") == "Live"


def test_it_waits_longer_and_longer_for_a_server_in_trouble(script: ScriptPage, view: View) -> None:
    view.expect(503)
    script.stream_status = script.status = 503
    script.end_streams()
    view.wait_for("() => document.querySelector('[role=status]').textContent === 'Reconnecting'")
    wait_until(lambda: script.streams == 3, view)
    script.stream_status = script.status = 200
    script.number = 2
    shows(view, 2)
    view.wait_for("() => document.querySelector('[role=status]').textContent === 'Live'")


@pytest.mark.parametrize(("status", "text"), [(404, "No longer there"), (403, "No access: sign in again")])
def test_it_stops_where_there_is_nothing_to_follow(script: ScriptPage, view: View, status: int, text: str) -> None:
    view.expect(status)
    script.change(status=status)
    view.wait_for("text => document.querySelector('[role=status]').textContent === text", text)
    wait_until(lambda: script.open_streams == 0, view)
    assert view.text("#number") == "1"


def test_it_rests_while_nobody_looks(script: ScriptPage, view: View) -> None:
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    view.run(hide, argument=True)
    wait_until(lambda: script.open_streams == 0, view)
    pages = script.pages
    script.number = 2
    view.run(hide, argument=False)
    shows(view, 2)
    assert script.pages == pages + 1


def test_the_reader_can_pause_it(script: ScriptPage, view: View) -> None:
    view.page.get_by_role("button", name="Pause live updates").click()
    wait_until(lambda: script.open_streams == 0, view)
    assert view.text("[role=status]") == "Paused"
    script.number = 2
    view.press("p")
    shows(view, 2)
    view.wait_for("() => document.querySelector('[role=status]').textContent === 'Live'")


def test_times_are_those_of_the_reader(view: View) -> None:
    absolute, relative = view.page.locator("time").all()
    assert absolute.inner_text() == "1 May 2026, 12:00:00"
    assert (absolute.get_attribute("title") or "").endswith(", 2026-05-01T10:00:00+00:00")
    assert "ago" in relative.inner_text()
    assert (relative.get_attribute("title") or "").startswith("Friday, 1 May 2026")


def test_keys(script: ScriptPage, view: View) -> None:
    def focused() -> str:
        return str(view.run("() => document.activeElement.textContent"))

    view.press("j")
    assert focused() == "Job 1"
    view.press("j", "j", "k")
    assert focused() == "Job 2"
    view.press("x")
    assert view.text("[data-selected]") == "1 selected"
    view.press("/")
    assert view.run("() => document.activeElement.name") == "q"
    # Letters that are typed are no keys.
    view.press("j", "x")
    assert view.page.input_value("[name=q]") == "jx"
    view.press("Escape", "k")
    assert focused() == "Job 4"
    view.press("?")
    assert view.page.get_by_role("dialog", name="Keyboard").is_visible()
    view.press("j")
    assert "Job" not in focused()
    view.press("Escape")
    assert view.page.get_by_role("dialog").count() == 0
    view.press("j", "Enter")
    view.page.wait_for_url("**/?page=*")
    view.press("g", "o")
    view.page.wait_for_url("**/?page=overview")


def test_select_all_and_ranges(view: View) -> None:
    page = view.page
    page.check("[data-select-all]")
    assert view.text("[data-selected]") == "4 selected"
    page.uncheck("[value='2']")
    assert page.evaluate("document.querySelector('[data-select-all]').indeterminate")
    assert view.text("[data-selected]") == "3 selected"
    page.check("[data-select-all]")
    page.uncheck("[data-select-all]")
    assert view.text("[data-selected]") == ""
    page.check("[value='1']")
    page.click("[value='3']", modifiers=["Shift"])
    assert view.text("[data-selected]") == "3 selected"


def test_a_fix_is_copied(view: View) -> None:
    view.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    view.page.get_by_role("button", name="Copy").click()
    view.wait_for("() => document.querySelector('[data-copy]').textContent === 'Copied'")
    assert view.run("() => navigator.clipboard.readText()") == "VACUUM email"


def test_without_javascript_nothing_is_promised(script: ScriptPage, browser: Browser) -> None:
    with viewing(browser, script.root, javascript=False) as view:  # type: ignore[attr-defined] # set above
        view.open()
        assert view.page.locator("[data-copy]").is_hidden()
        assert view.page.locator("[data-select-all]").is_hidden()
        assert view.text("[role=status]") == ""
        assert "2026-05-01 10:00 UTC" in view.text()
