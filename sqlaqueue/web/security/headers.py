"""The headers of every response, whichever part of the dashboard or of Starlette has made it."""

from __future__ import annotations

from sqlaqueue.asgi import Message, Scope, Send

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
