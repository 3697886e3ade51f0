"""The state of one call of ``wait()``: when to announce it, and when to read the job's row. Pure, no I/O."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable

from sqlaqueue.payloads import MAX_BYTES, Payload, Settled, Wait

REPEAT = 20.0
"""Seconds between announcements of one waiter, for Consumers that have come since, and for those that forget."""

FIRST_PAUSE = 0.05
LONGEST_PAUSE, LONGEST_DEAF_PAUSE = 5.0, 1.0
"""Seconds between looks: in the beginning, and at most for one who hears what is said, and for one who does not."""


class WaitState:
    """The ear and the patience of one who waits for the end of one job.

    :param name: the text by which the job is known.
    :param called: called when a look may be due.
    :param timeout: seconds; None to wait without an end.
    :param now: the clock.
    :param draw: returns numbers from [0, 1), to spread announcements.
    """

    def __init__(
        self,
        name: str,
        called: Callable[[], object],
        timeout: float | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._name, self._called, self._now, self._draw = name, called, now, draw
        self.id = uuid.uuid4().hex
        self.announcement = Wait(self.id, [name])
        """What it announces."""
        self._since = self._announce_at = now()
        self._deadline = float("inf") if timeout is None else self._since + timeout
        self._look_at = self._since + FIRST_PAUSE
        self._tries = 0
        self._is_called = False
        self.hears = False
        """Whether it has heard its own announcement, and so would hear of the end."""
        self.announces = len(str(self.announcement)) <= MAX_BYTES
        """Whether it says for what it waits; else it only looks."""

    # -- what is heard, in whichever thread ------------------------------------------------------------------------

    def receive(self, payload: Payload) -> None:
        """Take in a notification."""
        match payload:
            case Wait(self.id):
                if not self.hears:
                    # The job may have ended before anybody knew that it is waited for.
                    self.hears, self._announce_at = True, self._now() + self._repeat()
                    self._call()
            case Settled(jobs) if self._name in jobs:
                # From now on it is looked for more often: what is read may be behind what is said.
                self._since = self._now()
                self._call()

    def listening_lost(self) -> None:
        """Announce again, such as when the channel is listened to by another connection."""
        self.hears = False
        self._announce_at, self._tries = self._now(), 0
        self._called()

    def until_overdue(self) -> float:
        """Whoever waits looks again by itself."""
        return float("inf")

    def notification_overdue(self) -> None:
        """Nothing is counted on."""

    def _call(self) -> None:
        self._is_called = True
        self._called()

    # -- what is due -----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the time to wait is over."""
        return self._deadline <= self._now()

    def pause(self) -> float:
        """Return the seconds until something is due."""
        if self._is_called:
            return 0.0
        due = min(self._look_at, self._deadline, self._announce_at if self.announces else float("inf"))
        return max(0.0, due - self._now())

    def wants_announcement(self) -> bool:
        """Return whether it is time to announce; if so it is taken for done."""
        now = self._now()
        if not self.announces or self._announce_at > now:
            return False
        # One that is not heard may have come before anybody listened.
        soon = 2 * FIRST_PAUSE * 2.0 ** min(self._tries, 20)
        self._announce_at = now + (self._repeat() if self.hears else min(soon, self._repeat()))
        self._tries += 1
        return True

    def _repeat(self) -> float:
        # Spread: many may have begun to wait in one moment.
        return REPEAT * (0.8 + 0.4 * self._draw())

    def wants_look(self) -> bool:
        """Return whether it is time to look; if so, calls from now on ask for another look."""
        if self._is_called or min(self._look_at, self._deadline) <= self._now():
            self._is_called = False
            return True
        return False

    def looked(self) -> None:
        """Note that a look has found the job still on its way: the longer it takes, the longer is the next pause."""
        now = self._now()
        longest = LONGEST_PAUSE if self.hears else LONGEST_DEAF_PAUSE
        self._look_at = now + min(max(FIRST_PAUSE, (now - self._since) / 2), longest)
