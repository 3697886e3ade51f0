"""The state of one call of ``wait()``: when to notify Consumers of it, and when to poll the job. Pure, no I/O."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable

from sqlaqueue.notify_payloads import MAX_BYTES, Payload, Settled, Wait

NOTIFY_INTERVAL = 20.0
"""Seconds between notifications, for Consumers that have started since, and as Consumers forget them."""

FIRST_DELAY = 0.05
"""Seconds before the second poll; the delay grows with the time waited."""

MAX_DELAY, MAX_DELAY_NOT_LISTENING = 5.0, 1.0
"""Maximum seconds between two polls, if notifications arrive and if not."""


class WaitState:
    """Decides when to notify Consumers and when to poll.

    It is a subscriber of the queue's channel, and safe for use by several threads.

    :param job: the text of the job's key.
    :param wake: called when a poll may be due.
    :param timeout: seconds; None for no limit.
    :param now: the clock.
    :param draw: returns random numbers from [0, 1).
    """

    def __init__(
        self,
        job: str,
        wake: Callable[[], object],
        timeout: float | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._job, self._wake, self._now, self._draw = job, wake, now, draw
        self.id = uuid.uuid4().hex
        self.notification = Wait(self.id, [job])
        """The notification to send."""
        self._since = self._notify_at = now()
        self._deadline = float("inf") if timeout is None else self._since + timeout
        self._poll_at = self._since + FIRST_DELAY
        self._unanswered = 0
        self._is_woken = False
        self.listening = False
        """Whether it has received its own notification, and so will receive that the job was settled."""
        self.notifies = len(str(self.notification)) <= MAX_BYTES
        """Whether it sends notifications; otherwise it only polls."""

    # -- notifications, received in the listener's thread or event loop --------------------------------------------

    def receive(self, payload: Payload) -> None:
        """Poll when the own notification arrives, and when the job was settled."""
        match payload:
            case Wait(self.id):
                if not self.listening:
                    # The job may have been settled before a Consumer received the notification.
                    self.listening, self._notify_at = True, self._now() + self._interval()
                    self._wake_up()
            case Settled(jobs) if self._job in jobs:
                # The row may be read from a snapshot before the notification: poll with short delays again.
                self._since = self._now()
                self._wake_up()

    def listening_lost(self) -> None:
        """Announce again, as notifications may have been missed."""
        self.listening = False
        self._notify_at, self._unanswered = self._now(), 0
        self._wake()

    def until_overdue(self) -> float:
        """Return inf: no notification is ever overdue, as the caller polls as well."""
        return float("inf")

    def notification_overdue(self) -> None:
        """Never called."""

    def _wake_up(self) -> None:
        self._is_woken = True
        self._wake()

    # -- what is due -----------------------------------------------------------------------------------------------

    @property
    def timed_out(self) -> bool:
        """Whether the timeout has passed."""
        return self._deadline <= self._now()

    def seconds_until_due(self) -> float:
        """Return the seconds until a notification of its own or a poll is due, or the timeout."""
        if self._is_woken:
            return 0.0
        due = min(self._poll_at, self._deadline, self._notify_at if self.notifies else float("inf"))
        return max(0.0, due - self._now())

    def take_notification(self) -> bool:
        """Return whether a notification of its own is due; if so, schedule the next one."""
        now = self._now()
        if not self.notifies or self._notify_at > now:
            return False
        # Until one is received: the connection may not have been listening when it was sent.
        soon = 2 * FIRST_DELAY * 2.0 ** min(self._unanswered, 20)
        self._notify_at = now + (self._interval() if self.listening else min(soon, self._interval()))
        self._unanswered += 1
        return True

    def _interval(self) -> float:
        # Jittered, as many callers may have started to wait at the same time.
        return NOTIFY_INTERVAL * (0.8 + 0.4 * self._draw())

    def take_poll(self) -> bool:
        """Return whether a poll is due; notifications received after this call make another one due."""
        if self._is_woken or min(self._poll_at, self._deadline) <= self._now():
            self._is_woken = False
            return True
        return False

    def not_settled(self) -> None:
        """Schedule the next poll, after the last one has found the job pending or running."""
        now = self._now()
        longest = MAX_DELAY if self.listening else MAX_DELAY_NOT_LISTENING
        self._poll_at = now + min(max(FIRST_DELAY, (now - self._since) / 2), longest)
