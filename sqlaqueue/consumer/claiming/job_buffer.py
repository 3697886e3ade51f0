"""Claimed jobs that wait for a worker of this process, in call groups. No I/O."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.run import Run

CallGroup = Sequence[Any]
"""The jobs of one call of the handler: one, or all of a batch."""


def run_of_claimed(job: Any) -> Run:
    """Return the run for which a claim returned ``job``."""
    run = run_of(job)
    if run is None:  # pragma: no cover - the claim's load event sets it
        raise RuntimeError(job)
    return run


def runs_of(jobs: Iterable[Any]) -> list[Run]:
    """Return the runs for which claims returned ``jobs``."""
    return [run_of_claimed(job) for job in jobs]


def runs_in(groups: Iterable[CallGroup]) -> list[Run]:
    """Return the runs of the jobs in call groups."""
    return [run_of_claimed(job) for group in groups for job in group]


def has_waited(group: CallGroup, since: float) -> bool:
    """Return whether no job of the group has begun, and all were claimed by that time."""
    return all(run.handler_started_at is None and run.claimed_at <= since for run in runs_of(group))


def groups_except(groups: Iterable[CallGroup], removed: Iterable[CallGroup]) -> deque[CallGroup]:
    """Return ``groups`` without those that are removed."""
    gone = {id(group) for group in removed}
    return deque(group for group in groups if id(group) not in gone)


class JobBuffer:
    """The claimed jobs of one consumer that no worker has taken yet, detached from any session.

    :param lock: the lock of the consumer's shared state.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._groups: deque[CallGroup] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Iterable[CallGroup]) -> None:
        """Add call groups."""
        with self._lock:
            self._groups.extend(groups)

    def take(self) -> CallGroup:
        """Return the next call group; empty when there is none."""
        with self._lock:
            return self._groups.popleft() if self._groups else []

    def groups(self) -> list[CallGroup]:
        """Return the call groups, which stay here."""
        with self._lock:
            return list(self._groups)

    def remove(self, groups: Iterable[CallGroup]) -> None:
        """Remove call groups that are released."""
        with self._lock:
            self._groups = groups_except(self._groups, groups)

    def clear(self) -> list[Run]:
        """Forget all jobs, and return their runs."""
        with self._lock:
            runs = runs_in(self._groups)
            self._groups.clear()
            return runs
