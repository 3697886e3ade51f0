"""What ``sqlaqueue web`` serves, in a browser: the link signs it in, and the pages follow the queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from sqlalchemy.orm import sessionmaker

from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web.security import OneTimeToken
from tests.web.browser.chromium import viewing
from tests.web.browser.example import QUEUES
from tests.web.browser.site import Site, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser


class Guarded:
    """The dashboard behind the guard, whose origin is known when the server has its port."""

    def __init__(self, site: Site) -> None:
        self._dashboard = Dashboard(QUEUES, sessionmaker(site.engine), access=lambda _: Access(read=True, act=True))
        self.links: list[str] = []
        self.app: OneTimeToken | None = None

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001 - as in ASGI
        if self.app is None:
            await self._dashboard(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def guard(self, root: str) -> None:
        self.app = OneTimeToken(self._dashboard, origin=root.rstrip("/"), announce=self.links.append)


@pytest.fixture
def guarded(site: Site) -> Iterator[tuple[Guarded, str]]:
    app = Guarded(site)
    with serving(app) as (root, _):
        app.guard(root)
        yield app, root


def test_a_link_signs_in_the_browser_that_opens_it(guarded: tuple[Guarded, str], browser: Browser) -> None:
    app, root = guarded
    assert app.app is not None
    link = app.app.new_link()
    with viewing(browser, root) as view:
        view.open(status=401)
        assert "Open the link" in view.text()
        view.open(link.removeprefix(root))
        assert view.text("h1") == "Queues"
        # The token is neither in the address nor behind the button "Back".
        assert view.page.url == link.partition("?")[0]
        (cookie,) = view.page.context.cookies()
        assert (cookie.get("httpOnly"), cookie.get("sameSite")) == (True, "Strict")
        # Other ports do not receive it.
        assert root.rstrip("/") + str(cookie.get("path")) == view.page.url
        assert view.run("() => document.cookie") == ""
        view.page.reload()
        assert view.text("h1") == "Queues"
    with viewing(browser, root) as another:
        another.open(link.removeprefix(root), status=401)
        another.open(app.links[0].removeprefix(root))
        assert another.text("h1") == "Queues"
