"""The frame: which requests are served, mounted under any path, and how errors are answered."""

from __future__ import annotations

import logging
import re
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from litestar import Litestar, asgi
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Mount

from sqlaqueue.web import Access, Dashboard
from sqlaqueue.web.context import PATHS
from sqlaqueue.web.security import SECURITY_HEADERS
from tests.web.conftest import HERE, client, everything


def links(response: httpx.Response) -> list[str]:
    """Return the absolute URLs of what a page links to."""
    return [urljoin(str(response.url), each) for each in re.findall(r'(?:href|src|action)="([^"]+)"', response.text)]


async def test_first_page_names_all_queues(client_of: Any) -> None:
    response = await client_of().get("/")
    assert response.status_code == 200
    assert [name in response.text for name in ("email", "invoice", "picture")] == [True] * 3


async def test_async_sessions_serve_as_well(queues: Any, shared: Any) -> None:
    engine = create_async_engine(shared.url("asyncpg"))
    app = Dashboard(queues.all, async_sessionmaker(engine), access=everything)
    assert (await client(app).get("/")).status_code == 200
    await engine.dispose()


@pytest.mark.each_value
@pytest.mark.parametrize("framework", ["starlette", "fastapi", "litestar"])
@pytest.mark.parametrize("path", ["/ops", "/deep/er/queues"])
async def test_mounted_links_stay_below_the_path(framework: str, path: str, queues: Any, sessions: Any) -> None:
    dashboard = Dashboard(queues.all, sessions, access=everything)
    app: Any
    if framework == "starlette":
        app = Starlette(routes=[Mount(path, dashboard)])
    elif framework == "fastapi":
        app = FastAPI()
        app.mount(path, dashboard)
    else:
        app = Litestar([asgi(path, is_mount=True, copy_scope=True)(dashboard)])  # type: ignore[arg-type]  # its types are those of its own
    async with client(app) as browser:
        first = await browser.get(path, follow_redirects=True)
        assert (first.status_code, first.url.path) == (200, f"{path}/")
        found = links(first)
        assert found
        assert [each for each in found if not each.startswith(f"{HERE}{path}/")] == []
        for each in found:
            if "/static/" in each:
                assert (await browser.get(each)).status_code == 200
        below = await browser.get(f"{path}/queues/email/nothing")
        assert [each for each in links(below) if not each.startswith(f"{HERE}{path}/")] == []


async def test_proxy_that_cuts_the_path_needs_no_setting(queues: Any, sessions: Any) -> None:
    dashboard = Dashboard(queues.all, sessions, access=everything)
    response = await client(dashboard).get("/")
    seen = "https://ops.example.com/admin/queues/"
    targets = [urljoin(seen, each) for each in re.findall(r'(?:href|src)="([^"]+)"', response.text)]
    assert [each for each in targets if not each.startswith(seen)] == []


async def test_refuses_to_start_without_an_access_rule(queues: Any, sessions: Any) -> None:
    with pytest.raises(TypeError, match="access"):
        Dashboard(queues.all, sessions)  # type: ignore[call-arg]  # the mistake that is tested
    with pytest.raises(Exception, match="Dashboard\\(access=None\\): give a function"):
        Dashboard(queues.all, sessions, access=None)  # type: ignore[arg-type]  # its types are those of its own


async def test_nobody_sees_nothing(client_of: Any) -> None:
    response = await client_of(access=lambda _: None).get("/")
    assert response.status_code == 403
    assert "email" not in response.text


async def test_access_rule_may_answer_itself(client_of: Any) -> None:
    async def rule(_: Any) -> RedirectResponse:
        return RedirectResponse("/login")

    response = await client_of(access=rule).get("/")
    assert (response.status_code, response.headers["location"]) == (307, "/login")


async def test_error_of_the_access_rule_is_the_applications(queues: Any, sessions: Any) -> None:
    def rule(_: Any) -> Access:
        raise HTTPException(401, headers={"WWW-Authenticate": "Basic"})

    app = Starlette(routes=[Mount("/ops", Dashboard(queues.all, sessions, access=rule))])
    response = await client(app).get("/ops/")
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Basic")


async def test_access_rule_sees_the_whole_path(queues: Any, sessions: Any) -> None:
    seen: list[str] = []

    def rule(request: Any) -> Access:
        seen.append(request.url.path)
        return Access(read=True)

    app = Starlette(routes=[Mount("/ops", Dashboard(queues.all, sessions, access=rule))])
    await client(app).get("/ops/")
    assert seen == ["/ops/"]


async def test_queue_without_access_is_not_named(client_of: Any) -> None:
    response = await client_of(access=lambda _: Access(read=["invoice"])).get("/")
    assert "invoice" in response.text
    assert "email" not in response.text


@pytest.mark.parametrize("given", [True, "ada", Access(read=["emial"])])
async def test_wrong_access_shows_nothing_and_is_logged(
    given: Any, client_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    response = await client_of(access=lambda _: given).get("/")
    assert response.status_code == 500
    assert "email" not in response.text
    assert "the access rule" in caplog.text


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[", "10.0.0.7"]
)
async def test_other_hosts_are_refused(host: str, client_of: Any) -> None:
    response = await client_of().get("/", headers={"Host": host})
    assert response.status_code == 421
    assert "email" not in response.text


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8420", "[::1]:8420", "ops.example.com"])
async def test_own_hosts_are_served(host: str, client_of: Any) -> None:
    dashboard = client_of(origins=["https://ops.example.com"])
    assert (await dashboard.get("/", headers={"Host": host})).status_code == 200


async def test_headers_forbid_inline_code_frames_and_caches(client_of: Any) -> None:
    for path in ("/", "/nothing"):
        headers = (await client_of().get(path)).headers
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-frame-options"] == "DENY"
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


def in_starlette(dashboard: Any) -> Any:
    return Starlette(routes=[Mount("/ops", dashboard)])


def in_fastapi(dashboard: Any) -> Any:
    app = FastAPI()
    app.mount("/ops", dashboard)
    return app


def in_litestar(dashboard: Any) -> Any:
    return Litestar([asgi("/ops", is_mount=True, copy_scope=True)(dashboard)])


@pytest.mark.parametrize("mounted", [None, in_starlette, in_fastapi, in_litestar])
async def test_every_answer_has_the_headers(mounted: Any, queues: Any, sessions: Any) -> None:
    dashboard = Dashboard(queues.all, sessions, access=everything)
    app, below = (dashboard, "") if mounted is None else (mounted(dashboard), "/ops")
    parts = {"queue": "email", "action": "pause", "file": "dashboard.css"}
    paths = [f"/{each.format(**parts)}" for each in PATHS.values()]
    paths += ["/nothing", "/queues/nothing", "/queues/email/", "/static/nothing", "//", "/%00", "/queues/%2e%2e"]
    if mounted is in_litestar:  # the others answer this one themselves
        paths.append("")
    seen = set()
    async with client(app) as browser:
        for method in METHODS:
            for path in paths:
                if path == "/events" and method == "GET":
                    continue  # it has no end; test_live.py looks at it
                response = await browser.request(method, below + path)
                seen.add(response.status_code)
                missing = [name for name in SECURITY_HEADERS if name not in response.headers]
                assert not missing, (method, path, response.status_code, missing)
                names = [name for name, _ in response.headers.multi_items()]
                assert len(set(names)) == len(names), (method, path, names)
                if "/static/" not in path:
                    assert response.headers["cache-control"] == "no-store"
    assert {200, 303, 400, 404, 405} <= seen
    assert mounted is not in_litestar or 307 in seen


async def test_answer_of_the_access_rule_is_sent_as_it_is(client_of: Any) -> None:
    login = HTMLResponse("<style>p {color: red}</style>", headers={"Content-Security-Policy": "style-src 'self'"})
    headers = (await client_of(access=lambda _: login).get("/")).headers
    assert headers["content-security-policy"] == "style-src 'self'"
    assert "x-frame-options" not in headers


async def test_static_files_are_these_only(client_of: Any) -> None:
    async with client_of() as browser:
        assert (await browser.get("/static/dashboard.css")).headers["content-type"].startswith("text/css")
        for name in ("../dashboard.py", "..%2fdashboard.py", "%2e%2e/dashboard.py", "templates", "", "x.css"):
            assert (await browser.get(f"/static/{name}")).status_code == 404


async def test_unreachable_database_is_a_page_with_advice(queues: Any, client_of: Any) -> None:
    engine = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    response = await client_of(factory=sa.orm.sessionmaker(engine)).get("/")
    # The first page shows the queues even so.
    assert response.status_code in {200, 503}
    assert "Traceback" not in response.text


async def test_unexpected_error_is_logged_and_not_shown(
    queues: Any, sessions: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rule(_: Any) -> Access:
        message = "secret <script>"
        raise RuntimeError(message)

    with caplog.at_level(logging.ERROR):
        response = await client(Dashboard(queues.all, sessions, access=rule)).get("/")
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "RuntimeError: secret" in caplog.text


async def test_lifespan_and_websockets_are_answered(queues: Any, sessions: Any) -> None:
    dashboard = Dashboard(queues.all, sessions, access=everything)
    sent: list[Any] = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    await dashboard({"type": "lifespan"}, receive, send)
    await dashboard({"type": "websocket"}, receive, send)
    assert [each["type"] for each in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
        "websocket.close",
    ]
