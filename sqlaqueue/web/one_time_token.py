"""Access to the dashboard of one person, by a link that the command prints: the guard of ``sqlaqueue web``.

The link contains a token of 256 random bits, which can be used once. It is exchanged for a session, whose own 256 bits
are in a cookie that scripts cannot read and that other sites cannot have sent. Only digests are kept and compared, in
constant time. A further browser gets a link of its own: whoever can read the terminal is the one who may have it.

Browsers send cookies to all ports of a host, so that another program of this machine could read them. The dashboard is
therefore below a path of 128 random bits, which is that of the cookie as well. It is in the address bar and the history
of the browser, where it opens nothing without the cookie; browsers send it as a Referer to no other port.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from html import escape
from urllib.parse import parse_qsl

from sqlaqueue.asgi import AsgiApp, Receive, Scope, Send
from sqlaqueue.web.security.hosts import is_loopback

TOKEN_LIFETIME = 10 * 60.0
"""Seconds for which a link can be used."""

SESSION_LIFETIME = 12 * 3600.0
"""Seconds for which a browser stays signed in."""

MOST_SESSIONS = 20
"""How many browsers are signed in at most, those of the last links."""

_BYTES, _PATH_BYTES = 32, 16

_COOKIE = "sqlaqueue"


class Secrets:
    """The open token and the sessions. No I/O.

    :param now: the clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._token: tuple[bytes, float] | None = None
        self._sessions: list[tuple[bytes, float]] = []

    @property
    def has_token(self) -> bool:
        """Whether there is a token that can still be used."""
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
        """Return whether a session is known and has not expired."""
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
        self,
        app: AsgiApp,
        *,
        origin: str,
        announce: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._origin, self._announce = app, origin, announce
        self._secrets = Secrets(now)
        self._path = f"/{secrets.token_urlsafe(_PATH_BYTES)}/"

    def new_link(self) -> str:
        """Return a link that signs one browser in, once."""
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
        is_below = _is_below(scope, self._path)
        token = self._token(scope) if is_below else None
        is_signed_in = is_below and self._is_signed_in(headers.get("cookie", ""))
        if token is not None:
            await self._sign_in(token, send, is_signed_in=is_signed_in)
        elif is_signed_in:
            await self._app({**scope, "root_path": scope.get("root_path", "") + self._path[:-1]}, receive, send)
        else:
            await self._refuse(send, "This browser is not signed in.")

    def _token(self, scope: Scope) -> str | None:
        """Return the token of a request for a link; None if it is no such request."""
        if scope["method"] != "GET" or scope["path"] != self._path:
            return None
        query: bytes = scope["query_string"]
        return next((value for name, value in parse_qsl(query.decode("latin-1")) if name == "token"), None)

    def _is_signed_in(self, header: str) -> bool:
        # Not by http.cookies, which reads nothing at all if another application of this host has set a malformed one.
        cookies = [each.strip().partition("=") for each in header.split(";")]
        return any(self._secrets.knows(value) for name, _, value in cookies if name == _COOKIE)

    async def _sign_in(self, token: str, send: Send, *, is_signed_in: bool) -> None:
        session = self._secrets.exchange(token)
        if session is None and not is_signed_in:
            await self._refuse(send, "This link has been used, or is too old.")
            return
        # Without the token, which would otherwise stay in the address bar and the history.
        headers = [(b"location", self._path.encode())]
        if session is not None:
            limits = f"Path={self._path}; Max-Age={SESSION_LIFETIME:.0f}; HttpOnly; SameSite=Strict"
            headers.append((b"set-cookie", f"{_COOKIE}={session}; {limits}".encode()))
        await _respond(send, 303, b"", headers)

    async def _refuse(self, send: Send, why: str) -> None:
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


def _is_below(scope: Scope, path: str) -> bool:
    given = str(scope["path"])[: len(path)]
    return hmac.compare_digest(_digest(given), _digest(path))


async def _page(send: Send, status: int, title: str, text: str) -> None:
    html = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><h1>{escape(title)}</h1><p>{escape(text)}</p></html>"
    )
    await _respond(send, status, html.encode(), [])


async def _respond(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
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
