"""How long a job is delayed after a conflict with another transaction: longer each time. Pure, no I/O."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable

from sqlaqueue.queue.run import Key

_FIRST, _LONGEST = 0.1, 30.0
_MOST = 10_000
"""How many jobs are remembered; the counts of older ones begin anew."""

MOST_AT_ONCE = 10
"""After so many runs that ended in a conflict, one counts as an attempt where a job cannot be delayed."""


class ConflictDelays:
    """How many runs of each job in a row were released because of a conflict.

    :param draw: returns numbers from [0, 1): two jobs that conflicted with each other must not meet again.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._times: dict[Key, int] = {}
        self._lock, self._draw = threading.Lock(), draw

    def record(self, key: Key) -> tuple[int, float]:
        """Record a conflict; return how many there have been, and the seconds until the job should run again."""
        with self._lock:
            times = self._times[key] = self._times.pop(key, 0) + 1
            while len(self._times) > _MOST:
                del self._times[next(iter(self._times))]
        longest: float = min(_LONGEST, _FIRST * 2 ** min(times, 10))
        return times, longest * (0.5 + 0.5 * self._draw())

    def clear(self, keys: Iterable[Key]) -> None:
        """Forget the conflicts of jobs whose runs have ended in another way."""
        if self._times:
            with self._lock:
                for key in keys:
                    self._times.pop(key, None)
