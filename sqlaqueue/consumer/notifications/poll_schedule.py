"""What a Consumer has heard of its queue, and what follows: when to look for jobs. Pure, no I/O.

A new job is called out to every consumer, and one should come. Each knows the others by their check-ins, so all agree
on an order for each call: the first looks at once, the next a moment later unless it has heard meanwhile that the job
is taken. One that is busy, frozen or dead costs that moment, and no message between consumers decides anything: a
claim alone does.

What is heard are the payloads of :mod:`sqlaqueue.payloads`.
"""

from __future__ import annotations

import heapq
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sqlaqueue.consumer.maintenance.rescue_timer import Sweeps
from sqlaqueue.consumer.notifications.waiter_registry import WaiterRegistry
from sqlaqueue.payloads import Claimed, Deregistered, Heartbeat, Payload, Pending, Settled, Signal, Wait

PATIENCE = 5.0
"""Seconds within which a Consumer hears its own check-in, or is taken to be deaf."""

STAGGER = 0.02
"""Seconds by which one consumer after the other looks for a job that nobody has said to have taken."""

LONGEST_POLL = 60.0
"""The most seconds that a crowd lets one of it wait with a look of its own: all the others may be busy."""

MOST = 10_000
"""How many calls for later are kept in mind: what lies beyond them is asked for when its time comes."""

MOST_OPEN = 1_000
"""How many calls may be open before they count as one."""

_CROWD = 3
"""From how many consumers on it costs less to tell the others that nothing is there than to let them look."""

MOST_TICKETS = 20
"""How many tickets one word may carry: a notification has at most 8,000 bytes."""


@dataclass(order=True, slots=True)
class _Call:
    due: float
    ticket: str
    jobs: int
    more: bool


@dataclass(slots=True)
class _Open:
    jobs: int
    due: float
    look_at: float


@dataclass(frozen=True, slots=True)
class Look:
    """A look for jobs that answers calls."""

    tickets: Sequence[str] = ()
    crowd: int = 1

    @property
    def spares_others(self) -> bool:
        """Whether saying that nothing is there costs less than to let all others look for themselves."""
        return bool(self.tickets) and self.crowd >= _CROWD


NO_CALL = Look()
"""A look that nobody has called for."""


class Calls:
    """The ear of one Consumer: it is told what was heard, and tells when to look.

    It starts deaf, and polls; once it has heard its own check-in it knows that calls arrive.

    :param me: the name under which this Consumer checks in.
    :param poll: returns the seconds until the next look without a call.
    :param called: called when it has been told something for which a look may be due.
    :param noticed: called when there is something else to do about what it has been told.
    :param sweep: returns the seconds between looks for jobs whose lease is over; see :class:`Sweeps`.
    :param share: returns how many jobs one consumer takes at once.
    :param awaited: is told as well who waits for the end of which job.
    :param now: the clock.
    """

    def __init__(
        self,
        me: str,
        poll: Callable[[], float],
        called: Callable[[], None],
        noticed: Callable[[], None],
        *,
        sweep: Callable[[int], float] | None = None,
        share: Callable[[], int] = lambda: 1,
        awaited: WaiterRegistry | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._awaited = WaiterRegistry(now=now) if awaited is None else awaited
        self._me, self._poll, self._share, self._now = me, poll, share, now
        self._called, self._noticed = called, noticed
        self._lock = threading.Lock()
        self._ahead: list[_Call] = []
        self._open: dict[str, _Open] = {}
        self._others: set[str] = set()
        self._news: dict[str, bool] = {}
        self._next_poll = self._known_until = now()
        self._looks_again = False
        self._clock_ahead = 0.0
        self._checked_in: float | None = None
        self._heard_myself: float | None = None
        self._heard = self._signed = float("-inf")
        self.asked_to_stop = False
        """Somebody has asked running jobs to stop, and it has not been looked which."""
        self.sweeps = Sweeps(sweep, now)
        """When it is time to look for jobs whose lease is over."""
        self.listens = False
        """Somebody listens for this Consumer: what it says aloud it should hear itself."""
        self.wants_check_in = False
        """There is a connection by which no check-in has been heard, nor been missed."""
        self.has_looked = False
        """A look has been answered by the database, whatever it found."""
        self.suspects = True
        """There may be suspects among the waiting jobs, for which nobody here has looked."""

    # -- what is heard -------------------------------------------------------------------------------------------

    def receive(self, payload: Payload) -> None:
        """Take in a notification."""
        self._heard = self._now()
        match payload:
            case Pending():
                self._hear_call(payload)
            case Claimed(count, ids):
                self._hear_taken(count, ids)
            case Heartbeat(consumer):
                self._hear_check_in(consumer)
            case Deregistered(consumer):
                with self._lock:
                    self._others.discard(consumer)
                    self._news[consumer] = False
            case Wait(_, jobs):
                self._awaited.add(jobs)
            case Settled(jobs):
                self._awaited.take(jobs)
            case Signal():
                self._hear_signal(payload)

    def _hear_signal(self, signal: Signal) -> None:
        match signal:
            case Signal.POLL:
                self.look_at_once()
            case Signal.RESCUED:
                self.sweeps.heard(self.rank)
            case Signal.QUARANTINED:
                self.suspects = True
            case Signal.CANCEL_REQUESTED:
                self.asked_to_stop = True
                self._noticed()

    def _hear_call(self, call: Pending) -> None:
        with self._lock:
            if call.due == 0:
                self._open_call(call.id, call.count, self._now(), more=call.more)
            else:
                # One transaction may write rows for many times.
                self._add(_Call(call.due - self._clock_ahead, f"{call.id}@{call.due}", call.count, call.more))
        self._called()

    def _add(self, call: _Call) -> None:
        heapq.heappush(self._ahead, call)
        if len(self._ahead) > MOST:
            # Half of them, or each further call would come here.
            self._ahead.sort()
            self._known_until = min(self._known_until, self._ahead[MOST // 2].due)
            del self._ahead[MOST // 2 :]
            self._noticed()

    def _open_call(self, ticket: str, jobs: int, due: float, *, more: bool) -> None:
        known = self._open.get(ticket)
        count = jobs + (known.jobs if known else 0)
        ring = sorted([*self._others, self._me])
        place = (ring.index(self._me) - zlib.crc32(ticket.encode())) % len(ring)
        self._open[ticket] = _Open(count, due, due + place // max(-(-count // self._share()), 1) * STAGGER)
        if len(self._open) > MOST_OPEN:
            # One look answers all of them.
            self._open.clear()
            self._poll_now()
        if more:
            # The others of that statement are due at times of their own, which nobody has called out.
            self._known_until = min(self._known_until, due)
            self._noticed()

    def _open_due(self, ahead: float = 0.0) -> None:
        """Open the calls whose time has come.

        :param ahead: seconds, for clocks that differ.
        """
        now = self._now()
        while self._ahead and self._ahead[0].due <= now + ahead:
            call = heapq.heappop(self._ahead)
            self._open_call(call.ticket, call.jobs, call.due, more=call.more)

    def _hear_taken(self, left: int, tickets: Sequence[str]) -> None:
        with self._lock:
            self._open_due(ahead=0.5)
            for ticket in tickets:
                call = self._open.get(ticket)
                if call is None:
                    continue
                left, call.jobs = left - call.jobs, call.jobs - left
                if call.jobs <= 0:
                    del self._open[ticket]
                if left <= 0:
                    return

    def _hear_check_in(self, consumer: str) -> None:
        with self._lock:
            if consumer == self._me:
                # What was said before may have been missed.
                self.suspects |= not self.hears
                self._heard_myself = self._now()
                self._noticed()
            else:
                self._others.add(consumer)
                self._news[consumer] = True

    # -- what others there are, and whether one hears ------------------------------------------------------------

    def checks_in(self, *, news: bool) -> bool:
        """Note that a check-in is on its way, and return whether to say it aloud: from now on it may be heard then.

        Who has heard anything since the last check-in knows that calls arrive, and the others know of this one.

        :param news: whether the others may not know of this Consumer, or not that it hears.
        """
        with self._lock:
            self._news.clear()
            self.wants_check_in = False
            now = self._now()
            aloud = news or not self.hears or self._heard < self._signed
            if aloud and self.listens and (self._checked_in is None or self.hears):
                self._checked_in = now
            self._signed = now
            return aloud

    def checked_in(self, others: Iterable[str], clock_ahead: float) -> None:
        """Note what a check-in has found.

        :param others: the consumers of the queue that hear.
        :param clock_ahead: by how many seconds the database's clock is ahead of this one's.
        """
        with self._lock:
            self._others = set(others) - {self._me}
            # Who has come or gone meanwhile may not have been there to be found, or still.
            self._others |= {consumer for consumer, there in self._news.items() if there}
            self._others -= {consumer for consumer, there in self._news.items() if not there}
            self._clock_ahead = clock_ahead

    def listening_lost(self) -> None:
        """Forget that calls arrive, such as when the connection that they come by is lost."""
        with self._lock:
            self._heard_myself = self._checked_in = None
            self.wants_check_in = self.suspects = True
            self._known_until = self._now()
            self._poll_now()
        self._called()
        self._noticed()

    @property
    def hears(self) -> bool:
        """Whether calls are known to arrive."""
        return self._heard_myself is not None

    def until_proof(self) -> float:
        """Return the seconds until a check-in should have been heard, negative when it has been missed."""
        with self._lock:
            if self._checked_in is None or (self._heard_myself or float("-inf")) >= self._checked_in:
                return float("inf")
            return self._checked_in + PATIENCE - self._now()

    @property
    def crowd(self) -> int:
        """How many consumers hear the calls of this queue, this one among them."""
        return len(self._others) + 1

    @property
    def rank(self) -> int:
        """The place of this Consumer among those that hear, from 0: the first few do what one has to do for all."""
        with self._lock:
            return sorted([*self._others, self._me]).index(self._me) if self.hears else 0

    def until_overdue(self) -> float:
        """Return the seconds until nobody has said to look for jobs whose lease is over: then it is this one's turn."""
        return self.sweeps.until_overdue()

    def notification_overdue(self) -> None:
        """Note that nobody has said so."""
        self.sweeps.miss()
        self._noticed()

    # -- when to look --------------------------------------------------------------------------------------------

    def next_look(self) -> float:
        """Return the time of the next look for jobs."""
        with self._lock:
            self._open_due()
            ahead = [self._ahead[0].due] if self._ahead else []
            return min([self._next_poll, *ahead, *(call.look_at for call in self._open.values())])

    def wants_look(self) -> bool:
        """Return whether it is time to look."""
        return self.next_look() <= self._now()

    def begin_look(self) -> Look:
        """Return the look that is made now; the calls that it answers are forgotten."""
        with self._lock:
            self._looks_again = False
            self._open_due()
            now = self._now()
            tickets = [ticket for ticket, call in self._open.items() if call.due <= now]
            for ticket in tickets:
                del self._open[ticket]
            return Look(tickets[-MOST_TICKETS:], self.crowd)

    def looked(self, *, more: bool) -> None:
        """Note that a look has been made.

        :param more: whether there may be more jobs than it has found.
        """
        if not self.has_looked:
            self.has_looked = True
            self._noticed()
        if more:
            self.look_at_once()
            return
        with self._lock:
            if self._looks_again:
                return
            alone = self._poll()
            self._next_poll = self._now() + (max(alone, min(alone * self.crowd, LONGEST_POLL)) if self.hears else alone)

    def look_at_once(self) -> None:
        """Make a look due, whoever else has one."""
        with self._lock:
            self._poll_now()
        self._called()

    def _poll_now(self) -> None:
        # A look that is under way may have begun too early to see what this one is for.
        self._next_poll, self._looks_again = self._now(), True

    # -- what will be due ------------------------------------------------------------------------------------------

    def wants_outlook(self) -> bool:
        """Return whether there may be times that nobody has called out, so that they have to be asked for."""
        return self.hears and self._known_until <= self._now()

    def until_outlook(self) -> float:
        """Return the seconds until there may be such times."""
        return self._known_until - self._now() if self.hears else float("inf")

    def see_ahead(self, times: Sequence[float], *, all_of_them: bool) -> None:
        """Take in when jobs will be due.

        :param times: in seconds of the database's clock since the epoch, in order.
        :param all_of_them: whether there are no others.
        """
        with self._lock:
            for moment in times:
                self._add(_Call(moment - self._clock_ahead, f"@{moment:.3f}", 1, more=False))
            self._known_until = float("inf") if all_of_them or not times else times[-1] - self._clock_ahead
        # What has come due before they were asked for is not among them.
        self.look_at_once()
