"""Which other consumers of the queue are listening, and whether notifications arrive here. Pure, no I/O."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable

PROOF_TIMEOUT = 5.0
"""Seconds within which a consumer receives its own heartbeat; else notifications do not arrive."""


_MOST_GONE = 1_000

_LOOK_AGAIN = 5.0
"""Seconds from one look into the table to the next one for a heartbeat of a consumer that it has not found."""


class Peers:
    """The listening consumers of a queue, as one of them sees the others.

    It begins as not listening; once it has received its own heartbeat, it knows that notifications arrive.

    Every role of the database can send notifications. So a heartbeat adds no consumer that the own look into the table
    has not found: with many more of them this one would poll once a minute, and wait for others that do not exist. It
    makes this one look again.

    :param me: the id of this consumer.
    :param now: the clock.
    """

    def __init__(self, me: str, now: Callable[[], float] = time.monotonic) -> None:
        self._me, self._now, self._lock = me, now, threading.Lock()
        self._found: set[str] = set()
        """The others that the last heartbeat has found in the table."""
        self._gone: set[str] = set()
        """Who has ended since the last heartbeat began."""
        self._notified_at: float | None = None
        self._received_own_at: float | None = None
        self._received_at = self._heartbeat_at = float("-inf")
        self.subscribed = False
        """A listener is subscribed for this consumer, so that it should receive its own heartbeats."""
        self.wants_heartbeat = False
        """Whether to send a heartbeat at once, to test a new connection."""
        self._has_unknown = False

    @property
    def listening(self) -> bool:
        """Whether notifications are known to arrive."""
        return self._received_own_at is not None

    @property
    def count(self) -> int:
        """How many consumers of this queue are listening, this one among them."""
        return len(self._others) + 1

    @property
    def _others(self) -> set[str]:
        return self._found - self._gone

    @property
    def rank(self) -> int:
        """The place of this consumer among those that are listening, from 0: the first few do what one does for all."""
        with self._lock:
            return sorted([*self._others, self._me]).index(self._me) if self.listening else 0

    def place_for(self, announcement: str) -> int:
        """Return the place of this consumer in the order for an announcement, on which all of them agree."""
        with self._lock:
            ring = sorted([*self._others, self._me])
        return (ring.index(self._me) - zlib.crc32(announcement.encode())) % len(ring)

    # -- what is received ------------------------------------------------------------------------------------------

    def received(self) -> None:
        """Record that a notification has arrived."""
        self._received_at = self._now()

    def received_heartbeat(self, consumer: str) -> bool:
        """Record a heartbeat; return whether the maintenance loop has to know.

        That is if it is this consumer's own, and the first by this connection, or the first of an unknown one.
        """
        with self._lock:
            if consumer != self._me:
                self._gone.discard(consumer)
                had_unknown, self._has_unknown = self._has_unknown, self._has_unknown or consumer not in self._found
                return self._has_unknown and not had_unknown
            first = not self.listening
            self._received_own_at = self._now()
            return first

    def deregistered(self, consumer: str) -> None:
        """Record that a consumer has ended."""
        with self._lock:
            # Of others there may be any number of forged ones.
            if consumer in self._found or len(self._gone) < _MOST_GONE:
                self._gone.add(consumer)

    def connection_lost(self) -> None:
        """Forget that notifications arrive, as when the connection that they come by is lost."""
        with self._lock:
            self._received_own_at = self._notified_at = None
            self.wants_heartbeat = True

    # -- heartbeats ------------------------------------------------------------------------------------------------

    def begin_heartbeat(self, *, news: bool) -> bool:
        """Record that a heartbeat is about to be sent, and return whether to notify the channel of it.

        The channel need not be notified if there is no news, and this consumer has received a notification since its
        last heartbeat: this proves that notifications arrive.

        :param news: whether this is the first heartbeat, or listening has begun or ended since the last one.
        """
        with self._lock:
            self._gone.clear()
            self.wants_heartbeat = self._has_unknown = False
            now = self._now()
            notify = news or not self.listening or self._received_at < self._heartbeat_at
            if notify and self.subscribed and (self._notified_at is None or self.listening):
                self._notified_at = now
            self._heartbeat_at = now
            return notify

    def heartbeat_sent(self, listening: Iterable[str]) -> None:
        """Record which consumers are listening, as the heartbeat has found in the table."""
        with self._lock:
            # The query may have found a consumer that has deregistered since.
            self._found = set(listening) - {self._me}

    def until_look(self) -> float:
        """Return the seconds until the next heartbeat, as it looks for unknown consumers; inf if there are none."""
        with self._lock:
            return self._heartbeat_at + _LOOK_AGAIN - self._now() if self._has_unknown else float("inf")

    def until_proof(self) -> float:
        """Return the seconds until a heartbeat should have been received, negative when it is missing."""
        with self._lock:
            if self._notified_at is None or (self._received_own_at or float("-inf")) >= self._notified_at:
                return float("inf")
            return self._notified_at + PROOF_TIMEOUT - self._now()
