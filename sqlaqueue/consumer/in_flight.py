"""Jobs that workers of this process are running: which ones, since when, in which session. No I/O."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming.job_buffer import CallGroup, runs_of
from sqlaqueue.queue.run import Key, Run


class RunningExecutor(Protocol):
    """What is asked of an :class:`~sqlaqueue.consumer.executing.executor.Executor` from outside."""

    group: CallGroup
    started: float
    session: Session | None
    timed_out: bool
    abandoned: bool
    cancelled: set[Key]
    interrupt: Callable[[], object]

    def record_pace(self, now: float) -> None: ...  # noqa: D102 - documented in Executor
    def waiting_groups(self) -> list[CallGroup]: ...  # noqa: D102 - as above
    def remove(self, groups: Sequence[CallGroup]) -> None: ...  # noqa: D102 - as above
    def take_waiting(self) -> list[CallGroup]: ...  # noqa: D102 - as above
    def waiting_taken(self) -> None: ...  # noqa: D102 - as above


class InFlight:
    """The jobs in the hands of workers, and the executors that call handlers.

    :param lock: the lock of the consumer's shared state.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._runs: dict[object, Callable[[], list[Run]]] = {}
        self._executors: set[RunningExecutor] = set()

    # -- jobs that a worker has taken ------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._runs)

    def assign(self, owner: object, runs: Callable[[], list[Run]]) -> None:
        """Record that ``owner`` works on claimed jobs; the lock is held.

        :param runs: returns those runs that it still has.
        """
        self._runs[owner] = runs

    def release(self, owner: object) -> bool:
        """Record that ``owner`` has finished its jobs; return whether it had any. The lock is held."""
        return self._runs.pop(owner, None) is not None

    def clear(self) -> None:
        """Forget all of them; the lock is held."""
        self._runs.clear()

    def runs(self) -> list[Run]:
        """Return the runs that workers have taken and not finished."""
        with self._lock:
            return [run for runs in self._runs.values() for run in runs()]

    # -- handlers that run -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, executor: RunningExecutor) -> Iterator[None]:
        """Record that an executor calls the handler, until the block ends."""
        with self._lock:
            self._executors.add(executor)
            executor.record_pace(time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._executors.discard(executor)
                executor.record_pace(time.monotonic())

    def executors(self) -> list[RunningExecutor]:
        """Return the executors that call handlers, between two calls as well."""
        with self._lock:
            return list(self._executors)

    def busy(self) -> list[RunningExecutor]:
        """Return the executors whose handler runs now."""
        with self._lock:
            return [one for one in self._executors if one.group]

    def running(self) -> list[Run]:
        """Return the runs whose handler runs now."""
        return runs_of(job for one in self.busy() for job in one.group)

    def sessions(self) -> list[Session]:
        """Return the sessions of handlers, without the lock: in a forked child, a missing thread may hold it."""
        return [one.session for one in [*self._executors] if one.session is not None]
