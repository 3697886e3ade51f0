"""Who may ask: origins of POSTs, forms however they arrive, the audit, and the link of ``sqlaqueue web``."""

import logging
import re
import select
import socket
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx
import pytest
from starlette.requests import Request

from sqlaqueue.web import security
from sqlaqueue.web.errors import BadRequest, Forbidden, TooLarge
from sqlaqueue.web.security import (
    MOST_BYTES,
    MOST_SESSIONS,
    SESSION_LIFETIME,
    TOKEN_LIFETIME,
    OneTimeToken,
    Secrets,
    check_origin,
    check_reader,
    read_form,
    write_audit,
)

pytestmark = pytest.mark.once

OWN = "http://localhost:8000"
PUBLIC = "https://ops.example.com"


def headers(**given: str) -> dict[str, str]:
    return {"host": "localhost:8000", **{name.replace("_", "-"): value for name, value in given.items()}}


@pytest.mark.parametrize(
    "given",
    [
        {"origin": OWN},
        {"origin": OWN, "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "same-origin"},
        # A proxy has changed the host, the browser has not.
        {"origin": "https://ops.example.com", "sec_fetch_site": "same-origin"},
        {"origin": "https://other.example", "sec_fetch_site": "same-origin", "host": "app:8000"},
    ],
)
def test_posts_of_own_pages_are_served(given: dict[str, str]) -> None:
    check_origin(headers(**given), "http", {PUBLIC})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"origin": "null"},
        {"origin": "null", "sec_fetch_site": "same-origin"},
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:8001"},
        {"origin": "https://localhost:8000"},
        {"origin": "http://localhost:8000.evil.example"},
        {"origin": "http://localhost"},
        {"origin": "http://evil.example", "sec_fetch_site": "cross-site"},
        {"origin": OWN, "sec_fetch_site": "cross-site"},
        {"origin": OWN, "sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site"},
        {"origin": "https://sub.ops.example.com", "sec_fetch_site": "same-site"},
    ],
)
def test_posts_from_elsewhere_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        check_origin(headers(**given), "http", {PUBLIC})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"sec_fetch_site": "same-origin", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"},
        {"sec_fetch_site": "none", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"},
    ],
)
def test_links_on_pages_of_other_sites_are_followed(given: dict[str, str]) -> None:
    check_reader(headers(**given))


@pytest.mark.parametrize(
    "given",
    [
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"},
        {"sec_fetch_site": "cross-site"},
    ],
)
def test_what_pages_of_other_sites_read_by_themselves_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        check_reader(headers(**given))


async def test_a_page_of_another_site_does_not_export_in_the_name_of_a_user(
    dashboard: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sqlaqueue.audit")
    elsewhere = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=dashboard), base_url=OWN) as browser:
        for path in ("/", "/search?q=5", "/queues/email/jobs.csv", "/api/queues"):
            assert (await browser.get(path, headers=elsewhere)).status_code == 403
        assert [each for each in caplog.records if each.name.startswith("sqlaqueue")] == []
        assert (await browser.get("/queues/email/jobs.csv")).status_code == 200


def request(body: bytes, content_type: str = "application/x-www-form-urlencoded") -> Request:
    chunks = [body[start : start + 65536] for start in range(0, len(body), 65536)] or [b""]

    async def receive() -> Any:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", content_type.encode())]}
    return Request(scope, receive)


async def test_fields_keep_order_unicode_and_empty_values() -> None:
    form = await read_form(request(b"key=1&key=%C3%BC%0A&empty=&key=9223372036854775807"))
    assert form.all("key") == ["1", "ü\n", "9223372036854775807"]
    assert (form.get("empty", "x"), form.get("missing", "x")) == ("", "x")


@pytest.mark.parametrize("body", [b"a=%ff", b"a=\xff", b"a=%00", b"&".join(b"a=1" for _ in range(3000))])
async def test_forms_that_cannot_be_stored_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        await read_form(request(body))


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=x", "text/plain", ""])
async def test_other_types_are_refused(content_type: str) -> None:
    with pytest.raises(BadRequest):
        await read_form(request(b"a=1", content_type))


async def test_large_forms_are_not_read_to_the_end() -> None:
    sent = 0

    async def receive() -> Any:
        nonlocal sent
        sent += 1_000_000
        return {"type": "http.request", "body": b"a" * 1_000_000, "more_body": True}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"content-type", b"application/x-www-form-urlencoded")],
    }
    with pytest.raises(TooLarge):
        await read_form(Request(scope, receive))
    assert sent <= MOST_BYTES + 1_000_000


def test_audit_names_who_what_and_how_many(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sqlaqueue.audit"):
        write_audit("ada", "cancel", "email", count=3, keys=["1", "2", "3"])
    record: Any = caplog.records[0]
    assert (record.user, record.action, record.queue, record.count) == ("ada", "cancel", "email", 3)
    assert record.facts == {"keys": ["1", "2", "3"]}
    assert record.getMessage() == "user='ada' action=cancel queue='email' count=3 keys=['1', '2', '3']"


def test_audit_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sqlaqueue.audit"):
        write_audit("ada\nuser='eve' action=purge", "cancel", "em\rail", count=1, keys=["1\n2"])
    assert "\n" not in caplog.records[0].getMessage()
    assert "\r" not in caplog.records[0].getMessage()


def test_audit_of_many_keys_is_short(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sqlaqueue.audit"):
        write_audit("ada", "cancel", "email", count=5000, keys=[str(number) for number in range(5000)])
    record: Any = caplog.records[0]
    assert record.facts["keys"][-1] == "and 4900 more"


# -- the guard of ``sqlaqueue web``: one link, one browser, this machine only --------------------------------------

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


def opened(answer: httpx.Response) -> str:
    """Return the address that the page after a link opens."""
    (address,) = re.findall(r'<meta http-equiv="refresh" content="0; url=([^"]+)">', answer.text)
    return str(address)


async def test_a_link_signs_in_one_browser_once(guard: Guard) -> None:
    link = guard.app.new_link()
    async with guard.browser() as one, guard.browser() as another:
        answer = await one.get(link)
        assert (answer.status_code, opened(answer)) == (200, guard.path)
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
        answer = await one.get(link)
        assert (answer.status_code, answer.headers["location"]) == (303, guard.path)


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
        assert opened(await browser.get(link)) == guard.path


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


async def test_the_dashboard_below_the_secret_path(dashboard: Any) -> None:
    app = OneTimeToken(dashboard, origin=ORIGIN, announce=print)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), follow_redirects=True) as browser:
        page = await browser.get(urljoin(ORIGIN, opened(await browser.get(app.new_link()))))
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


async def test_a_click_on_a_page_of_another_site_is_told_apart(guard: Guard) -> None:
    elsewhere = {"Sec-Fetch-Site": "cross-site"}
    async with guard.browser() as browser:
        # After a click elsewhere, a browser sends no cookie, not even with the requests to which it is redirected.
        assert opened(await browser.get(guard.app.new_link(), headers=elsewhere)) == guard.path
    async with guard.browser() as browser:
        answer = await browser.get("/queues/email", headers=elsewhere)
    assert answer.status_code == 401
    assert '<a href="">Continue</a>' in answer.text
    assert "refresh" not in answer.text, "it would load itself for ever"
    assert guard.announced == [], "a page of any site can ask"


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
        assert opened(await another.get(guard.announced[0])) == guard.path
        assert (await another.get("/")).status_code == (await one.get("/")).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8420", "", "10.0.0.1:8420", "localhost@evil"])
async def test_another_name_of_this_machine_is_refused(guard: Guard, host: str) -> None:
    link = guard.app.new_link()
    async with guard.browser() as browser:
        assert (await browser.get(link, headers={"Host": host})).status_code == 421
        assert (await browser.get(link, headers={"Host": "localhost:8420"})).status_code == 200
        assert (await browser.get("/", headers={"Host": host})).status_code == 421


@pytest.mark.parametrize(
    "cookie", ["{0}", "other=1; {0}", "broken; =; a=b=c; {0}", f"{COOKIE}=wrong; {{0}}", 'json={{"a": "b"}}; {0}']
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


# -- forms that arrive slowly, not at all or without end: nothing waits for them, and no more of them is read ------


@contextmanager
def posting(root: str, *headers: str, action: str = "requeue") -> Iterator[socket.socket]:
    """Send the head of a POST, and give its connection."""
    host, _, port = root.removeprefix("http://").rstrip("/").partition(":")
    lines = [
        f"POST /queues/email/actions/{action} HTTP/1.1",
        f"Host: {host}:{port}",
        "Sec-Fetch-Site: same-origin",
        "Content-Type: application/x-www-form-urlencoded",
        *headers,
    ]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        yield connection


def answer(connection: socket.socket) -> tuple[int, bytes]:
    """Read until the server closes the connection; return the status and the whole response."""
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:  # it has closed the connection before it had read everything
        pass
    except TimeoutError:
        pytest.fail(f"the connection is open; received: {received!r}")
    return int(received.split(b" ", 2)[1]), received


@pytest.mark.parametrize("length", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_form_of_which_a_byte_arrives_now_and_then(root: str, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "LONGEST_WAIT", 1.0)
    with posting(root, length) as connection:
        # Nothing is sent once the response has begun: the server has closed the connection by then, and would reset it,
        # by which the client may lose what it has not read.
        while not select.select([connection], [], [], 0.1)[0]:
            connection.sendall(b"1\r\na\r\n" if "chunked" in length else b"a")
        status, response = answer(connection)
    assert status == 408
    assert b"connection: close" in response.lower()
    assert b"default-src 'none'" in response


def test_a_form_that_does_not_arrive(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "LONGEST_WAIT", 0.5)
    with posting(root, "Content-Length: 10") as connection:
        assert answer(connection)[0] == 408


def test_a_form_that_says_that_it_is_too_large_is_not_read(root: str) -> None:
    with posting(root, f"Content-Length: {security.MOST_BYTES + 1}") as connection:
        status, response = answer(connection)
    assert status == 413
    assert b"connection: close" in response.lower()


def test_a_form_that_turns_out_to_be_too_large_is_not_read_to_the_end(root: str) -> None:
    with posting(root, "Transfer-Encoding: chunked") as connection:
        sent = 0
        chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
        try:
            while sent < 50 * security.MOST_BYTES:
                connection.sendall(chunk)
                sent += len(chunk)
        except OSError:  # the server has closed the connection
            pass
    # What the buffers of the connection hold was sent, but not read.
    assert sent < 50 * security.MOST_BYTES


def test_a_form_that_is_broken_off_is_no_error_of_the_server(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with posting(root, "Content-Length: 1000") as connection:
        connection.sendall(b"key=1")
    with posting(root, "Content-Length: 0", "Connection: close", action="pause") as connection:
        assert answer(connection)[0] == 303
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
