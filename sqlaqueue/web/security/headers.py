"""The headers of every response."""

from __future__ import annotations

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""No inline script or style, so that a value that reached a page unescaped could not be executed."""

SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Not no-referrer: a browser would send `Origin: null` with a POST then.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

NOT_STORED = {"Cache-Control": "no-store"}
"""For pages: they show data of the application, and what is shown must be current."""
