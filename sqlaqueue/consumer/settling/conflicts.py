"""How long jobs wait that the database has told to try again: longer each time. Pure, no I/O."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from sqlaqueue.keys import Key

_FIRST, _LONGEST = 0.1, 30.0
_AGAIN_AFTER, _AT_ONCE = 1.0, 3
_MOST = 10_000
"""How many jobs are remembered; of those that were in a conflict before them the count begins anew."""

MOST_AT_ONCE = 10
"""After so many runs that ended in a conflict, one counts as an attempt where a job cannot be held back."""


class Conflicts:
    """How often each job was given back in a row since it met a conflict with another transaction.

    :param draw: returns numbers from [0, 1): two jobs that were in each other's way must not meet again.
    """

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._times: dict[Key, int] = {}
        self._lock, self._draw = threading.Lock(), draw

    def meet(self, key: Key) -> tuple[int, float]:
        """Note a conflict; return how often there has been one, and the seconds until the job should run again."""
        with self._lock:
            times = self._times[key] = self._times.pop(key, 0) + 1
            while len(self._times) > _MOST:
                del self._times[next(iter(self._times))]
        longest: float = min(_LONGEST, _FIRST * 2 ** min(times, 10))
        return times, longest * (0.5 + 0.5 * self._draw())

    def over(self, keys: Iterable[Key]) -> None:
        """Note that runs have ended in another way."""
        if self._times:
            with self._lock:
                for key in keys:
                    self._times.pop(key, None)


class Postponed:
    """Runs that have ended and could not be settled, for somebody held their rows: they are tried again, by themselves.

    :param now: the clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._runs: list[Any] = []
        self._at, self._now = 0.0, now

    def add(self, runs: Iterable[Any]) -> None:
        """Take in some, to be tried after a while."""
        self._runs += runs
        self._at = self._now() + _AGAIN_AFTER

    def is_due(self, now: float) -> bool:
        """Return whether it is time to try."""
        return bool(self._runs) and self._at <= now

    def take(self) -> list[Any]:
        """Return the runs that have waited longest, not more than are tried in a moment."""
        taken, self._runs = self._runs[:_AT_ONCE], self._runs[_AT_ONCE:]
        return taken
