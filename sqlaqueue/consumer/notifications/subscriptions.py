"""Which subscriber receives the notifications of which channel, and what both kinds of listeners share."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Protocol

from sqlaqueue.log import fields, logger
from sqlaqueue.notify_payloads import Payload, parse

CHECK_INTERVAL = 60.0
"""Seconds of silence after which a listener checks its connection."""

REPLY_TIMEOUT = 10.0
"""Seconds for the reply to that check."""

_FIRST_DELAY, _MAX_DELAY = 0.2, 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}


class Subscriber(Protocol):
    """Receives the notifications of one channel: the poll schedule of a Consumer, or the state of a waiting caller.

    Its methods are called in the listener's thread or event loop, and must not block.
    """

    def receive(self, payload: Payload) -> None:
        """Handle a notification."""

    def listening_lost(self) -> None:
        """Handle a new or lost connection: notifications may have been missed."""

    def until_overdue(self) -> float:
        """Return the seconds until a notification that it expects is overdue; inf if it expects none."""
        ...

    def notification_overdue(self) -> None:
        """Handle that this time has passed."""


class Subscriptions:
    """The subscribers of one listener, by channel. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[Subscriber, str] = {}

    def add(self, channel: str, subscriber: Subscriber) -> None:
        """Deliver the notifications of ``channel`` to ``subscriber``."""
        with self._lock:
            self._channels[subscriber] = channel

    def remove(self, subscriber: Subscriber) -> None:
        """Deliver nothing more to ``subscriber``."""
        with self._lock:
            self._channels.pop(subscriber, None)

    @property
    def channels(self) -> set[str]:
        """The channels that have subscribers."""
        with self._lock:
            return set(self._channels.values())

    def deliver(self, channel: str, text: str) -> None:
        """Deliver a notification to the subscribers of its channel; one that cannot be parsed is dropped."""
        payload = parse(text)
        if payload is not None:
            for subscriber in self._of({channel}):
                subscriber.receive(payload)

    def listening_lost(self, channels: set[str]) -> None:
        """Report to the subscribers of ``channels`` that notifications may have been missed."""
        for subscriber in self._of(channels):
            subscriber.listening_lost()

    def until_overdue(self) -> float:
        """Return the seconds until a notification is overdue that some subscriber expects."""
        return min([each.until_overdue() for each in self._of(self.channels)], default=float("inf"))

    def report_overdue(self) -> None:
        """Report overdue notifications to the subscribers that expect them."""
        for subscriber in self._of(self.channels):
            if subscriber.until_overdue() <= 0:
                subscriber.notification_overdue()

    def _of(self, channels: set[str]) -> list[Subscriber]:
        with self._lock:
            return [subscriber for subscriber, channel in self._channels.items() if channel in channels]


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
