"""Which jobs are quarantined because their worker died, and which of them may run at the same time. Pure, no I/O.

After a death nobody knows which of the worker's jobs did it. Most did not, and to run each of them alone takes as long
as all of them together. So a Consumer runs several suspects at once, and no attempt is counted for one of them should
it die again. Those that were running then run alone from there on, one at a time in each Consumer: a job that dies
alone is to blame, and has spent an attempt. One that has run to its end, with others or alone, is a suspect no longer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from sqlaqueue.keys import Key


class Suspect(NamedTuple):
    """A suspect that is to be claimed by its key."""

    key: Key
    alone: bool
    """No other suspect runs meanwhile, so that it is to blame should the worker die."""


class Suspects:
    """The suspects that one run of a Consumer knows, and those that it is running.

    :param at_once: how many may run at the same time: half of the handlers, so that other jobs go on.
    """

    def __init__(self, at_once: int = 1) -> None:
        self.at_once = max(1, at_once)
        self._waiting: dict[Key, bool] = {}
        """The suspects to be claimed by their keys, and whether each has to run alone."""
        self._running: set[Key] = set()
        self._runs_alone = False
        self._lock = threading.Lock()

    def add(self, keys: Iterable[Key], *, together: bool = False) -> None:
        """Remember jobs that are to be claimed one by one.

        :param together: whether other suspects may run meanwhile; a job that has to run alone stays so.
        """
        with self._lock:
            for key in keys:
                self._waiting[key] = not together or self._waiting.get(key, False)

    def remembered(self) -> list[Key]:
        """Return the jobs that wait here to be claimed, each by itself."""
        with self._lock:
            return list(self._waiting)

    @property
    def one_runs(self) -> bool:
        """Whether one is running, or several together."""
        return bool(self._running)

    def begin(self, keys: Iterable[Key]) -> None:
        """Note that suspects have been claimed which run together, or one that runs alone."""
        with self._lock:
            self._running.update(keys)

    def take(self) -> Suspect | None:
        """Return a remembered suspect to claim now; None when there is none, or when it has to wait for others."""
        with self._lock:
            # One that is running may have been found once more: it is locked, and would count as ended too early.
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
            return Suspect(key, alone)

    def end(self, keys: Iterable[Key]) -> bool:
        """Note that jobs are no longer running; return whether a suspect was among them, so that another may run."""
        if not self._running:
            return False
        with self._lock:
            ended = self._running.intersection(keys)
            self._running -= ended
            self._runs_alone &= bool(self._running)
            return bool(ended)
