"""Who waits for the end of which job: what waiters and Consumers say to each other about it. Pure, no I/O.

A Consumer remembers for a while for whom
somebody waits, and says so when such a job ends; of all others it says nothing. Both are hints: a waiter looks at the
row, and looks again now and then, whatever it hears.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

REMEMBERED = 60.0
"""Seconds for which a Consumer remembers that somebody waits for a job."""

MOST = 10_000
"""How many jobs it remembers; who waits for another one finds its end by looking."""


class WaiterRegistry:
    """The memory of a Consumer: for which jobs somebody waits.

    :param now: the clock.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._until: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, names: Sequence[str]) -> None:
        """Remember that a caller waits for these jobs."""
        now = self._now()
        with self._lock:
            for name in names:
                # Anew, and so at the end: the first ones are those that were announced longest ago.
                self._until.pop(name, None)
                self._until[name] = now + REMEMBERED
            for name in list(self._until)[: max(0, len(self._until) - MOST)]:
                del self._until[name]

    def take(self, names: Collection[str]) -> list[str]:
        """Return those of ``names`` for whose end somebody waits, and forget them."""
        now = self._now()
        with self._lock:
            return [name for name in names if self._until.pop(name, now) > now]
