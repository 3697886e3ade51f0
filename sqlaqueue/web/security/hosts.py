"""The check of the Host header, against DNS rebinding.

A page of another site can make its own name resolve to the address of this server, and then read what the server
answers under that name. So a dashboard answers under the names that it was given only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from sqlaqueue.web.errors import Misdirected


def check_host(host: str, origins: Collection[str]) -> None:
    """Refuse a request for another host than this machine and those of ``origins``.

    :param host: the Host header.
    :raises Misdirected: for any other host.
    """
    if is_loopback(host) or host.lower() in {urlsplit(origin).netloc for origin in origins}:
        return
    shown = host[:100]
    raise Misdirected(
        f"This dashboard is not served as {shown!r}.",
        f"If this is its address, add it: Dashboard(..., origins=[{'https://' + shown!r}]).",
    )


def is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine."""
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
