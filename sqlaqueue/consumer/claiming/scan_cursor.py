"""From where a claim scans the queue: from its head, or from where the last claim ended. Pure, no I/O.

Claimed jobs leave dead entries at the head of the index. As long as an old snapshot may see them they cannot be
removed, and each scan from the head reads all of them again, so a claim may begin at a cursor, where the last one
ended. Such a claim misses jobs before the cursor: a late commit, a retry, a more urgent job. So some claims scan from
the head: at least every few seconds, and more often as long as reading the dead entries takes no more than a twentieth
of the time. While the head has no dead entries, each claim scans it unless another worker is doing so.

Other queues call this the low-water mark; here each consumer has its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 4.5
"""Seconds for which jobs before the cursor may be missed: one scan has just passed them, the next one finds them."""

_SHARE, _PAUSE = 20.0, 1.0
_NOISE, _SHORTEST = 1.1, 0.0005
_RISE, _RISE_AT_HEAD = 0.2, 0.005

Cursor = Mapping[str, Any]
"""The position of a job in the claim order, as the parameters of a statement."""


class ScanCursor:
    """The cursor of one consumer's claims.

    :param now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._cursor: Cursor | None = None
        self._head_due = 0.0
        self._head_scan_took = 0.0
        """The seconds of the last scan from the head."""
        self._found = 0
        """How many jobs the last claim found, when it found as many as it might take."""
        self._usual = 0.0
        """The seconds of a claim of so many jobs without dead entries."""

    def begin(self) -> Cursor | None:
        """Return the cursor to claim from. None means from the head; one worker at a time rescans it."""
        with self._lock:
            now = self._now()
            if self._cursor is not None and now < self._head_due:
                return self._cursor
            # Other workers use the cursor until this scan ends, as they would read the same dead entries. If it fails,
            # claimed() is not called: then the next scan is due after this time.
            self._head_due = now + min(max(_PAUSE, 3 * self._head_scan_took), LONGEST)
            return None

    def claimed(self, began_at: Cursor | None, cursor: Cursor | None, found: int, took: float) -> None:
        """Record the result of a claim.

        :param began_at: what :meth:`begin` returned.
        :param cursor: the position of its last job; None when it found fewer jobs than it might take.
        :param found: how many jobs it found.
        :param took: its seconds.
        """
        with self._lock:
            if began_at is None:
                self._head_scan_took = took
            if cursor is None or found != self._found:
                # It takes two full claims in a row to recognize a backlog.
                self._cursor, self._found, self._usual = None, found if cursor is not None else 0, took
                self._head_due = 0.0
                return
            self._cursor = cursor
            # A quick claim met no dead entries; a slow one may have, or the server is busy.
            rise = _RISE_AT_HEAD if began_at is None else _RISE
            self._usual += (took - self._usual) * (1.0 if took < self._usual else rise)
            if began_at is None:
                extra = took - _NOISE * self._usual - _SHORTEST
                # A scan returns what it found when it ends, and the next one takes as long again.
                longest = max(LONGEST - 2 * took, _PAUSE)
                self._head_due = self._now() + min(longest, _SHARE * max(extra, 0.0))
