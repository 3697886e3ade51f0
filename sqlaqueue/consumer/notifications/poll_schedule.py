"""Decides when to poll next, from the notifications received. Pure, no I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sqlaqueue.consumer.notifications.peers import Peers
from sqlaqueue.consumer.notifications.poll_order import Announcements
from sqlaqueue.consumer.notifications.rescue_timer import RescueTimer
from sqlaqueue.consumer.notifications.waiter_registry import WaiterRegistry
from sqlaqueue.notify_payloads import Claimed, Deregistered, Heartbeat, Payload, Pending, Settled, Signal, Wait

LONGEST_POLL = 60.0
"""The most seconds between two polls of one consumer, however many there are: all the others may be busy."""

_MANY_PEERS = 3
"""From how many consumers on it costs less to notify the others that no job is there than to let them poll."""

MOST_IDS = 20
"""How many announcements one notification may name: it has at most 8,000 bytes."""


@dataclass(frozen=True, slots=True)
class Poll:
    """A poll that answers announcements."""

    announcements: Sequence[str] = ()
    peers: int = 1

    @property
    def spares_others(self) -> bool:
        """Whether a notification that no job is there costs less than the polls of all others."""
        return bool(self.announcements) and self.peers >= _MANY_PEERS


NO_ANNOUNCEMENT = Poll()
"""A poll that answers no announcement."""


class PollSchedule:
    """When one consumer polls. It receives notifications, and wakes the worker that polls next.

    :param me: the id of this consumer.
    :param interval: returns the seconds until the next poll without an announcement.
    :param wake_poller: called when a notification may make a poll due.
    :param wake_maintenance: called when a notification may make a maintenance task due.
    :param share: returns how many jobs one consumer claims at once.
    :param waiters: receives which jobs callers of ``wait()`` wait for.
    :param rescue: returns the seconds between rescues, see :class:`RescueTimer`; None where there are no leases.
    :param now: the clock.
    """

    def __init__(
        self,
        me: str,
        interval: Callable[[], float],
        wake_poller: Callable[[], None],
        wake_maintenance: Callable[[], None],
        *,
        share: Callable[[], int] = lambda: 1,
        waiters: WaiterRegistry | None = None,
        rescue: Callable[[int], float] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._waiters = WaiterRegistry(now=now) if waiters is None else waiters
        self._interval, self._now = interval, now
        self._wake_poller, self._wake_maintenance = wake_poller, wake_maintenance
        self._lock = threading.Lock()
        self.peers = Peers(me, now)
        self._announcements = Announcements(self.peers, share, now)
        self.rescues = RescueTimer(rescue, now)
        self._next_poll = now()
        self._poll_again = False
        """A poll became due while another one was executed, which may have begun too early."""
        self.cancellation_requested = False
        """The cancellation of running jobs was requested, and the requests have not been queried yet."""
        self.has_polled = False
        """A poll has been answered by the database, whatever it found."""
        self.quarantined = True
        """There may be pending jobs that are quarantined and that no claim has searched for."""

    # -- what is received ------------------------------------------------------------------------------------------

    def receive(self, payload: Payload) -> None:
        """Process a notification."""
        self.peers.received()
        match payload:
            case Pending():
                with self._lock:
                    unknown = self._announcements.add(payload)
                    self._check_open()
                self._wake_poller()
                if unknown:
                    self._wake_maintenance()
            case Claimed(count, ids):
                with self._lock:
                    unknown = self._announcements.claimed(count, ids)
                    self._check_open()
                if unknown:
                    self._wake_maintenance()
            case Heartbeat(consumer):
                self._receive_heartbeat(consumer)
            case Deregistered(consumer):
                self.peers.deregistered(consumer)
            case Wait(_, jobs):
                self._waiters.add(jobs)
            case Settled(jobs):
                self._waiters.take(jobs)
            case Signal():
                self._receive_signal(payload)

    def _receive_signal(self, signal: Signal) -> None:
        match signal:
            case Signal.POLL:
                self.poll_at_once()
            case Signal.RESCUED:
                self.rescues.received(self.peers.rank)
            case Signal.QUARANTINED:
                self.quarantined = True
            case Signal.CANCEL_REQUESTED:
                self.cancellation_requested = True
                self._wake_maintenance()

    def _receive_heartbeat(self, consumer: str) -> None:
        was_listening = self.peers.listening
        if self.peers.received_heartbeat(consumer):
            # Earlier notifications may have been missed.
            self.quarantined = self.quarantined or not was_listening
            self._wake_maintenance()

    def listening_lost(self) -> None:
        """Poll, since notifications may have been missed: the connection that they come by is lost, or a new one."""
        self.peers.connection_lost()
        with self._lock:
            self.quarantined = True
            self._announcements.known_until = self._now()
            self._poll_now()
        self._wake_poller()
        self._wake_maintenance()

    def until_overdue(self) -> float:
        """Return the seconds until this consumer has to rescue, unless another one rescues before."""
        return self.rescues.until_overdue()

    def notification_overdue(self) -> None:
        """Wake the maintenance loop, as it is this consumer's turn to rescue."""
        self.rescues.set_overdue()
        self._wake_maintenance()

    def heartbeat_sent(self, listening: Iterable[str], clock_ahead: float) -> None:
        """Record what a heartbeat has found.

        :param listening: the consumers of the queue that are listening.
        :param clock_ahead: by how many seconds the database's clock is ahead of this one.
        """
        self.peers.heartbeat_sent(listening)
        with self._lock:
            self._announcements.clock_ahead = clock_ahead

    # -- when to poll ----------------------------------------------------------------------------------------------

    def next_poll(self) -> float:
        """Return the time of the next poll."""
        with self._lock:
            unknown = self._announcements.open_due()
            self._check_open()
            next_poll = min(self._next_poll, self._announcements.next_poll())
        if unknown:
            self._wake_maintenance()
        return next_poll

    def is_due(self) -> bool:
        """Return whether it is time to poll."""
        return self.next_poll() <= self._now()

    def begin_poll(self) -> Poll:
        """Return the poll that is executed now; the announcements that it answers are forgotten."""
        with self._lock:
            self._poll_again = False
            unknown = self._announcements.open_due()
            ids = self._announcements.take_due()
        if unknown:
            self._wake_maintenance()
        return Poll(ids[-MOST_IDS:], self.peers.count)

    def polled(self, *, more: bool) -> None:
        """Record that a poll has been executed.

        :param more: whether there may be more jobs than it has claimed.
        """
        if not self.has_polled:
            self.has_polled = True
            self._wake_maintenance()
        if more:
            self.poll_at_once()
            return
        with self._lock:
            if self._poll_again:
                return
            alone, peers = self._interval(), self.peers
            shared = max(alone, min(alone * peers.count, LONGEST_POLL)) if peers.listening else alone
            self._next_poll = self._now() + shared

    def poll_within(self, delay: float) -> None:
        """Make a poll due in ``delay`` seconds at the latest."""
        with self._lock:
            self._next_poll = min(self._next_poll, self._now() + delay)

    def poll_at_once(self) -> None:
        """Make a poll due now."""
        with self._lock:
            self._poll_now()
        self._wake_poller()

    def _poll_now(self) -> None:
        self._next_poll, self._poll_again = self._now(), True

    def _check_open(self) -> None:
        if self._announcements.take_too_many():
            # One poll answers all of them.
            self._poll_now()

    # -- when jobs will be due -------------------------------------------------------------------------------------

    def wants_upcoming(self) -> bool:
        """Return whether jobs may become due at times that were not announced, so that the database has to be asked."""
        return self.until_upcoming() <= 0

    def until_upcoming(self) -> float:
        """Return the seconds until jobs may become due at times that were not announced; inf while not listening."""
        return self._announcements.known_until - self._now() if self.peers.listening else float("inf")

    def add_upcoming(self, times: Sequence[float], *, complete: bool) -> None:
        """Record when jobs will be due.

        :param times: in seconds of the database's clock since the epoch, in order.
        :param complete: whether there are no others.
        """
        with self._lock:
            self._announcements.add_upcoming(times, complete=complete)
        # Jobs that have become due before the query are not among them.
        self.poll_at_once()
