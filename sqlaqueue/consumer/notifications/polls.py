"""When to poll: from notifications, from what other Consumers do, and from jobs that are due later."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.pace import RescueTimer
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.notify_payloads import (
    ALL_JOBS,
    Claimed,
    Deregistered,
    Heartbeat,
    Payload,
    Pending,
    Settled,
    Signal,
    WaitRequest,
    settled_payloads,
)
from sqlaqueue.postgresql.triggers import notification
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec

PROOF_TIMEOUT = 5.0
"""Seconds within which a consumer receives its own heartbeat; else notifications do not arrive."""


_MOST_GONE = 1_000

_LOOK_AGAIN = 5.0
"""Seconds from one look into the table to the next one for a heartbeat of a consumer that it has not found."""


class Peers:
    """The listening consumers of a queue, as one of them sees the others.

    It begins as not listening; once it has received its own heartbeat, it knows that notifications arrive.

    Every role of the database can send notifications. So a heartbeat adds no consumer that the own look into the table
    has not found: with many more of them this one would poll once a minute, and wait for others that do not exist. It
    makes this one look again.
    """

    def __init__(self, me: str, now: Callable[[], float] = time.monotonic) -> None:
        self._me, self._now, self._lock = me, now, threading.Lock()
        self._found: set[str] = set()
        """The others that the last heartbeat has found in the table."""
        self._gone: set[str] = set()
        """Who has ended since the last heartbeat began."""
        self._notified_at: float | None = None
        self._received_own_at: float | None = None
        self._received_at = self._heartbeat_at = float("-inf")
        self.subscribed = False
        """A listener is subscribed for this consumer, so that it should receive its own heartbeats."""
        self.wants_heartbeat = False
        """Whether to send a heartbeat at once, to test a new connection."""
        self._has_unknown = False

    @property
    def listening(self) -> bool:
        return self._received_own_at is not None

    @property
    def count(self) -> int:
        """How many consumers of this queue are listening, this one among them."""
        return len(self._others) + 1

    @property
    def _others(self) -> set[str]:
        return self._found - self._gone

    @property
    def rank(self) -> int:
        """The place of this consumer among those that are listening, from 0: the first few do what one does for all."""
        with self._lock:
            return self._rank if self.listening else 0

    @property
    def _rank(self) -> int:
        # Not by sorting: with hundreds of consumers that took most of the time of a notification.
        return sum(other < self._me for other in self._others)

    def place_for(self, announcement: str) -> int:
        """Return the place of this consumer in the order for an announcement, on which all of them agree."""
        with self._lock:
            return (self._rank - zlib.crc32(announcement.encode())) % self.count

    def received(self) -> None:
        self._received_at = self._now()

    def received_heartbeat(self, consumer: str) -> bool:
        """Record a heartbeat; return whether the maintenance loop has to know.

        That is if it is this consumer's own, and the first by this connection, or the first of an unknown one.
        """
        with self._lock:
            if consumer != self._me:
                self._gone.discard(consumer)
                had_unknown, self._has_unknown = self._has_unknown, self._has_unknown or consumer not in self._found
                return self._has_unknown and not had_unknown
            first = not self.listening
            self._received_own_at = self._now()
            return first

    def deregistered(self, consumer: str) -> None:
        with self._lock:
            # Of others there may be any number of forged ones.
            if consumer in self._found or len(self._gone) < _MOST_GONE:
                self._gone.add(consumer)

    def connection_lost(self) -> None:
        """Forget that notifications arrive, as when the connection that they come by is lost."""
        with self._lock:
            self._received_own_at = self._notified_at = None
            self.wants_heartbeat = True

    def begin_heartbeat(self, *, news: bool) -> bool:
        """Record that a heartbeat is about to be sent, and return whether to notify the channel of it.

        Without news, a notification received since the last heartbeat proves that notifications arrive.
        """
        with self._lock:
            self._gone.clear()
            self.wants_heartbeat = self._has_unknown = False
            now = self._now()
            notify = news or not self.listening or self._received_at < self._heartbeat_at
            if notify and self.subscribed and (self._notified_at is None or self.listening):
                self._notified_at = now
            self._heartbeat_at = now
            return notify

    def heartbeat_sent(self, listening: Iterable[str]) -> None:
        """Record which consumers are listening, as the heartbeat has found in the table."""
        with self._lock:
            # The query may have found a consumer that has deregistered since.
            self._found = set(listening) - {self._me}

    def until_look(self) -> float:
        """Return the seconds until the next heartbeat, as it looks for unknown consumers; inf if there are none."""
        with self._lock:
            return self._heartbeat_at + _LOOK_AGAIN - self._now() if self._has_unknown else float("inf")

    def until_proof(self) -> float:
        """Return the seconds until a heartbeat should have been received, negative when it is missing."""
        with self._lock:
            if self._notified_at is None or (self._received_own_at or float("-inf")) >= self._notified_at:
                return float("inf")
            return self._notified_at + PROOF_TIMEOUT - self._now()


# -- poll order --------------------------------------------------------------------------------------------------------
# Every consumer receives each announcement, and one should poll. All agree on an order for it: the first consumer
# polls at once, the next one a moment later unless the jobs have been claimed meanwhile. A consumer that is busy,
# frozen or dead costs that moment. No notification decides anything: only a claim does.
#
# Of the consumers in one process, a few poll for many jobs at once. Twice as many join them after each moment in which
# none of them claims: while they claim, more of them would only compete for the same interpreter. After a while each of
# them polls, as those that claim may be too busy to take all.


STAGGER = 0.02
"""Seconds by which one consumer after the other polls for a job that has not been claimed."""

FEW_NEIGHBOURS, JOIN_AFTER, _SLOW_CLAIM = 2, 0.1, 0.5
"""How many consumers of one process poll at once, the seconds without a claim of theirs after which others join, and
the seconds after which a claim that goes on counts no more."""

LATEST, _LATEST_STEP = 0.3, 0.01
"""After so many seconds, and so many more for each place in the order, a consumer polls whatever the others do."""

MOST_LATER = 10_000
"""How many announcements of later jobs are kept: when the last of them is due, the database is asked for more."""

MOST_OPEN = 1_000
"""How many announcements may be open before one poll answers all of them."""

_CLOCK_SKEW = 0.5


class _Later(NamedTuple):
    due: float
    id: str
    jobs: int
    more: bool


class _Open:
    def __init__(self, jobs: int, due: float, place: int, at_once: int, opened_at: float) -> None:
        self.jobs, self.due, self.place, self.at_once = jobs, due, place, at_once
        self.poll_at = due + place // at_once * STAGGER
        # The time of a due job may be that of its statement, long before its commit.
        self.opened_at = opened_at


_UNANNOUNCED, _ANY_NUMBER = "", 10**6


class Announcements:
    """The announcements that this consumer has received and no one has answered. Methods need the caller's lock."""

    def __init__(self, peers: Peers, share: Callable[[], int], now: Callable[[], float]) -> None:
        self._peers, self._share, self._now = peers, share, now
        self._later: list[_Later] = []
        self._open: dict[str, _Open] = {}
        self.known_until = now()
        """Up to when all jobs that become due are known; inf for all of them."""
        self.version = 0
        """It changes with each report that jobs may be unknown."""
        self.clock_ahead = 0.0
        """By how many seconds the database's clock is ahead of this process's."""

    def add(self, announcement: Pending) -> bool:
        """Add an announcement; return whether there may now be jobs whose time is unknown."""
        if announcement.due == 0:
            return self._add_open(announcement.id, announcement.number, self._now(), more=announcement.more)
        # One transaction may insert jobs for many times.
        id_ = f"{announcement.id}@{announcement.due}"
        return self._add_later(_Later(announcement.due - self.clock_ahead, id_, announcement.number, announcement.more))

    def set_unknown(self, since: float) -> None:
        """Record that jobs which become due after ``since`` may be unknown."""
        self.known_until, self.version = min(self.known_until, since), self.version + 1

    def add_upcoming(self, times: Sequence[float], *, complete: bool, version: int) -> None:
        if version == self.version:
            self.known_until = float("inf") if complete or not times else times[-1] - self.clock_ahead
        for moment in times:
            self._add_later(_Later(moment - self.clock_ahead, f"@{moment:.3f}", 1, more=False))

    def _add_later(self, later: _Later) -> bool:
        heapq.heappush(self._later, later)
        if len(self._later) <= MOST_LATER:
            return False
        # Half of them, or each further one would come here.
        self._later.sort()
        self.set_unknown(self._later[MOST_LATER // 2].due)
        del self._later[MOST_LATER // 2 :]
        return True

    def _add_open(self, id_: str, count: int, due: float, *, more: bool) -> bool:
        known = self._open.get(id_)
        count += known.jobs if known else 0
        opened = _Open(count, due, self._peers.place_for(id_), max(-(-count // self._share()), 1), self._now())
        if known is not None:
            # Else a poll that is always asked for again would never come.
            opened.poll_at = min(opened.poll_at, known.poll_at)
        self._open[id_] = opened
        if more:
            # The other jobs of that statement are due at times of their own, which were not announced.
            self.set_unknown(due)
        return more

    def open_due(self, ahead: float = 0.0) -> bool:
        """Open the announcements whose jobs are due, or will be; return whether there may be jobs of unknown time."""
        now, unknown = self._now(), False
        while self._later and self._later[0].due <= now + ahead:
            later = heapq.heappop(self._later)
            unknown |= self._add_open(later.id, later.jobs, later.due, more=later.more)
        return unknown

    def claimed(self, count: int, ids: Sequence[str]) -> bool:
        """Record that so many jobs of these announcements are claimed; return as :meth:`open_due`."""
        unknown = self.open_due(ahead=_CLOCK_SKEW)
        for id_ in ids:
            announcement = self._open.get(id_)
            if announcement is None:
                continue
            count, announcement.jobs = count - announcement.jobs, announcement.jobs - count
            if announcement.jobs <= 0:
                del self._open[id_]
            if count <= 0:
                break
        return unknown

    def add_unannounced(self) -> bool:
        """Record that there may be any number of due jobs that were not announced; return whether that is new."""
        is_new = not self.has_unannounced
        self._add_open(_UNANNOUNCED, _ANY_NUMBER, self._now(), more=False)
        return is_new

    @property
    def has_unannounced(self) -> bool:
        """Whether no poll has begun since it was recorded that there may be such jobs."""
        return _UNANNOUNCED in self._open

    def forget(self, until: float) -> None:
        """Forget the announcements that were open then."""
        for id_ in [id_ for id_, announcement in self._open.items() if announcement.opened_at < until]:
            del self._open[id_]

    def place_of(self, id_: str) -> float:
        announcement = self._open.get(id_)
        return float("inf") if announcement is None else announcement.place

    def take_too_many(self) -> bool:
        """Forget the open announcements if there are too many; return whether there were, so that a poll is due."""
        if len(self._open) <= MOST_OPEN:
            return False
        self._open.clear()
        return True

    def take_due(self) -> list[str]:
        """Return the ids of the open announcements that a poll answers now, and forget them."""
        now = self._now()
        ids = [id_ for id_, announcement in self._open.items() if announcement.due <= now]
        for id_ in ids:
            del self._open[id_]
        return [id_ for id_ in ids if id_ != _UNANNOUNCED]

    def next_poll(self, behind: Callable[[str, _Open], float]) -> float:
        """Return when to poll next.

        :param behind: returns when to poll for an announcement that many consumers answer at once.
        """
        later = [self._later[0].due] if self._later else []
        polls = (one.poll_at if one.at_once <= FEW_NEIGHBOURS else behind(id_, one) for id_, one in self._open.items())
        return min([*later, *polls], default=float("inf"))


RETENTION = 60.0
"""Seconds for which a job is kept after a caller announced that it waits for it."""

MAX_JOBS = 10_000
"""How many jobs are kept at most, the ones announced last."""


class WaiterRegistry:
    """The jobs for which callers of :func:`sqlaqueue.wait` wait: a Consumer notifies them and nobody else.

    A lost entry delays a caller, who also reads the row now and then; it loses no result.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._lock = now, threading.Lock()
        self._until: dict[str, float] = {}
        """When each job is forgotten, in the order of their announcements."""

    def __bool__(self) -> bool:
        return bool(self._until)

    def add(self, jobs: Sequence[str]) -> None:
        now = self._now()
        with self._lock:
            for job in jobs:
                # Removed first: a dict keeps the place of a key that is set again.
                self._until.pop(job, None)
                self._until[job] = now + RETENTION
            for job in list(self._until)[: max(0, len(self._until) - MAX_JOBS)]:
                del self._until[job]

    def take(self, jobs: Collection[str]) -> list[str]:
        """Remove jobs, and return those for which a caller waits."""
        now = self._now()
        with self._lock:
            return [job for job in jobs if self._until.pop(job, now) > now]


LONGEST_POLL = 5.0
"""The most seconds between two polls of one consumer, however many there are: all the others may be busy."""

_MANY_PEERS = 3
"""From how many consumers on it costs less to notify the others that no job is there than to let them poll."""

_LONGEST_CLAIM = 0.25
"""Seconds for which a Consumer may poll before it counts as one without capacity."""

MOST_IDS = 20
"""How many announcements one notification may name: it has at most 8,000 bytes."""


class Poll(NamedTuple):
    """A poll that answers announcements."""

    announcements: Sequence[str] = ()
    peers: int = 1
    began: float = float("-inf")

    @property
    def spares_others(self) -> bool:
        """Whether a notification that no job is there costs less than the polls of all others."""
        return bool(self.announcements) and self.peers >= _MANY_PEERS


NO_ANNOUNCEMENT = Poll()


class PollSchedule:
    """When one consumer polls. It receives notifications, and wakes the worker that polls next.

    :param share: returns how many jobs one consumer claims at once.
    :param rescue: returns the seconds between rescues, see :class:`RescueTimer`; None where there are no leases.
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
        self.waits, self.found, self.polls = 0, False, 0
        """How many workers wait for the next poll, whether the last poll found jobs, and how many polls there were."""
        self._busy_since, self._polls_since = now(), float("-inf")
        self._claimed_at = float("-inf")
        """When the last claim that has found jobs has ended."""
        self.neighbours: Callable[[], Sequence[PollSchedule]] = list
        """Those of the consumers in this process that serve the same jobs, this one among them."""
        self.on_wait: Callable[[], object] | None = None
        """Called when a worker begins to wait: this Consumer has capacity, and its last claim was short."""
        self.has_polled = False
        """A poll has been answered by the database, whatever it found."""
        self.quarantined = True
        """There may be pending jobs that are quarantined and that no claim has searched for."""

    def receive(self, payload: Payload) -> None:
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
            case WaitRequest(_, jobs):
                self._waiters.add(jobs)
            case Settled(jobs):
                self._waiters.take(jobs)
            case Signal():
                self._receive_signal(payload)

    def _receive_heartbeat(self, consumer: str) -> None:
        was_listening = self.peers.listening
        if self.peers.received_heartbeat(consumer):
            # Earlier notifications may have been missed.
            self.quarantined = self.quarantined or not was_listening
            self._wake_maintenance()

    def _receive_signal(self, signal: Signal) -> None:
        match signal:
            case Signal.POLL:
                self.poll_with_neighbours()
            case Signal.RESCUED:
                self.rescues.received(self.peers.rank)
            case Signal.QUARANTINED:
                self.quarantined = True
            case Signal.CANCEL_REQUESTED:
                self.cancellation_requested = True
                self._wake_maintenance()
            case Signal.CONSUMER_REQUESTED:
                # A heartbeat reads what was asked.
                self.peers.wants_heartbeat = True
                self._wake_maintenance()

    def listening_lost(self) -> None:
        """Poll, since notifications may have been missed: the connection that they come by is lost, or a new one."""
        self.peers.connection_lost()
        with self._lock:
            self.quarantined = True
            self._announcements.set_unknown(self._now())
        self.poll_with_neighbours()
        self._wake_maintenance()

    def is_notified(self) -> None:
        """Poll, as all jobs are announced from now on; those that were not are found once more."""
        with self._lock:
            self._announcements.set_unknown(self._now())
        self.poll_with_neighbours()
        self._wake_maintenance()

    def poll_with_neighbours(self) -> None:
        """Poll as for an announcement of many jobs, so that not all consumers of this process do it at once."""
        with self._lock:
            is_new = self._announcements.add_unannounced()
        # Otherwise its worker knows when to poll.
        if is_new or self.is_due():
            self._wake_poller()

    def until_overdue(self) -> float:
        return self.rescues.until_overdue()

    def notification_overdue(self) -> None:
        """Wake the maintenance loop, as it is this consumer's turn to rescue."""
        self.rescues.set_overdue()
        self._wake_maintenance()

    def heartbeat_sent(self, listening: Iterable[str], clock_ahead: float) -> None:
        self.peers.heartbeat_sent(listening)
        with self._lock:
            self._announcements.clock_ahead = clock_ahead

    def next_poll(self) -> float:
        with self._lock:
            unknown = self._announcements.open_due()
            self._check_open()
            next_poll = min(self._next_poll, self._announcements.next_poll(self._behind_neighbours))
        if unknown:
            self._wake_maintenance()
        return next_poll

    def _behind_neighbours(self, id_: str, announcement: _Open) -> float:
        """Return when to poll for an announcement that neighbours answer as well."""
        others, now = [each for each in self.neighbours() if each is not self], self._now()
        busy = [each for each in others if not each.waits]
        ahead = sum(now - each.last_claim < JOIN_AFTER for each in busy)
        ahead += sum(each.waits > 0 and each.is_before(id_, announcement.place) for each in others)
        if ahead < FEW_NEIGHBOURS:
            return announcement.poll_at
        last = max([announcement.poll_at, *(each.last_claim for each in busy)])
        joins = last + JOIN_AFTER * (ahead // FEW_NEIGHBOURS).bit_length()
        return min(joins, announcement.poll_at + LATEST + announcement.place * _LATEST_STEP)

    @property
    def last_claim(self) -> float:
        """When this consumer has last claimed jobs; now, while it does."""
        now = self._now()
        return now if now - self._polls_since < _SLOW_CLAIM else self._claimed_at

    def is_before(self, id_: str, place: int) -> bool:
        """Return whether this consumer has an earlier place in the order for an announcement."""
        return self._announcements.place_of(id_) < place

    def has_answered(self) -> bool:
        """Return whether a poll has begun since the last request to poll."""
        return not self._announcements.has_unannounced and self._next_poll > self._now()

    def is_due(self) -> bool:
        return self.next_poll() <= self._now()

    def begin_poll(self) -> Poll:
        """Return the poll that is executed now; the announcements that it answers are forgotten."""
        self._polls_since = began = self._now()
        with self._lock:
            self._poll_again = False
            unknown = self._announcements.open_due()
            ids = self._announcements.take_due()
        if unknown:
            self._wake_maintenance()
        return Poll(ids[-MOST_IDS:], self.peers.count, began)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that a worker waits for the next poll, in a block."""
        with self._lock:
            self.waits += 1
        if self.on_wait is not None:
            self.on_wait()
        try:
            yield
        finally:
            with self._lock:
                self.waits, self._busy_since = self.waits - 1, self._now()

    def busy_for(self) -> float:
        """Return for how many seconds it has had no capacity; a poll may take a moment before it counts."""
        now = self._now()
        return 0.0 if self.waits else now - max(self._busy_since, min(self._polls_since + _LONGEST_CLAIM, now))

    def polled(self, poll: Poll = NO_ANNOUNCEMENT, *, more: bool, found: bool = False, drained: bool = False) -> None:
        """Record the result of a poll.

        :param drained: whether all jobs that were there when it began are claimed, so that no neighbour has to look.
        """
        now = self._now()
        self.found, self.polls = found, self.polls + 1
        self._busy_since, self._polls_since = now, float("-inf")
        if found:
            self._claimed_at = now
        for each in self.neighbours() if drained else ():
            if each is not self:
                # A job may be due a moment later by the database's clock than by this one.
                each.forget(poll.began - STAGGER)
                # Those that have not polled since would say for ever that there are more.
                each.found = False
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

    def let_neighbours_poll(self) -> None:
        """Let the neighbours poll, as this consumer could not claim what they may have left to it."""
        for each in self.neighbours():
            if each is not self:
                each.poll_with_neighbours()

    def forget(self, until: float) -> None:
        with self._lock:
            self._announcements.forget(until)

    def poll_within(self, delay: float) -> None:
        with self._lock:
            self._next_poll = min(self._next_poll, self._now() + delay)

    def poll_at_once(self) -> None:
        with self._lock:
            self._poll_now()
        self._wake_poller()

    def _poll_now(self) -> None:
        self._next_poll, self._poll_again = self._now(), True

    def _check_open(self) -> None:
        if self._announcements.take_too_many():
            # One poll answers all of them.
            self._announcements.add_unannounced()

    def wants_upcoming(self) -> bool:
        return self.until_upcoming() <= 0

    def until_upcoming(self) -> float:
        """Return the seconds until jobs may become due at times that were not announced; inf while not listening."""
        return self._announcements.known_until - self._now() if self.peers.listening else float("inf")

    @property
    def version(self) -> int:
        return self._announcements.version

    def add_upcoming(self, times: Sequence[float], *, complete: bool, version: int) -> None:
        """Record when jobs will be due, by the database's clock and in order.

        :param version: the one from before the query. If it has changed, the query may have been too early, and
            another one has to follow.
        """
        with self._lock:
            self._announcements.add_upcoming(times, complete=complete, version=version)
        # Jobs that have become due before the query are not among them.
        self.poll_with_neighbours()


# -- notify ------------------------------------------------------------------------------------------------------------


def notify_settled(session: Session, spec: QueueSpec, waiters: WaiterRegistry, keys: Iterable[Key]) -> None:
    """Notify the callers that wait for some of these jobs that they are settled; send nothing if there are none."""
    if not waiters:
        return
    for payload in settled_payloads(waiters.take([key_text(key) for key in keys])):
        _send(session, spec, payload)


def notify_released(session: Session, spec: QueueSpec) -> None:
    """Have other consumers poll for released jobs: no trigger announces rows that have read as pending all the time."""
    _send(session, spec, Signal.POLL)


def notify_all_claimed(session: Session, settings: ConsumerSettings, poll: Poll) -> None:
    """Notify other consumers that a poll has found nothing, where that spares them their own."""
    if poll.spares_others and settings.serves_whole_queue:
        _send(session, settings.spec, Claimed(ALL_JOBS, poll.announcements))


def _send(session: Session, spec: QueueSpec, payload: Payload) -> None:
    # A session with several engines chooses one by the mapper.
    session.execute(sa.select(notification(spec, payload)), bind_arguments={"mapper": spec.mapper})
