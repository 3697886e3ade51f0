"""A real browser: Debian's Chromium without a window, driven by Playwright, which downloads nothing here.

A :class:`View` is one window. It collects what no page of the dashboard may cause: errors and warnings on the console,
violations of the content security policy among them, uncaught errors, and requests that fail. The tests of this folder
share one browser, and a site of the example's jobs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Error,
    FloatRect,
    Locator,
    Page,
    Request,
    Response,
    sync_playwright,
)

from tests.servers import Database, Server
from tests.web.browser.example import Site, example_site, fill_database

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "chromium-browser"))), None)
MISSING = "needs Chromium, as Debian's package chromium has it: apt-get install chromium"
TIMEOUT = 30_000
"""Milliseconds for each step: a page that takes this long never comes."""
DESKTOP, PHONE = (1280, 800), (390, 844)
_QUIET = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-gpu",
    # No process that waits for a page to come.
    "--renderer-process-limit=1",
    "--no-first-run",
    # The same letters on every machine, for the screenshots.
    "--font-render-hinting=none",
)


@contextlib.contextmanager
def running() -> Iterator[Browser]:
    assert PROGRAM is not None, MISSING
    # As root, which tests often are in a container, Chromium does not start with its sandbox.
    root = ("--no-sandbox",) if os.getuid() == 0 else ()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PROGRAM, args=[*_QUIET, *root])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class View:
    """One window of a browser that shows a dashboard.

    :param root: the URL of the dashboard, with a slash at its end.
    """

    page: Page
    root: str
    problems: list[str] = field(default_factory=list)
    _expected: set[int] = field(default_factory=set)
    """The statuses of responses that a test has asked for."""

    def __post_init__(self) -> None:
        self.page.set_default_timeout(TIMEOUT)
        for event, listener in self._listeners.items():
            self.page.on(event, listener)

    @property
    def _listeners(self) -> dict[Any, Any]:
        return {
            "console": self._console,
            "pageerror": self._error,
            "requestfailed": self._failed,
            "response": self._response,
        }

    def leave(self) -> None:
        """Leave the page, and the window to another test."""
        self.page.goto("about:blank")
        self.page.unroute_all()
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)

    def _error(self, error: Error) -> None:
        self.problems.append(f"uncaught: {error}")

    def _console(self, message: ConsoleMessage) -> None:
        if message.type not in {"error", "warning"}:
            return
        # The browser reports such a response itself, once more.
        if not (message.text.startswith("Failed to load resource") and self._expected):
            self.problems.append(f"console: {message.text} ({message.location.get('url')})")

    def _failed(self, request: Request) -> None:
        failure = request.failure or ""
        # The page was left meanwhile, or its script has closed the stream.
        is_left = "ERR_ABORTED" in failure
        if not is_left and not (request.resource_type == "eventsource" and self._expected):
            self.problems.append(f"request: {failure} {request.url}")

    def _response(self, response: Response) -> None:
        if response.status >= 400 and response.status not in self._expected:
            self.problems.append(f"status {response.status}: {response.url}")

    def check(self) -> None:
        assert not self.problems, "\n".join(self.problems)

    def expect(self, *statuses: int) -> None:
        """Accept responses of these statuses from now on; 0 for a server that does not answer."""
        self._expected |= set(statuses)

    def open(self, path: str = "", *, status: int = 200) -> View:
        if status >= 400:
            self.expect(status)
        response = self.page.goto(self.root + path)
        assert response.status == status, f"{response.status}: {response.url}\n{self.text()[:2000]}"
        self.check()
        return self

    def settle(self) -> View:
        """Wait until the page is as it stays: its fonts are there, and it follows the queues if it has what changes."""
        self.wait_for("() => document.fonts.status === 'loaded'")
        if self.page.locator("[data-live]:not(#zone, #pauses)").count() and self.page.locator("#live-status").count():
            self.wait_for("() => document.getElementById('live-status').textContent === 'Live'")
        return self

    def follow(self, link: Locator) -> View:
        """Click a link or a button that leads to another page, and wait for that page."""
        with self.page.expect_navigation():
            link.click()
        self.check()
        return self

    def press(self, *keys: str) -> View:
        for key in keys:
            self.page.keyboard.press(key)
        return self

    def text(self, selector: str = "body") -> str:
        """Return the text that is seen."""
        return self.page.inner_text(selector)

    def wait_for(self, condition: str, argument: Any = None) -> None:
        """Wait until a function of JavaScript returns something true."""
        self.page.wait_for_function(condition, arg=argument)

    def run(self, function: str, argument: Any = None) -> Any:
        return self.page.evaluate(function, argument)

    @property
    def path(self) -> str:
        """The path and query of the page, relative to the root."""
        below = self.page.url.removeprefix(self.root)
        return below if below != self.page.url else urlsplit(self.page.url).path

    def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """Write a picture of what is seen.

        :param height: the pixels from the top that are in it, if these are fewer than the window has.
        """
        size = self.page.viewport_size
        clip: FloatRect = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": min(height or size["height"], size["height"]),
        }
        self.page.screenshot(path=path, clip=clip, animations="disabled", caret="hide")


def new_window(
    browser: Browser,
    *,
    size: tuple[int, int] = DESKTOP,
    scheme: Literal["light", "dark"] = "light",
    javascript: bool = True,
    follows: bool = True,
    timezone: str = "Europe/Berlin",
    locale: str = "en-GB",
    scale: float = 1,
) -> Page:
    """Open a window with settings and cookies of its own.

    :param follows: whether it is one that is seen, whose pages follow the queues: they are fetched twice.
    """
    is_phone = size == PHONE
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,
        java_script_enabled=javascript,
        timezone_id=timezone,
        locale=locale,
        has_touch=is_phone,
        is_mobile=is_phone,
        device_scale_factor=scale,
        reduced_motion="reduce",
    )
    if not follows:
        context.add_init_script("Object.defineProperty(Document.prototype, 'hidden', { get: () => true })")
    return context.new_page()


@contextlib.contextmanager
def viewing(browser: Browser, root: str, **options: Any) -> Iterator[View]:
    """Show a dashboard in a new window; in the end, fail if anything has gone wrong in it."""
    page = new_window(browser, **options)
    try:
        view = View(page, root)
        yield view
        view.check()
    finally:
        page.context.close()


class Windows:
    """The windows of a browser, which tests use one after the other: to open one takes as long as many a test."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._free: dict[str, list[Page]] = {}

    @contextlib.contextmanager
    def viewing(self, root: str, **options: Any) -> Iterator[View]:
        """Show a dashboard in a window without cookies; in the end, fail if anything has gone wrong in it."""
        options = (new_window.__kwdefaults__ or {}) | options
        free = self._free.setdefault(repr(options), [])
        page = free.pop() if free else new_window(self._browser, **options)
        try:
            view = View(page, root)
            yield view
            view.check()
            view.leave()
        except BaseException:
            page.context.close()
            raise
        width, height = options["size"]
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=options["scheme"])
        page.mouse.move(0, 0)
        page.context.clear_cookies()
        page.context.clear_permissions()
        free.append(page)


# -- fixtures ------------------------------------------------------------------------------------------------------

HERE = Path(__file__).parent
SMOKE = "test_the_first_page_is_shown_and_live"
MakeView = Callable[..., View]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder but one ``browser``: `nox -s browser` runs them."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.once)
            if not item.name.startswith(SMOKE):
                item.add_marker(pytest.mark.browser)


# Not for the whole session: while it runs, Playwright's event loop is the one of this thread, and asynchronous tests of
# other folders would find it running.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with running() as browser:
        yield browser


@pytest.fixture(scope="package")
def windows(browser: Browser) -> Windows:
    return Windows(browser)


@pytest.fixture(scope="package")
def example(server: Server) -> Iterator[Database]:
    """The jobs of the example, of which sites have copies: to insert them takes longer than many a test."""
    with server.database() as database:
        fill_database(database)
        yield database


@pytest.fixture(scope="package")
def site(server: Server, example: Database) -> Iterator[Site]:
    """A dashboard that tests share: they only look."""
    with server.database(example.name) as database, example_site(database) as site:
        yield site


@pytest.fixture
def own_site(server: Server, example: Database) -> Iterator[Site]:
    """A dashboard of the test's own, whose jobs it changes."""
    with server.database(example.name) as database, example_site(database) as site:
        yield site


@pytest.fixture
def open_view(windows: Windows) -> Iterator[MakeView]:
    """A function that opens a window: ``open_view(site, size=PHONE, scheme="dark", javascript=False)``.

    Ask for it after the site: while a window follows a site, this waits for its end.
    """
    with contextlib.ExitStack() as stack:

        def make(site: Site, **options: Any) -> View:
            return stack.enter_context(windows.viewing(site.root, **options))

        yield make


@pytest.fixture
def view(open_view: MakeView, site: Site) -> View:
    """A window of a desktop that shows the shared dashboard."""
    return open_view(site)
