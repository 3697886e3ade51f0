"""When a listener checks its connection, and how long it waits before it connects again."""

from __future__ import annotations

import contextlib
import os
import socket

from sqlaqueue.log import fields, logger

CHECK_INTERVAL = 60.0
"""Seconds of silence after which a listener checks its connection."""

REPLY_TIMEOUT = 10.0
"""Seconds for the reply to that check."""

_FIRST_DELAY, _MAX_DELAY = 0.2, 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


def log_failure(error: Exception) -> None:
    """Log that a listener has no connection; its subscribers poll meanwhile."""
    kind = type(error).__name__
    extra = fields("listener_lost", error_kind=kind)
    logger.warning("cannot listen for notifications, polling: %s: %s", kind, error, extra=extra)


def reconnect_delay(failures: int) -> float:
    """Return the seconds to wait before connecting again after some failures in a row."""
    return min(_MAX_DELAY, _FIRST_DELAY * 2.0 ** min(failures, 10))


def enable_keepalive(descriptor: int) -> None:
    """Have the operating system probe a silent TCP connection, which may be half open."""
    # A UNIX socket supports no keepalive and needs none.
    # The duplicate descriptor is closed with the socket object; the connection keeps its own.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
