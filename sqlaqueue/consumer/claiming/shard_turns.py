"""The order in which a Consumer serves the shards of a distributed table."""

from __future__ import annotations

from typing import Any

from sqlaqueue.queue.distribution import Distribution


class ShardTurns:
    """Round robin over the values of a :class:`~sqlaqueue.Distribution`.

    A claim begins with the value after the last one that had jobs, or whose server did not answer. Threads may claim at
    once: assigning the last value is atomic, and two claims that begin with the same value leave each other's jobs
    alone.
    """

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._last: Any = None

    def begin(self) -> list[Any]:
        """Return all values, in the order in which this claim tries them."""
        values, last = self._distribution.current_values(), self._last
        after = values.index(last) + 1 if last in values else 0
        return values[after:] + values[:after]

    def served(self, value: Any) -> None:
        """Record that a claim has found jobs with this value, or has failed."""
        self._last = value
