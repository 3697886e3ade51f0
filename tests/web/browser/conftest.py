"""The fixtures of the browser tests: a site with the example's jobs, and windows that show it.

All tests of this folder but the smoke test are marked ``browser``: `nox -s browser` runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.servers import Database, Server
from tests.web.browser.chromium import MISSING, PROGRAM, View, running, viewing
from tests.web.browser.site import Site, example_site

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HERE = Path(__file__).parent
MakeView = Callable[..., View]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.once)
            if item.path.name != "test_smoke.py":
                item.add_marker(pytest.mark.browser)


# Not for the whole session: while it runs, Playwright's event loop is the one of this thread, and asynchronous tests of
# other files would find it running.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with running() as browser:
        yield browser


@pytest.fixture(scope="module")
def module_database(server: Server) -> Iterator[Database]:
    with server.database() as database:
        yield database


@pytest.fixture(scope="module")
def site(module_database: Database) -> Iterator[Site]:
    """A dashboard that the tests of a file share: they only look."""
    with example_site(module_database) as site:
        yield site


@pytest.fixture
def own_site(database: Database) -> Iterator[Site]:
    """A dashboard of the test's own, whose jobs it changes."""
    with example_site(database) as site:
        yield site


@pytest.fixture
def open_view(browser: Browser) -> Iterator[Callable[..., View]]:
    """A function that opens a window: ``open_view(site, size=PHONE, scheme="dark", javascript=False)``."""
    with contextlib.ExitStack() as stack:

        def make(site: Site, **options: Any) -> View:
            return stack.enter_context(viewing(browser, site.root, **options))

        yield make


@pytest.fixture
def view(open_view: MakeView, site: Site) -> View:
    """A window of a desktop that shows the shared dashboard."""
    return open_view(site)
