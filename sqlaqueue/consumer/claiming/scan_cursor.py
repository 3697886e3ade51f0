"""From where a claim scans the queue: from its head, or from where the last claim ended. Pure, no I/O.

What has been claimed leaves dead entries at the head of the index. As long as some old transaction might still see them
they cannot be removed, and each scan from the head reads them all again. So a claim may begin where the last one ended.
It misses what lies before that: a late commit, a retry, a more urgent job. So the others look from the head, and
how many do is measured: looks from the head may cost a twentieth of the time more than claims without them would.
While the head is clean, each claim looks there that finds no other one doing so.

It is the low-water mark that other queues keep, here kept by each Consumer by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 4.5
"""Seconds for which what lies before the mark may be missed: one look has just passed over it, the next one has it."""

_SHARE, _REST = 20.0, 1.0
_NOISE, _SHORTEST = 1.1, 0.0005
_RISE, _RISE_AT_HEAD = 0.2, 0.005

Mark = Mapping[str, Any]
"""The position of a job in the claim order, as the parameters of a statement."""


class Bearings:
    """Where one Consumer claims.

    :param now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._mark: Mark | None = None
        self._head_due = 0.0
        self._look_took = 0.0
        """The seconds of the last look from the head."""
        self._found = 0
        """How many jobs the last claim has found, when that was as many as it might take."""
        self._usual = 0.0
        """The seconds of a claim of so many jobs, as long as nothing dead is in its way."""

    def begin(self) -> Mark | None:
        """Return the mark to claim from; None to claim from the head, as one at a time does who could do otherwise."""
        with self._lock:
            now = self._now()
            if self._mark is not None and now < self._head_due:
                return self._mark
            # Until it is known what this look has come to, others would meet the same dead entries. It may also fail.
            self._head_due = now + min(max(_REST, 3 * self._look_took), LONGEST)
            return None

    def claimed(self, began_at: Mark | None, mark: Mark | None, found: int, took: float) -> None:
        """Note what a claim has come to.

        :param began_at: what it was told by :meth:`begin`.
        :param mark: the position of its last job; None when it has found less than it might take.
        :param found: how many jobs it has found.
        :param took: its seconds.
        """
        with self._lock:
            if began_at is None:
                self._look_took = took
            if mark is None or found != self._found:
                # It takes two claims in a row to see a backlog.
                self._mark, self._found, self._usual = None, found if mark is not None else 0, took
                self._head_due = 0.0
                return
            self._mark = mark
            # What is quick has nothing in its way; what is slow may have, or the server is busy.
            rise = _RISE_AT_HEAD if began_at is None else _RISE
            self._usual += (took - self._usual) * (1.0 if took < self._usual else rise)
            if began_at is None:
                extra = took - _NOISE * self._usual - _SHORTEST
                # A look tells what it has found when it ends, and the next one takes as long again.
                longest = max(LONGEST - 2 * took, _REST)
                self._head_due = self._now() + min(longest, _SHARE * max(extra, 0.0))
