"""Who may do what: one-time tokens, checks of hosts and origins, limited forms, headers, and the audit."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import anyio
from starlette.requests import ClientDisconnect, Request

from sqlaqueue.log import fields
from sqlaqueue.telemetry.asgi import AsgiApp, Message, Receive, Scope, Send
from sqlaqueue.web.data.records import short_facts
from sqlaqueue.web.errors import BadRequest, Forbidden, Misdirected, TooLarge, TooSlow

audit_logger = logging.getLogger("sqlaqueue.audit")
"""A logger of its own, so that an application can keep these records apart."""


def write_audit(user: str, action: str, queue: str, *, count: int | None, **facts: Any) -> None:
    """Log an action; ``count`` is None for one on a queue or a schedule. Facts are keys, a filter or an error."""
    told = short_facts(facts)
    shown = "".join(f" {name}={value!r}" for name, value in told.items())
    number = "" if count is None else f" count={count}"
    extra = fields("dashboard_action", queue=queue, count=count, user=user, action=action, facts=told)
    # repr() escapes line breaks, so that no value can forge a record.
    audit_logger.info("user=%r action=%s queue=%r%s%s", user, action, queue, number, shown, extra=extra)


# -- forms -------------------------------------------------------------------------------------------------------------

MOST_BYTES = 2_000_000
"""The largest form. An argument of this size can be edited elsewhere."""

MOST_FIELDS = 2000

LONGEST_WAIT = 30.0
"""Seconds within which a form has to arrive. One of which a byte arrives now and then would be waited for for ever."""

_FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True)
class FormData:
    """The fields of a form, in their order; a name may occur several times."""

    fields: tuple[tuple[str, str], ...]

    def get(self, name: str, default: str = "") -> str:
        return next((value for field, value in self.fields if field == name), default)

    def all(self, name: str) -> list[str]:
        return [value for field, value in self.fields if field == name]


async def read_form(request: Request) -> FormData:
    """Return the form of a POST.

    :raises TooLarge: if it is larger than :data:`MOST_BYTES`.
    :raises TooSlow: if it has not arrived within :data:`LONGEST_WAIT`.
    :raises BadRequest: if it is no form, is broken off, is not UTF-8, or contains a NUL character, which PostgreSQL
        cannot store.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise BadRequest(f"A POST must be a form of the type {_FORM}.")
    try:
        with anyio.fail_after(LONGEST_WAIT):
            body = await _body(request)
    except TimeoutError:
        raise TooSlow(f"The form has not arrived within {LONGEST_WAIT:.0f} seconds.", "Send it again.") from None
    try:
        text = body.decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS)
    except ValueError:
        raise BadRequest("The form cannot be read: it is not UTF-8, or has too many fields.") from None
    if any("\0" in name or "\0" in value for name, value in pairs):
        raise BadRequest("The form contains a NUL character, which PostgreSQL cannot store.")
    return FormData(tuple(pairs))


async def _body(request: Request) -> bytes:
    too_large = TooLarge(
        f"The form is larger than {MOST_BYTES // 1_000_000} MB.", "Change such a value in a program instead."
    )
    announced = request.headers.get("content-length", "")
    # Servers have checked that it is a number.
    if announced.isdecimal() and int(announced[:20]) > MOST_BYTES:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BYTES:
                raise too_large
    except ClientDisconnect:
        raise BadRequest("The form was broken off.") from None
    return bytes(body)


CONTENT_SECURITY_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""No inline script or style, so that a value that reached a page unescaped could not be executed."""

SECURITY_HEADERS = {
    # Pages show data of the application, and what is shown must be current. Static files say otherwise.
    "Cache-Control": "no-store",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Not no-referrer: a browser would send `Origin: null` with a POST then.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

AS_IT_IS = "sqlaqueue.as_it_is"
"""The key of a scope whose response is the application's own, such as a login page, and gets no headers."""

_ENCODED = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]


def secured(scope: Scope, send: Send) -> Send:
    """Return ``send`` with the headers of every response, unless a response has its own values of them."""

    async def send_secured(message: Message) -> None:
        if message["type"] == "http.response.start" and AS_IT_IS not in scope:
            headers = [*message.get("headers", ())]
            present = {name.lower() for name, _ in headers}
            message = {**message, "headers": [*headers, *(each for each in _ENCODED if each[0] not in present)]}
        await send(message)

    return send_secured


def check_host(host: str, origins: Collection[str]) -> None:
    """Refuse a request for another host than this machine and those of ``origins``, against DNS rebinding.

    A page of another site can make its own name resolve to the address of this server, and then read what the server
    answers under that name.
    """
    if is_loopback(host) or host.lower() in {urlsplit(origin).netloc for origin in origins}:
        return
    shown = host[:100]
    raise Misdirected(
        f"This dashboard is not available as {shown!r}.",
        f"If this is its address, add it: Dashboard(..., origins=[{'https://' + shown!r}]).",
    )


def check_reader(headers: Mapping[str, str]) -> None:
    """Refuse a GET that a page of another site makes by itself; a link that somebody follows is served.

    That page could not read the answer. But the browser may send the user's cookies with it, so that the page could
    let the user search and export: at the cost of the database, and in the user's name in the audit.
    """
    if headers.get("sec-fetch-site") not in {"cross-site", "same-site"}:
        return
    # Of a frame, which shows nothing of a dashboard, the mode is that of a link as well.
    if headers.get("sec-fetch-mode") != "navigate" or headers.get("sec-fetch-dest", "document") != "document":
        raise Forbidden(
            "This request was made by a page of another site, so it was not answered.", "Open the dashboard itself."
        )


def is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# -- one time token ----------------------------------------------------------------------------------------------------
# Access to the dashboard of one person, by a link that the command prints: the guard of ``sqlaqueue web``.
#
# The link contains a token of 256 random bits, which can be used once. It is exchanged for a session, whose own 256
# bits are in a cookie that scripts cannot read and that other sites cannot have sent. Only digests are kept and
# compared, in constant time. A further browser gets a link of its own: whoever can read the terminal is the one who
# may have it.
#
# Browsers send cookies to all ports of a host, so that another program of this machine could read them. The dashboard
# is therefore below a path of 128 random bits, which is that of the cookie as well. It is in the address bar and the
# history of the browser, where it opens nothing without the cookie; browsers send it as a Referer to no other port.


TOKEN_LIFETIME = 10 * 60.0
"""Seconds for which a link can be used."""

SESSION_LIFETIME = 12 * 3600.0
"""Seconds for which a browser stays signed in."""

MOST_SESSIONS = 20
"""How many browsers are signed in at most, those of the last links."""

_BYTES, _PATH_BYTES = 32, 16

_COOKIE = "sqlaqueue"


class Secrets:
    """The open token and the sessions. No I/O."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._token: tuple[bytes, float] | None = None
        self._sessions: list[tuple[bytes, float]] = []

    @property
    def has_token(self) -> bool:
        return self._token is not None and self._token[1] > self._now()

    def new_token(self) -> str:
        """Return a token, and forget an earlier one."""
        token = secrets.token_urlsafe(_BYTES)
        self._token = (_digest(token), self._now() + TOKEN_LIFETIME)
        return token

    def exchange(self, token: str) -> str | None:
        """Return a new session for a token, which can then not be used again; None if it is wrong, used or too old."""
        if self._token is None:
            return None
        expected, until = self._token
        if not hmac.compare_digest(_digest(token), expected) or until <= self._now():
            return None
        self._token = None
        session = secrets.token_urlsafe(_BYTES)
        self._sessions.append((_digest(session), self._now() + SESSION_LIFETIME))
        del self._sessions[:-MOST_SESSIONS]
        return session

    def knows(self, session: str) -> bool:
        given, now = _digest(session), self._now()
        # All are compared, so that the time tells nothing.
        return sum(hmac.compare_digest(given, each) and until > now for each, until in self._sessions) > 0


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class OneTimeToken:
    """An ASGI application that lets only browsers through that have used a link of :meth:`new_link`.

    :param app: the application that it guards.
    :param origin: where it is served, such as ``http://127.0.0.1:8420``.
    :param announce: is called with a new link when a browser without a session asks for a page and no link is open.
    """

    def __init__(
        self, app: AsgiApp, *, origin: str, announce: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._app, self._origin, self._announce = app, origin, announce
        self._secrets = Secrets(now)
        self._path = f"/{secrets.token_urlsafe(_PATH_BYTES)}/"

    def new_link(self) -> str:
        return f"{self._origin}{self._path}?token={self._secrets.new_token()}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request of a browser that is signed in; sign one in that has a token; refuse others."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _headers(scope)
        # Another name is one that a site has made to point to this machine (DNS rebinding).
        if not is_loopback(headers.get("host", "")):
            await _page(send, 421, "Unknown host", f"Open {self._origin} instead: there is no other name for it.")
            return
        below = str(scope["path"])[: len(self._path)]
        is_below = hmac.compare_digest(_digest(below), _digest(self._path))
        token = self._token(scope) if is_below else None
        is_signed_in = is_below and self._is_signed_in(headers.get("cookie", ""))
        if token is not None:
            await self._sign_in(token, headers, send, is_signed_in=is_signed_in)
        elif is_signed_in:
            await self._app({**scope, "root_path": scope.get("root_path", "") + self._path[:-1]}, receive, send)
        else:
            await self._refuse(headers, send, "This browser is not signed in.")

    def _token(self, scope: Scope) -> str | None:
        if scope["method"] != "GET" or scope["path"] != self._path:
            return None
        query: bytes = scope["query_string"]
        return next((value for name, value in parse_qsl(query.decode("latin-1")) if name == "token"), None)

    def _is_signed_in(self, header: str) -> bool:
        # Not by http.cookies, which reads nothing at all if another application of this host has set a malformed one.
        cookies = [each.strip().partition("=") for each in header.split(";")]
        return any(self._secrets.knows(value) for name, _, value in cookies if name == _COOKIE)

    async def _sign_in(self, token: str, headers: Mapping[str, str], send: Send, *, is_signed_in: bool) -> None:
        session = self._secrets.exchange(token)
        if session is None:
            if is_signed_in:
                await _respond(send, 303, b"", [(b"location", self._path.encode())])
            else:
                await self._refuse(headers, send, "This link has been used, or is too old.")
            return
        limits = f"Path={self._path}; Max-Age={SESSION_LIFETIME:.0f}; HttpOnly; SameSite=Strict"
        cookie = (b"set-cookie", f"{_COOKIE}={session}; {limits}".encode())
        # To an address without the token, which would otherwise stay in the address bar and the history. By a page and
        # not by a redirect: after a click on a page of another site, a browser follows redirects without the cookie.
        await _page(send, 200, "Signed in", "The dashboard opens.", goes_to=self._path, headers=[cookie])

    async def _refuse(self, headers: Mapping[str, str], send: Send, why: str) -> None:
        if headers.get("sec-fetch-site") == "cross-site":
            # No link is announced: a page of any site can ask.
            text = f"{why} If it is, it has not said so, as the link was clicked on a page of another site."
            await _page(send, 401, "Not signed in", text, goes_to="", goes_by_itself=False)
            return
        if self._secrets.has_token:
            what = "Open the link that `sqlaqueue web` has printed."
        else:
            self._announce(self.new_link())
            what = "`sqlaqueue web` has printed a new link in its terminal: open that."
        await _page(send, 401, "Not signed in", f"{why} {what}")


def _headers(scope: Scope) -> dict[str, str]:
    """Return the headers that are looked at; of several Host headers, a value that is never accepted."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1").lower()
        joined = "; " if key == "cookie" else ", "
        found[key] = f"{found[key]}{joined}{value.decode('latin-1')}" if key in found else value.decode("latin-1")
    return found


async def _page(
    send: Send,
    status: int,
    title: str,
    text: str,
    *,
    goes_to: str | None = None,
    goes_by_itself: bool = True,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send a page; with a link if it goes to another one, or to itself."""
    refresh = link = ""
    if goes_to is not None:
        link = f'<p><a href="{escape(goes_to)}">Continue</a></p>'
        refresh = f'<meta http-equiv="refresh" content="0; url={escape(goes_to)}">' if goes_by_itself else ""
    html = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark">{refresh}'
        f"<title>{escape(title)}</title><h1>{escape(title)}</h1><p>{escape(text)}</p>{link}</html>"
    )
    await _respond(send, status, html.encode(), headers)


async def _respond(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    every = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"referrer-policy", b"no-referrer"),
        (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": [*every, *headers]})
    await send({"type": "http.response.body", "body": body})


def check_origin(headers: Mapping[str, str], scheme: str, origins: Collection[str]) -> None:
    """Refuse a POST that was not made by a page of the dashboard, also of programs that name no origin.

    Otherwise another site could act in the user's name. Browsers send Sec-Fetch-Site to https origins and to this
    machine, and Origin with every POST. A page cannot set either.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    own = {f"{scheme}://{headers.get('host', '').lower()}", *origins}
    if origin is not None and origin.lower() in own:
        # The two must not contradict each other. A proxy that ends TLS makes the scheme differ, not the site.
        if site in {None, "same-origin"}:
            return
    elif site == "same-origin" and origin != "null":
        return
    raise Forbidden(
        "This request was not made by a page of the dashboard, so it was not carried out.",
        "Open the dashboard itself and try again. Behind a proxy, give its address: Dashboard(..., origins=[...]).",
    )
