"""Which subscriber receives the notifications of which channel."""

from __future__ import annotations

import threading
from typing import Protocol

from sqlaqueue.notify_payloads import Payload, parse


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
