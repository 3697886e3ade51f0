"""The intervals of a consumer, with jitter: polls, heartbeats, rescues and other maintenance. Pure, no I/O."""

from __future__ import annotations

import random
from collections.abc import Callable

EXTENSIONS_PER_LEASE = 3
"""How many times a lease is extended within its duration, so that one failed extension does no harm."""

RESCUE = 3.0
"""Seconds between rescues of expired leases; a job whose worker died waits for its lease and one of these."""

RECONCILE = 30.0
"""Seconds between comparisons of a message table with its job table, at least."""

HEARTBEAT = 10.0
"""Seconds between heartbeats of a consumer, at least."""

RETENTION = 60.0
"""Seconds between deletions of old finished jobs."""

LONGEST_WAIT, SHORTEST_WAIT = 30.0, 5.0
"""Seconds for which a Consumer waits for the database at most; with a short lease less, but not less than the second:
a busy server would lose its connections."""

CONNECT_TIMEOUT = 10
"""Seconds for a new connection, where the engine has no timeout of its own. Drivers would wait for a minute or more."""

_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 3.0
_SHORTEST_PAUSE = 0.05


def longest_wait(lease: float) -> float:
    """Return the seconds for which a Consumer waits for the database at most, before it gives its connection up.

    :param lease: the seconds of a lease. What takes longer than two comes too late, whatever the reply.
    """
    return min(LONGEST_WAIT, max(SHORTEST_WAIT, 2 * lease))


class Intervals:
    """How long a consumer waits before it polls, tries again or runs a maintenance task.

    Every interval has jitter, so that consumers that started together do not run in step.

    :param poll_interval: seconds between polls of an empty queue.
    :param draw: returns numbers from [0, 1), for jitter.
    """

    def __init__(self, poll_interval: float, draw: Callable[[], float] = random.random) -> None:
        self.poll_interval = poll_interval
        self._draw = draw
        self.failures = 0
        """How many tries in a row have failed since the database answered."""

    def poll(self) -> float:
        """Return the seconds until the next poll of an empty queue."""
        return self.poll_interval * (0.9 + 0.2 * self._draw())

    def failed(self) -> float:
        """Record that the database did not answer; return the seconds until the next try.

        The cap bounds how long a consumer stays away after the database is back.
        """
        self.failures += 1
        longest: float = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(self.failures, 10))
        return longest * (0.5 + 0.5 * self._draw())

    def succeeded(self) -> None:
        """Record that the database answered."""
        self.failures = 0

    def heartbeat(self, peers: int) -> float:
        """Return the seconds until the next heartbeat: the more consumers there are, the less often each sends one."""
        return max(HEARTBEAT, float(peers)) * (0.8 + 0.4 * self._draw())

    def rescue(self, rank: int) -> float:
        """Return the seconds until the next rescue of a consumer, unless another one rescues before.

        :param rank: its place among the listening consumers. The last ones follow closely after the first, since the
            first ones may have died.
        """
        return RESCUE * (1 + min(rank, 15) * 0.02 + 0.01 * self._draw())

    def cancellations(self) -> float:
        """Return the seconds until the next query for requests to cancel running jobs."""
        return RESCUE * (0.8 + 0.4 * self._draw())

    def reconcile(self, took: float) -> float:
        """Return the seconds until the next reconciliation, which may take one hundredth of the time."""
        return max(RECONCILE, 100 * took) * (0.9 + 0.2 * self._draw())

    def retention(self) -> float:
        """Return the seconds until the next deletion of old finished jobs."""
        return RETENTION * (0.9 + 0.2 * self._draw())

    def between_batches(self, took: float) -> float:
        """Return the seconds between two batches of a deletion, which may take a fifth of the time."""
        return max(_SHORTEST_PAUSE, 4 * took)

    def between_ranges(self, took: float, *, found: bool) -> float:
        """Return the seconds between two ranges of a reconciliation.

        It may take a twentieth of the time: it begins when a consumer starts, and waiting jobs should not notice it.

        :param found: whether something was repaired: then jobs without a message may wait in the next range as well.
        """
        return self.between_batches(took) if found else max(_SHORTEST_PAUSE, 19 * took)
