"""The jobs for which callers of :func:`sqlaqueue.wait` wait, so that a Consumer notifies them and sends nothing else.

No I/O. A lost entry delays a caller, who also reads the row now and then; it loses no result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

RETENTION = 60.0
"""Seconds for which a job is kept after a caller announced that it waits for it."""

MAX_JOBS = 10_000
"""How many jobs are kept at most, the ones announced last."""


class WaiterRegistry:
    """The jobs for which callers wait, of one run of a Consumer.

    :param now: the clock.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._until: dict[str, float] = {}
        """When each job is forgotten, in the order of their announcements."""

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, jobs: Sequence[str]) -> None:
        """Keep jobs for which a caller waits.

        :param jobs: the texts of their keys.
        """
        now = self._now()
        with self._lock:
            for job in jobs:
                # Removed first: a dict keeps the place of a key that is set again.
                self._until.pop(job, None)
                self._until[job] = now + RETENTION
            for job in list(self._until)[: max(0, len(self._until) - MAX_JOBS)]:
                del self._until[job]

    def take(self, jobs: Collection[str]) -> list[str]:
        """Remove jobs, and return those for which a caller waits."""
        now = self._now()
        with self._lock:
            return [job for job in jobs if self._until.pop(job, now) > now]
