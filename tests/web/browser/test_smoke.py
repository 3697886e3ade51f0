"""The one browser test of the default session: the first page is shown and follows the queues."""

from __future__ import annotations

from collections.abc import Callable

from tests.web.browser.chromium import View
from tests.web.browser.site import Site


def test_the_first_page_is_shown_and_live(open_view: Callable[..., View], site: Site) -> None:
    view = open_view(site).open()
    assert view.text("h1") == "Queues"
    assert "email" in view.text("main")
    view.wait_for("() => typeof EventSource === 'function'")
