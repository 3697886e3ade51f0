"""The order in which a Consumer serves the shards of a distributed table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlaqueue.queue.options import Distribution

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
"""For how many seconds claims leave out a shard whose server did not answer: longer each time."""


class ShardTurns:
    """Round robin over the values of a :class:`~sqlaqueue.Distribution`.

    A claim begins with the value after the last one that had jobs, and leaves out those whose server is away: their
    errors would end each claim. Threads may claim at once: each change is atomic, and two claims that begin with the
    same value leave each other's jobs alone.

    :param now: the clock.
    """

    def __init__(self, distribution: Distribution, now: Callable[[], float] = time.monotonic) -> None:
        self._distribution, self._now = distribution, now
        self._last: Any = None
        self._away: dict[Any, tuple[float, float]] = {}
        """By value, until when it is left out, and the length of that pause."""

    def begin(self) -> list[Any]:
        """Return the values that this claim tries, in their order; if all are away, all of them."""
        values, last = self._distribution.current_values(), self._last
        after = values.index(last) + 1 if last in values else 0
        in_turn = values[after:] + values[:after]
        if not self._away:
            return in_turn
        away, now = dict(self._away), self._now()
        return [value for value in in_turn if value not in away or away[value][0] <= now] or in_turn

    def claimed(self, value: Any, number: int) -> None:
        """Record that a claim has found a number of jobs with this value."""
        if self._away:
            self._away.pop(value, None)
        if number:
            self._last = value

    def failed(self, value: Any) -> None:
        """Record that a claim of this value has failed."""
        _, pause = self._away.get(value, (0.0, _FIRST_PAUSE / 2))
        pause = min(2 * pause, _LONGEST_PAUSE)
        self._away[value] = self._now() + pause, pause
