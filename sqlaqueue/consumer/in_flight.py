"""Jobs that workers of this process are running: which ones, since when, in which session. No I/O."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from sqlaqueue.consumer.outcomes import FinishedRun
from sqlaqueue.consumer.pace import FLUSH_AFTER
from sqlaqueue.mapping.runs import runs_of
from sqlaqueue.queue.run import Run

CallGroup = Sequence[Any]
"""The jobs of one call of the handler: one, or all of a batch."""


class LeftBehind(NamedTuple):
    """A run whose process has died, known from the supervisor that watched it: its lease need not expire."""

    run: Run
    error: BaseException | None
    """Why its handler could not end; None if the job is not the reason, so that no attempt counts."""


class KnownDeath(NamedTuple):
    """The death of another process for a job, which this one may claim before the run is settled."""

    error: BaseException
    seconds: float
    """How long the handler had run."""
    worker: str
    attempt: int
    """The number of the attempt."""


class Deaths:
    """What a supervisor tells an isolated Consumer of processes that have died."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.left_behind: Sequence[LeftBehind] = ()
        """Runs that are to be settled before the first claim."""
        self._known: dict[str, tuple[KnownDeath, float]] = {}
        self._now = now

    def add(self, key: str, death: KnownDeath) -> None:
        """Record a death by the key of its job, as a text."""
        self._known[key] = death, self._now() + DEATH_IS_KNOWN

    def take(self, key: str) -> KnownDeath | None:
        """Return the death of the job's last run, once."""
        death, until = self._known.pop(key, (None, 0.0))
        return death if self._now() < until else None


DEATH_IS_KNOWN = 30.0
"""Seconds; a later death of the same job may have another reason."""


def run_of_claimed(job: Any) -> Run:
    return runs_of((job,))[0]


def runs_in(groups: Iterable[CallGroup]) -> list[Run]:
    return runs_of(job for group in groups for job in group)


def has_waited(group: CallGroup, since: float) -> bool:
    """Return whether no job of the group has begun, and all were claimed by that time."""
    return all(run.handler_started_at is None and run.claimed_at <= since for run in runs_of(group))


def groups_except(groups: Iterable[CallGroup], removed: Iterable[CallGroup]) -> deque[CallGroup]:
    gone = {id(group) for group in removed}
    return deque(group for group in groups if id(group) not in gone)


class InFlight:
    """The jobs in the hands of workers, and the Executors that call handlers."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._runs: dict[object, Callable[[], list[Run]]] = {}
        self._executors: set[Any] = set()

    def __bool__(self) -> bool:
        return bool(self._runs)

    def assign(self, owner: object, runs: Callable[[], list[Run]]) -> None:
        """Record that ``owner`` works on claimed jobs; ``runs`` returns those that it still has. The lock is held."""
        self._runs[owner] = runs

    def release(self, owner: object) -> bool:
        """Record that ``owner`` has finished its jobs; return whether it had any. The lock is held."""
        return self._runs.pop(owner, None) is not None

    def clear(self) -> None:
        """Forget all of them; the lock is held."""
        self._runs.clear()

    def runs(self) -> list[Run]:
        with self._lock:
            return [run for runs in self._runs.values() for run in runs()]

    def calls_begin(self, executor: Any) -> None:
        """Record that an executor calls handlers, until :meth:`calls_end`."""
        with self._lock:
            self._executors.add(executor)
            executor.record_pace(time.monotonic())

    def calls_end(self, executor: Any) -> None:
        with self._lock:
            self._executors.discard(executor)
            executor.record_pace(time.monotonic())

    def executors(self) -> list[Any]:
        with self._lock:
            return list(self._executors)

    def busy(self) -> list[Any]:
        with self._lock:
            return [one for one in self._executors if one.group]

    def running(self) -> list[Run]:
        return runs_of(job for one in self.busy() for job in one.group)

    def sessions(self) -> list[Session]:
        """Return the sessions of handlers, without the lock: in a forked child, a missing thread may hold it."""
        return [one.session for one in [*self._executors] if one.session is not None]


_AGAIN_AFTER, _AT_ONCE = 1.0, 3


class CompletionBuffer:
    """Runs that have ended and wait to be settled together with others."""

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
        """Take back runs that could not be settled, except those that are; return whether there are any."""
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
    """Finished runs whose rows another transaction has locked: they are settled later, each by itself."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._runs: list[FinishedRun] = []
        self._at, self._now = 0.0, now

    def add(self, runs: Iterable[FinishedRun]) -> None:
        self._runs += runs
        self._at = self._now() + _AGAIN_AFTER

    def is_due(self, now: float) -> bool:
        return bool(self._runs) and self._at <= now

    def take(self) -> list[FinishedRun]:
        """Return the runs that have waited longest, as many as are tried in a moment."""
        taken, self._runs = self._runs[:_AT_ONCE], self._runs[_AT_ONCE:]
        return taken
