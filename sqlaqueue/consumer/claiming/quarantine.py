"""Which jobs are quarantined because their worker died, and which of them may run at the same time. Pure, no I/O.

After a worker died it is unknown which of its jobs caused the death. Most did not, and running them one by one would
take long. So a consumer first runs several quarantined jobs at once. If their worker dies, no attempt counts, and these
jobs are run alone from then on, one at a time in each consumer. A job whose worker dies while the job runs alone is
responsible, and the attempt counts. A job that has run to its end, alone or with others, leaves the quarantine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from sqlaqueue.queue.run import Key


class QuarantinedJob(NamedTuple):
    """A quarantined job that is to be claimed by its key."""

    key: Key
    alone: bool
    """No other quarantined job runs meanwhile, so this one is responsible should the worker die."""


class Quarantine:
    """The quarantined jobs that one run of a consumer knows of, and those that it is running.

    :param at_once: how many may run at the same time: half of the handlers, so that other jobs go on.
    """

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = max(1, at_once)
        self.may_wait = True
        """Quarantined jobs may wait in the table: at the start, and whenever jobs may have been rescued."""
        self.claimed_last = False
        """The last claim took a quarantined job, so that the next one is for the others."""
        self._waiting: dict[Key, bool] = {}
        """The jobs to be claimed by their keys, and whether each has to run alone."""
        self._running: set[Key] = set()
        self._runs_alone = False
        self._lock = threading.Lock()

    def add(self, keys: Iterable[Key], *, together: bool = False) -> None:
        """Remember jobs that are to be claimed one by one.

        :param together: whether other quarantined jobs may run meanwhile; a job that has to run alone stays so.
        """
        with self._lock:
            for key in keys:
                self._waiting[key] = not together or self._waiting.get(key, False)

    def waiting(self) -> list[Key]:
        """Return the jobs that are to be claimed by their keys."""
        with self._lock:
            return list(self._waiting)

    @property
    def is_running(self) -> bool:
        """Whether a quarantined job is running, or several together."""
        return bool(self._running)

    def begin(self, keys: Iterable[Key]) -> None:
        """Record that quarantined jobs have been claimed: several that run together, or one that runs alone."""
        with self._lock:
            self._running.update(keys)

    def take(self) -> QuarantinedJob | None:
        """Return a job to claim now; None when there is none, or when it has to wait for others."""
        with self._lock:
            # A running job may have been added again. A claim would not get it, as it is locked, and end() would then
            # record that it no longer runs.
            waiting = [key for key in self._waiting if key not in self._running]
            if self._runs_alone or not waiting:
                return None
            key = next((key for key in waiting if not self._waiting[key]), waiting[0])
            alone = self.at_once == 1 or self._waiting[key]
            if len(self._running) >= (1 if alone else self.at_once):
                return None
            del self._waiting[key]
            self._running.add(key)
            self._runs_alone = alone
            return QuarantinedJob(key, alone)

    def end(self, keys: Iterable[Key]) -> bool:
        """Record that jobs no longer run; return whether a quarantined one was among them, so that another may run."""
        if not self._running:
            return False
        with self._lock:
            ended = self._running.intersection(keys)
            self._running -= ended
            self._runs_alone &= bool(self._running)
            return bool(ended)
