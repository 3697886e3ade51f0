"""The one browser test of the default session: the first page is shown and follows the queues."""

from __future__ import annotations

from collections.abc import Callable

from tests.web.browser.chromium import View
from tests.web.browser.example import Thumbnail
from tests.web.browser.site import Site


def test_the_first_page_is_shown_and_live(open_view: Callable[..., View], site: Site) -> None:
    view = open_view(site).open().settle()
    assert view.text("h1") == "Queues"
    before = site.execute("SELECT count(*) FROM thumbnail WHERE status = 'pending'")[0][0]
    row = view.page.get_by_role("row").filter(has=view.page.get_by_role("link", name="thumbnail"))
    assert str(before) in row.inner_text().split()
    site.add(*(Thumbnail(path="/media/new.jpg", width=64) for _ in range(5)))
    view.wait_for("number => document.querySelector('main').innerText.split(/\\s+/).includes(number)", str(before + 5))
