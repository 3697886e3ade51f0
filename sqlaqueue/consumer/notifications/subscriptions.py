"""What the ears of sync and of async Consumers have in common: who wants to hear what, and patience."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Protocol

from sqlaqueue.payloads import Payload, parse

CHECK = 60.0
"""Seconds after which a silent connection is asked whether it is still there."""

ANSWER = 10.0
"""Seconds for its answer."""

_FIRST_WAIT, _LONGEST_WAIT = 0.2, 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


class Subscriber(Protocol):
    """One who wants to hear: a Consumer, or somebody who waits for the end of a job."""

    def receive(self, payload: Payload) -> None:
        """Take in a notification."""

    def listening_lost(self) -> None:
        """Learn that something may have been missed: the connection is lost, or is another one."""

    def until_overdue(self) -> float:
        """Return the seconds until it is to learn that it has not heard what it counts on; inf when there is none."""
        ...

    def notification_overdue(self) -> None:
        """Learn that."""


class Subscriptions:
    """Those who want to hear what is said on channels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[Subscriber, str] = {}

    def add(self, channel: str, subscriber: Subscriber) -> None:
        """Have ``subscriber`` hear what is said on ``channel``."""
        with self._lock:
            self._channels[subscriber] = channel

    def remove(self, subscriber: Subscriber) -> None:
        """Have ``subscriber`` hear no more."""
        with self._lock:
            self._channels.pop(subscriber, None)

    @property
    def channels(self) -> set[str]:
        """What somebody wants to hear."""
        with self._lock:
            return set(self._channels.values())

    def deliver(self, channel: str, text: str) -> None:
        """Deliver a notification to the subscribers of its channel."""
        payload = parse(text)
        if payload is not None:
            for subscriber in self._of({channel}):
                subscriber.receive(payload)

    def listening_lost(self, channels: set[str]) -> None:
        """Have it proven again that something is heard: the connection is lost, or is another one."""
        for subscriber in self._of(channels):
            subscriber.listening_lost()

    def until_overdue(self) -> float:
        """Return the seconds until somebody has not heard what it counts on."""
        return min([each.until_overdue() for each in self._of(self.channels)], default=float("inf"))

    def report_overdue(self) -> None:
        """Tell those who have not."""
        for subscriber in self._of(self.channels):
            if subscriber.until_overdue() <= 0:
                subscriber.notification_overdue()

    def _of(self, channels: set[str]) -> list[Subscriber]:
        with self._lock:
            return [subscriber for subscriber, channel in self._channels.items() if channel in channels]


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
