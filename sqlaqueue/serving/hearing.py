"""What the ears of sync and of async Consumers have in common: who wants to hear what, and patience."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from sqlaqueue.serving.calls import Calls

CHECK = 60.0
"""Seconds after which a silent connection is asked whether it is still there."""

ANSWER = 10.0
"""Seconds for its answer."""

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


class Hearers:
    """The Consumers that want to hear what is said on channels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[Calls, str] = {}

    def add(self, channel: str, calls: Calls) -> None:
        """Have ``calls`` hear what is said on ``channel``."""
        with self._lock:
            self._channels[calls] = channel

    def remove(self, calls: Calls) -> None:
        """Have ``calls`` hear no more."""
        with self._lock:
            self._channels.pop(calls, None)

    @property
    def channels(self) -> set[str]:
        """What somebody wants to hear."""
        with self._lock:
            return set(self._channels.values())

    def say(self, channel: str, words: str) -> None:
        """Tell what was said."""
        for calls in self._of({channel}):
            calls.hear(words)

    def doubt(self, channels: set[str]) -> None:
        """Have it proven again that something is heard: the connection is lost, or is another one."""
        for calls in self._of(channels):
            calls.went_deaf()

    def _of(self, channels: set[str]) -> list[Calls]:
        with self._lock:
            return [calls for calls, channel in self._channels.items() if channel in channels]


def wait_before(failures: int) -> float:
    """Return the seconds before another try to connect."""
    return min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(failures, 10))


def keep_alive(descriptor: int) -> None:
    """Have the system ask a silent connection for signs of life: half of it may be gone without a word."""
    # A UNIX socket has no such thing, and needs none.
    # The copy is closed with the socket that is made of it; the connection keeps its own.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
