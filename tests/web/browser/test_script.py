"""``dashboard.js``, on a page whose content and events are in the hands of a test."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import sqlaqueue.web
from sqlaqueue.web.security import SECURITY_HEADERS
from tests.web.browser.conftest import View, Windows
from tests.web.conftest import serving

SCRIPT = Path(sqlaqueue.web.__file__).parent / "static" / "dashboard.js"
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{badge}Script</title>
<link rel="icon" href="plain.svg" data-badge="findings" data-plain="plain.svg" data-critical="critical.svg">
<script src="dashboard.js" defer></script></head>
<body data-events="events"><header><span id="live-status" role="status" aria-live="polite"></span>
<a href="./?page=overview" data-go="o">Overview</a></header><main>
<form role="search"><input type="search" name="q" data-filter aria-label="Filter"></form>
<section data-live id="numbers" class="{classes}"><p>Number <b id="number">{number}</b></p>
<time datetime="2026-05-01T10:00:00+00:00"><span data-ago>{ago} s ago</span> · 2026-05-01 10:00:00</time>
<details><summary>More</summary>text {number}</details>
<input name="note" aria-label="Note"><button type="button" id="push">Push</button></section>
<section data-live id="rows"><div class="wide"><table>
<thead><tr><th><input type="checkbox" data-select-all hidden aria-label="All"></th><th>Key</th></tr></thead>
<tbody>{rows}</tbody></table></div><p data-selected></p></section>
<section><div><code>VACUUM email</code><button type="button" data-copy hidden>Copy</button></div></section>
<section id="still">Still {number}</section>
</main></body></html>"""
ROW = """<tr><td><input type="checkbox" name="key" value="{0}" aria-label="{0}"></td>
<td><a href="./?page={0}">Job {0}</a></td></tr>"""


class ScriptPage:
    """The page, its stream of events, and what the browser has asked for."""

    def __init__(self) -> None:
        self.root = ""
        self.number, self.ago, self.rows, self.classes = 1, 1, [1, 2, 3, 4], ""
        self.status, self.stream_status = 200, 200
        self.critical, self.badge = 0, ""
        self.pages = self.streams = self.open_streams = 0
        self._events: list[asyncio.Event] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = False
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/dashboard.js", self._script),
                Route("/events", self._stream),
                Route("/plain.svg", self._icon),
                Route("/critical.svg", self._icon),
                Route("/findings", self._findings),
            ]
        )

    def change(self, **values: object) -> None:
        """Change what the page shows, and send an event."""
        for name, value in values.items():
            setattr(self, name, value)
        self.send()

    def send(self) -> None:
        """Send an event to each open stream."""
        for event in [*self._events]:
            self._loop.call_soon_threadsafe(event.set)

    def end_streams(self) -> None:
        self._ends = True
        self.send()

    async def _page(self, _: Request) -> Response:
        self.pages += 1
        rows = "".join(map(ROW.format, self.rows))
        html = PAGE.format(number=self.number, ago=self.ago, rows=rows, classes=self.classes, badge=self.badge)
        return HTMLResponse(html, status_code=self.status, headers=SECURITY_HEADERS)

    async def _script(self, _: Request) -> Response:
        return FileResponse(SCRIPT, headers=SECURITY_HEADERS)

    async def _icon(self, _: Request) -> Response:
        return Response(status_code=204)

    async def _findings(self, _: Request) -> Response:
        severities = ["warning", *["critical"] * self.critical]
        return JSONResponse({"findings": [{"severity": each} for each in severities]}, headers=SECURITY_HEADERS)

    async def _stream(self, _: Request) -> Response:
        self.streams += 1
        self._loop = asyncio.get_running_loop()
        if self.stream_status != 200:
            return Response(status_code=self.stream_status)
        self._ends = False
        return StreamingResponse(self._lines(), media_type="text/event-stream", headers=SECURITY_HEADERS)

    async def _lines(self):  # type: ignore[no-untyped-def]  # noqa: ANN202 - an asynchronous generator of texts
        event = asyncio.Event()
        self._events.append(event)
        self.open_streams += 1
        try:
            yield ": connected\n\n"
            while not self._ends:
                await event.wait()
                event.clear()
                yield f"data: {json.dumps({'queues': []})}\n\n"
        finally:
            self._events.remove(event)
            self.open_streams -= 1


# -- live updates that disturb nothing, times in the reader's zone, keys, selections and copying --------------------

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
    with serving(page.app) as root:
        page.root = root
        yield page
        # The server waits for its open responses.
        if page.open_streams:
            page.end_streams()


@pytest.fixture
def view(script: ScriptPage, windows: Windows) -> Iterator[View]:
    with windows.viewing(script.root) as view:
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


HIDE = """hidden => {
    Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
    document.dispatchEvent(new Event('visibilitychange'));
}"""
BADGE = "() => [document.title, document.querySelector('link[data-badge]').getAttribute('href')]"


def test_a_tab_shows_how_many_findings_are_critical(script: ScriptPage, view: View) -> None:
    """Those of its page; in the background, where it reads no page, those that it asks for every minute."""
    view.page.clock.install()
    view.page.reload()
    shows(view, 1)
    assert view.run(BADGE) == ["Script", "plain.svg"]
    script.change(number=2, badge="(1) ")
    shows(view, 2)
    assert view.run(BADGE) == ["(1) Script", "critical.svg"]
    view.run(HIDE, argument=True)
    for critical, title, icon in [(3, "(3) Script", "critical.svg"), (0, "Script", "plain.svg")]:
        script.critical = critical
        view.page.clock.fast_forward(60_000)
        view.wait_for("title => document.title === title", title)
        assert view.run(BADGE) == [title, icon]


def test_it_rests_while_nobody_looks(script: ScriptPage, view: View) -> None:
    view.run(HIDE, argument=True)
    wait_until(lambda: script.open_streams == 0, view)
    pages = script.pages
    script.number = 2
    view.run(HIDE, argument=False)
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


def test_how_long_ago_is_kept_up_to_date(script: ScriptPage, view: View) -> None:
    days = view.run("() => Math.floor((Date.now() - Date.parse('2026-05-01T10:00:00Z')) / 864e5)")
    assert view.page.locator("time").inner_text() == f"{days} d ago · 2026-05-01 10:00:00"
    view.run("() => { document.querySelector('time').dataset.mark = 'kept'; }")
    # A change of that alone is none.
    script.change(rows=[1, 2, 3], ago=2)
    view.wait_for("() => document.querySelectorAll('tbody tr').length === 3")
    assert view.run("() => document.querySelector('time').dataset.mark") == "kept"


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


def test_without_javascript_nothing_is_promised(script: ScriptPage, windows: Windows) -> None:
    with windows.viewing(script.root, javascript=False) as view:
        view.open()
        assert view.page.locator("[data-copy]").is_hidden()
        assert view.page.locator("[data-select-all]").is_hidden()
        assert view.text("[role=status]") == ""
        assert "1 s ago · 2026-05-01 10:00:00" in view.text()
