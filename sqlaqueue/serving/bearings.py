"""From where a claim scans the queue: from its head, or from where the last claim ended. Pure, no I/O.

What has been claimed leaves dead entries at the head of the index. As long as some old transaction might still see them
they cannot be removed, and each scan from the head reads them all again. So a claim may begin where the last one ended.
It misses what lies before that: a late commit, a retry, a more urgent job. So the others look from the head, and
how many do is measured: looks from the head may cost a twentieth of the time more than claims without them would.
While the head is clean, nearly every claim looks there.

It is the low-water mark that other queues keep, here kept by each Consumer by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 3.0
"""Seconds for which what lies before the mark may be missed, at most."""

_SHARE = 20.0
_BETWEEN_TRIALS = 1.0
_SMOOTHING = 0.3

Mark = Mapping[str, Any]
"""The position of a job in the claim order, as the parameters of a statement."""


class Bearings:
    """Where one Consumer claims.

    :param now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._mark: Mark | None = None
        self._head_due = self._trial_due = 0.0
        self._usual: float | None = None
        """The seconds that a claim from the mark takes."""

    def begin(self) -> Mark | None:
        """Return the mark to claim from; None to claim from the head."""
        with self._lock:
            now = self._now()
            if self._mark is not None and now >= self._trial_due:
                # However clean the head is: what a claim would cost without it has to be known.
                self._trial_due = now + _BETWEEN_TRIALS
                return self._mark
            return self._mark if now < self._head_due else None

    def claimed(self, began_at: Mark | None, mark: Mark | None, took: float) -> None:
        """Note what a claim has come to.

        :param began_at: what it was told by :meth:`begin`.
        :param mark: the position of its last job; None when it has found all there was.
        :param took: its seconds.
        """
        with self._lock:
            now = self._now()
            self._mark = mark
            if began_at is not None:
                known = took if self._usual is None else self._usual
                self._usual = known + _SMOOTHING * (took - known)
            else:
                extra = took - (took if self._usual is None else self._usual)
                self._head_due = now + min(LONGEST, _SHARE * max(extra, 0.0))
