"""What a process knows about the schedules that it fires. No I/O."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from sqlaqueue.consumer.core.intervals import Intervals
from sqlaqueue.consumer.sessions.isolation_level import IsolationLevel
from sqlaqueue.notify_payloads import Heartbeat, Payload, Signal
from sqlaqueue.schedules.schedule import ScheduleGroup

LONGEST_SLEEP, POLL_INTERVAL = 30.0, 2.0
"""Seconds between two looks at the latest: while notifications arrive, and while they do not."""

_PROOF_INTERVAL = 20.0
"""Seconds after which a process checks again that it receives notifications."""

_FIRST_RETRY, _LONGEST_RETRY = 30.0, 600.0
"""Seconds after which a schedule that could not be fired is tried again, unless a schedule is changed before."""

_AFTER_CHANGE = 2.0
"""Seconds between two tries of a failing schedule, while schedules are changed again and again."""

CLEAN_UP = 3600.0
"""Seconds between two deletions of old ticks."""

_FIRST_LOCKED, _LONGEST_LOCKED = 0.2, 2.0
"""Seconds until the next look while what is due is locked by another process."""


@dataclass
class _Failure:
    """A schedule that could not be fired."""

    failed_at: float
    retry_at: float
    times: int = 1


class GroupState:
    """What a process knows about the schedules in one pair of tables; a subscriber of the channel of schedules.

    :param wake: wakes the routine while it waits.
    """

    def __init__(self, group: ScheduleGroup, wake: Callable[[], object]) -> None:
        self.group, self._wake = group, wake
        self.isolation = IsolationLevel(group.spec)
        self.id = uuid.uuid4().hex
        self.declared = False
        """Whether all schedules of the program have been written, or were kept."""
        self.started = False
        """Whether the database has been checked."""
        self.look_at = 0.0
        """When the next look is due, on a monotonic clock."""
        self.intervals = Intervals(POLL_INTERVAL)
        self.reported: set[str] = set()
        """The schedules that were reported as unknown."""
        self.clean_up_at = time.monotonic() + CLEAN_UP * random.random()  # noqa: S311 - no secret depends on it
        self._failures: dict[str, _Failure] = {}
        self._logged: dict[str, str] = {}
        self._locked = _FIRST_LOCKED
        self._sent, self._received = 0, -1
        """The numbers of the last notification to itself that was sent, and of the last one that was received."""
        self._sent_at: float | None = None
        self._woken = False

    # -- a subscriber ----------------------------------------------------------------------------------------------

    def receive(self, payload: Payload) -> None:
        """Wake up when a schedule was changed."""
        if payload == Signal.POLL:
            self._woken = True
            self._wake()
        elif isinstance(payload, Heartbeat) and payload.consumer.startswith(self.id):
            self._received = int(payload.consumer.rpartition(".")[2])

    def listening_lost(self) -> None:
        """Look at the schedules, as a notification may have been missed."""
        self._received, self._sent_at = -1, None
        self._woken = True
        self._wake()

    def until_overdue(self) -> float:
        """Return how long to wait for a notification: none is waited for."""
        return float("inf")

    def notification_overdue(self) -> None:
        """Do nothing: none is waited for."""

    # -- notifications ---------------------------------------------------------------------------------------------

    def begin_look(self) -> str | None:
        """Return what to notify this process by, if it is time to check that notifications arrive."""
        now = time.monotonic()
        if self._woken:
            self._woken = False
            for failure in self._failures.values():
                failure.retry_at = min(failure.retry_at, failure.failed_at + _AFTER_CHANGE)
        if self._sent_at is not None and now - self._sent_at < (_PROOF_INTERVAL if self.hears else POLL_INTERVAL):
            return None
        self._sent, self._sent_at = self._sent + 1, now
        return f"{self.id}.{self._sent}"

    @property
    def hears(self) -> bool:
        """Whether notifications arrive: the last one that it has sent to itself was received."""
        return self._received == self._sent

    def longest_sleep(self) -> float:
        """Return the seconds until the next look at the latest."""
        return LONGEST_SLEEP if self.hears else POLL_INTERVAL

    # -- failures --------------------------------------------------------------------------------------------------

    @property
    def failing(self) -> list[str]:
        """The schedules that could not be fired, and are left out for a while."""
        now = time.monotonic()
        return sorted(name for name, failure in self._failures.items() if failure.retry_at > now)

    def failed(self, name: str, text: str) -> bool:
        """Leave out a schedule for a while, and for longer each time; return whether the reason is a new one."""
        now, before = time.monotonic(), self._failures.get(name)
        times = 1 if before is None else before.times + 1
        pause = min(_LONGEST_RETRY, _FIRST_RETRY * 2.0 ** min(times - 1, 10))
        self._failures[name] = _Failure(now, now + pause, times)
        is_new = self._logged.get(name) != text
        self._logged[name] = text
        return is_new

    def moved(self, name: str) -> None:
        """Record that a schedule was fired, or planned anew."""
        self._failures.pop(name, None)
        self._logged.pop(name, None)

    def until_retry(self) -> float:
        """Return the seconds until a schedule is tried again; inf without one."""
        now = time.monotonic()
        waiting = [failure.retry_at - now for failure in self._failures.values() if failure.retry_at > now]
        return min(waiting, default=float("inf"))

    def locked_pause(self, *, progress: bool) -> float:
        """Return the seconds until the next look at schedules that are locked: more and more, without progress."""
        self._locked = _FIRST_LOCKED if progress else min(_LONGEST_LOCKED, self._locked * 2)
        return self._locked


class FiringProcess:
    """The schedules that one process fires, and what it needs from the thread or task that does so.

    :param groups: the schedules.
    :param wake: wakes the routine while it waits.
    :param listen: begins to deliver the notifications of an engine's channel of schedules to a :class:`GroupState`.
    :param reset: write the program's definitions even where they were changed at run time.
    """

    def __init__(
        self,
        groups: Sequence[ScheduleGroup],
        wake: Callable[[], object],
        listen: Callable[[sa.Engine, GroupState], object],
        *,
        reset: bool = False,
    ) -> None:
        self.states = [GroupState(group, wake) for group in groups]
        self.listen, self.reset = listen, reset
        self.stopping = False
        self._wake = wake

    def stop(self) -> None:
        """End the routine."""
        self.stopping = True
        self._wake()
