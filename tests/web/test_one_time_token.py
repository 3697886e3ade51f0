"""The guard of ``sqlaqueue web``: one link, one browser, this machine only."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx
import pytest

from sqlaqueue.web import Dashboard, security
from sqlaqueue.web.security import MOST_SESSIONS, SESSION_LIFETIME, TOKEN_LIFETIME, OneTimeToken, Secrets
from tests.web.conftest import everything

pytestmark = pytest.mark.once

ORIGIN = "http://127.0.0.1:8420"
COOKIE = "sqlaqueue"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def guarded(
    scope: MutableMapping[str, Any],
    receive: Callable[[], Awaitable[Any]],
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
) -> None:
    """Stand for the dashboard."""
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"jobs " + scope["query_string"]})


class Guard:
    """A guard with what it has announced, and browsers that ask it."""

    def __init__(self) -> None:
        self.clock, self.announced = Clock(), list[str]()
        self.app = OneTimeToken(guarded, origin=ORIGIN, announce=self.announced.append, now=self.clock)

    @property
    def path(self) -> str:
        """The secret path, which ends with a slash."""
        return self.app._path

    def browser(self) -> httpx.AsyncClient:
        """Return a browser whose relative addresses are below the secret path."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url=ORIGIN + self.path)


@pytest.fixture
def guard() -> Guard:
    return Guard()


async def test_a_link_signs_in_one_browser_once(guard: Guard) -> None:
    link = guard.app.new_link()
    async with guard.browser() as one, guard.browser() as another:
        answer = await one.get(link)
        assert (answer.status_code, answer.headers["location"]) == (303, guard.path)
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}=")
        assert {"HttpOnly", "SameSite=Strict", f"Path={guard.path}", f"Max-Age={SESSION_LIFETIME:.0f}"} <= set(
            cookie.split("; ")
        )
        assert (await one.get("/queues/email?state=failed")).text == "jobs state=failed"
        assert (await one.post("/queues/email/actions/purge")).status_code == 200
        assert (await another.get(link)).status_code == 401
        assert (await another.get("/")).status_code == 401
        # Its bookmark is no obstacle.
        assert (await one.get(link)).status_code == 303


async def test_the_token_is_long_and_kept_as_a_digest(guard: Guard) -> None:
    link = guard.app.new_link()
    assert urlsplit(link)._replace(query="").geturl() == ORIGIN + guard.path
    (token,) = parse_qs(urlsplit(link).query)["token"]
    assert len(token) == 43  # 256 bits in base64
    assert token not in repr(vars(guard.app._secrets))
    async with guard.browser() as browser:
        await browser.get(link)
        assert browser.cookies[COOKIE] not in repr(vars(guard.app._secrets))
        assert token != browser.cookies[COOKIE]


@pytest.mark.parametrize(
    "path",
    ["/", "/?token=", "/?token=wrong", "/?token=%C3%A9%ED%A0%80", "/queues/email", "/events", "/static/dashboard.css"],
)
async def test_nothing_is_shown_without_it(guard: Guard, path: str) -> None:
    guard.app.new_link()
    async with guard.browser() as browser:
        answer = await browser.get(path)
    assert answer.status_code == 401
    assert "jobs" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("method", ["POST", "HEAD", "PUT"])
async def test_a_link_is_for_reading_the_first_page(guard: Guard, method: str) -> None:
    link = guard.app.new_link()
    async with guard.browser() as browser:
        assert (await browser.request(method, link)).status_code == 401
        assert (await browser.get(link.replace("/?", "/events?"))).status_code == 401
        assert (await browser.get(link)).status_code == 303


@pytest.mark.parametrize("path", ["/", "/queues/email", "/?token={0}", "//{1}/", "/{1}", "/{1}x/", "/{2}/"])
async def test_nothing_is_shown_beside_the_secret_path(guard: Guard, path: str) -> None:
    link = guard.app.new_link()
    secret = guard.path.strip("/")
    async with guard.browser() as browser:
        await browser.get(guard.app.new_link())
        session = f"{COOKIE}={browser.cookies[COOKIE]}"
        assert (await browser.get("/", headers={"Cookie": session})).status_code == 200
    token = link.partition("token=")[2]
    address = ORIGIN + path.format(token, secret, secret[:-1])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guard.app)) as other:
        # Also with the cookie, which a browser does not send there.
        for cookie in ("", session):
            answer = await other.get(address, headers={"Cookie": cookie})
            assert answer.status_code == 401
            assert secret not in answer.text


def cookies_sent_to(jar: Any, url: str) -> str | None:
    request = urllib.request.Request(url)  # noqa: S310 - it is not sent
    jar.add_cookie_header(request)
    return request.get_header("Cookie")


async def test_other_ports_do_not_get_the_cookie(guard: Guard) -> None:
    async with guard.browser() as browser:
        await browser.get(guard.app.new_link())
        jar = browser.cookies.jar
        assert cookies_sent_to(jar, f"{ORIGIN}{guard.path}queues/email") is not None
        for other in ("/", "/queues/email", "/favicon.ico"):
            assert cookies_sent_to(jar, f"http://127.0.0.1:8000{other}") is None


def test_each_start_has_a_path_of_its_own(guard: Guard) -> None:
    assert len(guard.path) == 24  # 128 bits in base64, and two slashes
    assert guard.path != Guard().path
    assert guard.app.new_link().startswith(f"{ORIGIN}{guard.path}?token=")


async def test_the_dashboard_below_the_secret_path(queues: Any, sessions: Any) -> None:
    app = OneTimeToken(Dashboard(queues.all, sessions, access=everything), origin=ORIGIN, announce=print)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), follow_redirects=True) as browser:
        page = await browser.get(app.new_link())
        found = [urljoin(str(page.url), each) for each in re.findall(r'(?:href|src)="([^"]+)"', page.text)]
        assert page.status_code == 200
        assert len(found) > 5
        assert {(await browser.get(each)).status_code for each in found if "/events" not in each} == {200}


async def test_a_link_and_a_session_end(guard: Guard) -> None:
    link = guard.app.new_link()
    guard.clock.now += TOKEN_LIFETIME
    async with guard.browser() as browser:
        assert (await browser.get(link)).status_code == 401
        await browser.get(guard.app.new_link())
        guard.clock.now += SESSION_LIFETIME - 1
        assert (await browser.get("/")).status_code == 200
        guard.clock.now += 1
        assert (await browser.get("/")).status_code == 401


async def test_another_link_is_printed_when_there_is_none(guard: Guard) -> None:
    link = guard.app.new_link()
    async with guard.browser() as one, guard.browser() as another:
        assert "has printed" in (await another.get("/")).text
        assert guard.announced == []
        await one.get(link)
        assert "new link" in (await another.get("/")).text
        # And no more, however often a page of another site asks.
        for _ in range(5):
            await another.get("/")
        assert len(guard.announced) == 1
        assert (await another.get(guard.announced[0])).status_code == 303
        assert (await another.get("/")).status_code == (await one.get("/")).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8420", "", "10.0.0.1:8420", "localhost@evil"])
async def test_another_name_of_this_machine_is_refused(guard: Guard, host: str) -> None:
    link = guard.app.new_link()
    async with guard.browser() as browser:
        assert (await browser.get(link, headers={"Host": host})).status_code == 421
        assert (await browser.get(link, headers={"Host": "localhost:8420"})).status_code == 303
        assert (await browser.get("/", headers={"Host": host})).status_code == 421


@pytest.mark.parametrize(
    "cookie",
    ["{0}", "other=1; {0}", "broken; =; a=b=c; {0}", f"{COOKIE}=wrong; {{0}}", 'json={{"a": "b"}}; {0}'],
)
async def test_the_cookies_of_other_applications_do_not_matter(guard: Guard, cookie: str) -> None:
    async with guard.browser() as browser:
        await browser.get(guard.app.new_link())
        session = f"{COOKIE}={browser.cookies[COOKIE]}"
    async with guard.browser() as browser:
        assert (await browser.get("/", headers={"Cookie": cookie.format(session)})).status_code == 200
        wrong = cookie.format(session[:-1])
        assert (await browser.get("/", headers={"Cookie": wrong})).status_code == 401


async def test_websockets_are_refused_and_the_lifespan_is_the_applications(guard: Guard) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    await guard.app({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
    reached: list[str] = []

    async def app(scope: Any, *_: Any) -> None:
        reached.append(scope["type"])

    await OneTimeToken(app, origin=ORIGIN, announce=print)({"type": "lifespan"}, receive, send)
    assert reached == ["lifespan"]


def test_a_few_browsers_are_signed_in_and_the_first_ones_are_forgotten() -> None:
    secrets = Secrets()
    sessions = [secrets.exchange(secrets.new_token()) for _ in range(MOST_SESSIONS + 1)]
    assert [secrets.knows(session or "") for session in sessions] == [False, *[True] * MOST_SESSIONS]


def test_a_new_token_replaces_the_old_one() -> None:
    secrets = Secrets()
    assert secrets.exchange("") is None
    old, new = secrets.new_token(), secrets.new_token()
    assert secrets.exchange(old) is None
    assert secrets.has_token
    assert secrets.exchange(new) is not None
    assert not secrets.has_token
    assert secrets.exchange(new) is None


def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, another: bytes) -> bool:
        compared.append((one, another))
        return one == another

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    secrets = Secrets()
    session = secrets.exchange(secrets.new_token())
    assert session is not None
    secrets.exchange(secrets.new_token())
    assert secrets.knows(session)
    # All sessions, also those behind the one that is found; and digests, whose lengths are the same.
    assert len(compared) == 4
    assert {len(each) for pair in compared for each in pair} == {32}
