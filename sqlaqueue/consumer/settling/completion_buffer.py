"""Runs that have ended and are not settled yet: they wait to be settled together with others. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from sqlaqueue.consumer.claiming.batch_sizer import FLUSH_AFTER
from sqlaqueue.consumer.settling.outcomes import FinishedRun
from sqlaqueue.queue.run import Run

_AGAIN_AFTER, _AT_ONCE = 1.0, 3


class CompletionBuffer:
    """The finished runs of one consumer.

    :param lock: the lock of the consumer's shared state.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._finished: list[FinishedRun] = []
        self._settling: set[FinishedRun] = set()
        self._since: float | None = None
        self.postponed = PostponedRuns()
        """Runs that are being settled and whose rows another transaction has locked."""

    def __bool__(self) -> bool:
        return bool(self._finished or self._settling)

    @property
    def is_settling(self) -> bool:
        """Whether runs are being settled."""
        return bool(self._settling)

    def add(self, finished: Sequence[FinishedRun]) -> None:
        """Add runs that are to be settled together with others; the lock is held."""
        if finished and not self._finished:
            self._since = time.monotonic()
        self._finished += finished

    def take(self) -> list[FinishedRun]:
        """Return the runs to settle now; they stay here until the result is known."""
        with self._lock:
            finished, self._finished, self._since = self._finished, [], None
            self._settling.update(finished)
            return finished

    def put_back(self, finished: Sequence[FinishedRun]) -> bool:
        """Take runs back that could not be settled, to try again, and return whether there are any.

        Runs that were settled before the error stay settled.
        """
        with self._lock:
            unsettled = [one for one in finished if one in self._settling]
            self._settling.difference_update(unsettled)
            self._finished = [*unsettled, *self._finished]
            if unsettled:
                self._since = self._since or time.monotonic()
            return bool(unsettled)

    def settled(self, finished: Iterable[FinishedRun]) -> None:
        """Forget runs that are settled; the lock is held."""
        self._settling.difference_update(finished)

    def runs(self) -> list[Run]:
        """Return the runs here; the lock is held."""
        return [one.run for one in (*self._finished, *self._settling)]

    def waiting_since(self) -> float | None:
        """Return since when the first finished run waits; None without any."""
        return self._since

    def is_overdue(self, now: float) -> bool:
        """Return whether runs have waited so long that no worker seems to come by to settle them."""
        return self._since is not None and now - self._since >= 4 * FLUSH_AFTER


class PostponedRuns:
    """Finished runs whose rows another transaction has locked: they are settled later, each by itself.

    :param now: the clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._runs: list[FinishedRun] = []
        self._at, self._now = 0.0, now

    def add(self, runs: Iterable[FinishedRun]) -> None:
        """Add runs, to be tried after a while."""
        self._runs += runs
        self._at = self._now() + _AGAIN_AFTER

    def is_due(self, now: float) -> bool:
        """Return whether it is time to try."""
        return bool(self._runs) and self._at <= now

    def take(self) -> list[FinishedRun]:
        """Return the runs that have waited longest, as many as are tried in a moment."""
        taken, self._runs = self._runs[:_AT_ONCE], self._runs[_AT_ONCE:]
        return taken
