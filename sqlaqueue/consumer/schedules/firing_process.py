"""What a process knows about the schedules that it fires. No I/O."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence

import sqlalchemy as sa

from sqlaqueue.consumer.core.intervals import Intervals
from sqlaqueue.consumer.sessions.isolation_level import IsolationLevel
from sqlaqueue.notify_payloads import Heartbeat, Payload, Signal
from sqlaqueue.schedules.group import ScheduleGroup

LONGEST_SLEEP, POLL_INTERVAL = 30.0, 2.0
"""Seconds between two looks at the latest: while notifications arrive, and while they do not."""

_RETRY_AFTER = 30.0
"""Seconds after which a schedule that could not be fired is tried again, unless it is changed before."""

CLEAN_UP = 3600.0
"""Seconds between two deletions of old ticks."""


class FiringProcess:
    """What one process knows about its schedules; a subscriber of the channel of schedules.

    :param groups: the schedules.
    :param isolation: the isolation level of the sessions.
    :param wake: wakes the routine while it waits.
    :param listen: begins to deliver the notifications of an engine's channel of schedules to this object.
    :param reset: write the program's definitions even where they were changed at run time.
    """

    def __init__(
        self,
        groups: Sequence[ScheduleGroup],
        isolation: IsolationLevel,
        wake: Callable[[], object],
        listen: Callable[[sa.Engine], object],
        *,
        reset: bool = False,
    ) -> None:
        self.groups, self.isolation, self.listen, self.reset = groups, isolation, listen, reset
        self.id = uuid.uuid4().hex
        self.intervals = Intervals(POLL_INTERVAL)
        self.stopping = False
        self.failing: dict[str, float] = {}
        """When the schedules that could not be fired are tried again."""
        self.reported: set[str] = set()
        """The schedules that were reported as unknown."""
        self.clean_up_at = time.monotonic() + CLEAN_UP * random.random()  # noqa: S311 - no secret depends on it
        self._wake = wake
        self._proven = False
        """Whether the notification of the last look has arrived."""
        self._changed = False

    # -- a subscriber ----------------------------------------------------------------------------------------------

    def receive(self, payload: Payload) -> None:
        """Wake up when a schedule was changed."""
        if payload == Signal.POLL:
            self._changed = True
            self._wake()
        elif isinstance(payload, Heartbeat) and payload.consumer == self.id:
            self._proven = True

    def listening_lost(self) -> None:
        """Look at the schedules, as a notification may have been missed."""
        self._proven = False
        self._wake()

    def until_overdue(self) -> float:
        """Return how long to wait for a notification: none is waited for."""
        return float("inf")

    def notification_overdue(self) -> None:
        """Do nothing: none is waited for."""

    # -- the routine's view ----------------------------------------------------------------------------------------

    def begin_look(self) -> bool:
        """Return whether notifications arrive, and expect the next one."""
        if self._changed:
            self._changed = False
            self.failing.clear()
        now = time.monotonic()
        self.failing = {name: at for name, at in self.failing.items() if at > now}
        proven, self._proven = self._proven, False
        return proven

    def failed(self, name: str) -> None:
        """Leave out a schedule for a while."""
        self.failing[name] = time.monotonic() + _RETRY_AFTER

    def stop(self) -> None:
        """End the routine."""
        self.stopping = True
        self._wake()
