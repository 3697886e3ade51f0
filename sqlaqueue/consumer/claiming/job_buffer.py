"""What the threads or tasks of one shift share: claimed jobs, finished runs, who is running what. No I/O.

The same object serves both Consumers; the lock costs an event loop nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming.batch_size import FLUSH_AFTER, LATE, LONGEST_WAIT, Pace
from sqlaqueue.consumer.core.effects import Report
from sqlaqueue.consumer.core.events import EventEmitter, EventName, JobEvent, make_event
from sqlaqueue.consumer.executing.executor import Hand, has_waited, runs_of, without
from sqlaqueue.consumer.notifications.poll_schedule import Calls
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.consumer.settling.conflicts import Postponed
from sqlaqueue.consumer.settling.outcomes import COMPLETED, RELEASED, Ended, StopRequested
from sqlaqueue.exc import LeaseLost
from sqlaqueue.keys import Key, key_text, key_value
from sqlaqueue.log import fields, logger
from sqlaqueue.queue.run import Run


class Crew:
    """The shared state of one Consumer at work.

    :param wake: called whenever something has changed for those who rest, with the number of those to be woken.
    :param calls: when to look for jobs.
    :param attend: called when work begins while the keeper dozes.
    """

    def __init__(  # noqa: PLR0917 - what a shift is made of, in one place
        self,
        plan: Plan,
        pace: Pace,
        emitter: EventEmitter,
        wake: Callable[[int], None],
        calls: Calls,
        attend: Callable[[], None],
    ) -> None:
        self.plan, self.pace, self.emitter, self._wake, self.calls = plan, pace, emitter, wake, calls
        self._attend = attend
        self.lock = threading.RLock()
        self.version = 0
        """Counts what has changed for those who rest: whoever compares it cannot miss a change."""
        self.jobs_ended = self.jobs_released = 0
        self.claiming = 0
        """How many threads or tasks are claiming, or rest after they found nothing."""
        self.plenty = False
        """Whether there may be more jobs than the last claim has found."""
        self.works_ended = 0
        """How many times claimed jobs have been put out of hand: they may be due again."""
        self.keeper_dozes = False
        """Whether nobody would see in time that work has begun."""
        self.busy_since: float | None = None
        """When the first job was claimed since the crew was found at rest; None when none has been."""
        self._inbox: deque[Sequence[Any]] = deque()
        self._in_hand: dict[object, Callable[[], list[Run]]] = {}
        self._finished: list[Ended] = []
        self._settling: set[Ended] = set()
        self.postponed = Postponed()
        """Runs that are being settled and whose rows somebody holds."""
        self._finished_since: float | None = None
        self._at_work: set[Hand] = set()

    def changed(self, lanes: int = 1) -> None:
        """Wake as many of those who rest as there is something new for: to wake hundreds for one job costs more."""
        with self.lock:
            self.version += 1
        self._wake(lanes)

    # -- claimed jobs: waiting for a handler, or in hand ---------------------------------------------------------

    def fill(self, units: Sequence[Sequence[Any]]) -> None:
        """Take claimed jobs in, detached, in lists for one call of the handler each."""
        if units:
            with self.lock:
                self._inbox.extend(units)
                self._begin()
            self.changed(len(units))

    def next_unit(self) -> Sequence[Any]:
        """Return the jobs for the next call of the handler; empty when there are none."""
        with self.lock:
            return self._inbox.popleft() if self._inbox else []

    def further_unit(self) -> Sequence[Any]:
        """Return the jobs for one more call by whoever has just made one; empty when something else comes first."""
        with self.lock:
            if self.plan.suspects.one_runs or self.runs_low or self.wants_settling(time.monotonic()):
                return []
            return self.next_unit()

    def forget_waiting(self) -> list[Run]:
        """Return the runs of jobs that nobody has started, and forget them."""
        with self.lock:
            runs = runs_of(job for unit in self._inbox for job in unit)
            self._inbox.clear()
            for hand in self._at_work:
                runs += runs_of(job for unit in hand.leave_rest() for job in unit)
                hand.rest_has_left()
            return runs

    def forget_held(self) -> list[Run]:
        """Return all runs that have not ended, and forget them."""
        with self.lock:
            runs = self.held()
            self._inbox.clear()
            self._in_hand.clear()
            ended = {id(one.run) for one in (*self._finished, *self._settling)}
            return [run for run in runs if id(run) not in ended]

    def give_back_late(self, now: float) -> int:
        """End these runs without beginning them, and return how many they are."""
        with self.lock:
            late = self.late_units(now)
            self._inbox = without(late, self._inbox)
            for hand in self._at_work:
                hand.leave(late)
            runs, stop, asked = runs_of(job for unit in late for job in unit), StopRequested(), self.plan.asked
            # A request to stop would be forgotten with the run.
            ends = [self.plan.judge(stop, run) if run.key in asked else RELEASED for run in runs]
            self.report(Report(unsettled=[Ended(run, end) for run, end in zip(runs, ends, strict=True)]))
            return len(runs)

    def late_units(self, now: float) -> list[Sequence[Any]]:
        """Return the units that would wait here for too long before they begin, while others may be idle."""
        # None of a batch that failed: it is being tried job by job, and would come together again.
        calls = [now - hand.started for hand in self.at_work()]
        nobody_is_free = len(calls) >= self.plan.concurrency and min(calls) >= LONGEST_WAIT
        claimed_by = now if nobody_is_free or self.plan.stopping else now - LATE
        with self.lock:
            units = [*self._inbox, *(unit for hand in self._at_work for unit in hand.left())]
            return [unit for unit in units if has_waited(unit, claimed_by)]

    @property
    def has_work(self) -> bool:
        """Whether claimed jobs wait for a handler."""
        return bool(self._inbox)

    @property
    def runs_low(self) -> bool:
        """Whether there are more jobs to claim, and those here will be done before a claim could bring them."""
        return self.plenty and not self.claiming and len(self._inbox) <= self.pace.ahead()

    def claim_size(self) -> int:
        """Return how many jobs to claim: a few, unless the last claim has shown that there may be more."""
        if self.plan.holds_transaction:
            return self.pace.claim_size(plenty=self.plenty)
        now, hands = time.monotonic(), self.at_work()
        stuck = sum(self.pace.is_stuck(now - hand.started) for hand in hands)
        return self.pace.claim_size(plenty=self.plenty, idle=self.plan.concurrency - len(hands), stuck=stuck)

    def take_in_hand(self, owner: object, held: Callable[[], list[Run]]) -> None:
        """Note that ``owner`` has begun to work on claimed jobs.

        :param held: returns those runs that are still in hand.
        """
        with self.lock:
            self._in_hand[owner] = held
            self._begin()

    def _begin(self) -> None:
        if self.busy_since is None:
            self.busy_since = time.monotonic()
            if self.keeper_dozes:
                self._attend()

    def is_found_at_rest(self) -> bool:
        """The same as :attr:`at_rest`, which is remembered."""
        with self.lock:
            if self.at_rest:
                self.busy_since = None
                return True
            return False

    def put_down(self, owner: object) -> None:
        """Note that ``owner`` has done with its jobs, if it had any."""
        with self.lock:
            if self._in_hand.pop(owner, None) is not None:
                self.works_ended += 1

    @property
    def at_rest(self) -> bool:
        """Whether no claimed job is left here: none waits, is in hand, or has ended without being settled."""
        with self.lock:
            return not (self._inbox or self._in_hand or self._finished or self._settling)

    def runs_in_hand(self) -> list[Run]:
        """Return the runs that somebody works on."""
        with self.lock:
            return [run for held in self._in_hand.values() for run in held()]

    def running(self) -> list[Run]:
        """Return the runs whose handler is at work."""
        return runs_of(job for hand in self.at_work() for job in hand.unit)

    def held(self) -> list[Run]:
        """Return the runs that have not ended."""
        with self.lock:
            return runs_of(job for unit in self._inbox for job in unit) + self.runs_in_hand()

    def alive(self) -> list[Run]:
        """Return the runs whose leases are to be extended: all that are here and not given up."""
        with self.lock:
            hands = [one for one in self._at_work if one.timed_out or one.abandoned]
            given_up = {id(run) for one in hands for run in runs_of(one.unit)}
            ended = [one.run for one in (*self._finished, *self._settling)]
            return [run for run in self.held() + ended if id(run) not in given_up]

    # -- handlers at work ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, hand: Hand) -> Iterator[None]:
        """Note that calls of the handler begin, and that they have ended."""
        with self.lock:
            self._at_work.add(hand)
            hand.set_pace(time.monotonic())
        try:
            yield
        finally:
            with self.lock:
                self._at_work.discard(hand)
                hand.set_pace(time.monotonic())

    def at_work(self) -> list[Hand]:
        """Return the hands from which a handler is at work."""
        with self.lock:
            return [hand for hand in self._at_work if hand.unit]

    def sessions(self) -> list[Session]:
        """Return the sessions of handlers; without the lock, which a copy of this process may lack."""
        return [hand.session for hand in [*self._at_work] if hand.session is not None]

    def asked_to_stop(self, asked: Sequence[tuple[Key, float]], now: float) -> None:
        """Take in that somebody asked jobs to stop; a request that is older than the run was meant for an earlier one.

        :param asked: keys with the ages of the requests in seconds.
        """
        ages = dict(asked)
        with self.lock:
            meant = [run for run in self.held() if run.key in ages and ages[run.key] <= now - run.claimed_at + 1]
            for run in meant:
                at_work = [one for one in self._at_work if any(run.key == other.key for other in runs_of(one.unit))]
                if not at_work:
                    self.plan.asked.add(run.key)
                for one in at_work:
                    one.asked.add(run.key)
                    one.interrupt()

    def time_out(self, hand: Hand) -> None:
        """Note that a handler has run into the Consumer's timeout."""
        if not hand.timed_out:
            hand.timed_out = True
            keys = [run.key for run in runs_of(hand.unit)]
            self.plan.suspects.end(keys)
            # The end of a leased run is told in a moment; that of a held one, not before its handler returns.
            level = logging.WARNING if self.plan.holds_transaction else logging.DEBUG
            queue, worker = self.plan.spec.name, self.plan.worker()
            for key in keys:
                extra = fields("timed_out", queue=queue, worker=worker, job_key=key_value(key))
                text = "job %s of queue %s ran into its timeout of %g s; the result of its handler is refused"
                logger.log(level, text, key_text(key), queue, self.plan.timeout, extra=extra)

    def overdue(self, now: float) -> list[Run]:
        """Return the runs whose handlers have just run into the Consumer's timeout, and mark these."""
        timeout = self.plan.timeout
        if timeout is None:
            return []
        with self.lock:
            late = [one for one in self.at_work() if not one.timed_out and now - one.started > timeout]
            for one in late:
                self.time_out(one)
            return [run for one in late for run in runs_of(one.unit)]

    @property
    def is_stuck(self) -> bool:
        """Whether every handler that may run at once has run into its timeout, and goes on."""
        return sum(one.timed_out for one in self.at_work()) >= self.plan.concurrency

    # -- runs that ended ---------------------------------------------------------------------------------------

    def report(self, report: Report) -> None:
        """Take in what a script has done."""
        self._announce_all(report.settled)
        self.tell_lost(report.lost)
        with self.lock:
            self.finish(report.unsettled)
        # However it ended: one that seems to run for ever would keep all others from running.
        if self.plan.suspects.end([one.run.key for one in (*report.settled, *report.lost, *report.unsettled)]):
            self.calls.look_at_once()
        self.fill([[job] for job in report.apart])

    def finish(self, ended: Sequence[Ended]) -> None:
        """Take in runs that are to be settled together with others; the lock is held."""
        if ended and not self._finished:
            self._finished_since = time.monotonic()
        self._finished += ended

    def take_finished(self) -> list[Ended]:
        """Return the runs that are to be settled together; they stay here until it is known how that went."""
        with self.lock:
            finished, self._finished, self._finished_since = self._finished, [], None
            self._settling.update(finished)
            return finished

    def give_back(self, finished: Sequence[Ended]) -> bool:
        """Take runs back that could not be settled, to try again, and return whether there are any.

        Not those that were settled before something else went wrong.
        """
        with self.lock:
            unsettled = [one for one in finished if one in self._settling]
            self._settling.difference_update(unsettled)
            self._finished = [*unsettled, *self._finished]
            if unsettled:
                self._finished_since = self._finished_since or time.monotonic()
            return bool(unsettled)

    def wants_settling(self, now: float) -> bool:
        """Return whether runs have ended that should not wait for others to be settled with them.

        There are others soon, as long as jobs wait here or the next claim brings some; and while some runs are being
        settled, those that end meanwhile are settled together after them.
        """
        since = self._finished_since
        if since is None:
            return False
        if self.pace.is_slow or now - since >= FLUSH_AFTER:
            return True
        return not (self._inbox or self.plenty or self._settling)

    def overlooks(self, now: float) -> bool:
        """Return whether runs have waited so long to be settled that no lane seems to come by."""
        since = self._finished_since
        return since is not None and now - since >= 4 * FLUSH_AFTER

    def settled(self, finished: Sequence[Ended], lost: Sequence[Ended], stuck: Sequence[Ended] = ()) -> None:
        """Announce runs that were settled together, except those that were refused or could not be settled."""
        with self.lock:
            self._settling.difference_update(finished)
            self.works_ended += 1
        silent = [one for one in finished if not one.begun]
        without = {*lost, *stuck, *silent}
        self._announce_all([ended for ended in finished if ended not in without] if without else finished)
        self.tell_lost([one for one in lost if one.begun])
        if silent:
            # No trigger calls a row out that is given back.
            self.calls.look_at_once()
        self.changed()

    # -- events ----------------------------------------------------------------------------------------------

    def _announce_all(self, ended: Sequence[Ended]) -> None:
        """Tell how runs ended."""
        unheard = not self.emitter.wants("completed")
        with self.lock:
            number = sum(one.outcome.ending != "released" for one in ended)
            self.jobs_ended += number
            self.jobs_released += len(ended) - number
            self.plan.conflicts.over(one.run.key for one in ended if one.outcome.ending != "released")
            if self.plan.asked:
                self.plan.asked.difference_update([one.run.key for one in ended])
        for one in ended:
            outcome = one.outcome
            if outcome is COMPLETED and unheard:
                continue
            if outcome.state == "pending" and not outcome.delay:
                # No trigger calls out a row that has read as pending all the time.
                self.calls.look_at_once()
            if self.emitter.wants(outcome.ending):
                self._tell(outcome.ending, one.run, outcome.delay, outcome.cause)

    def tell_claimed(self, jobs: Sequence[Any]) -> None:
        """Tell which jobs were claimed."""
        for run in runs_of(jobs) if self.emitter.wants("claimed") else ():
            self._tell("claimed", run)

    def tell_lost(self, lost: Sequence[Ended]) -> None:
        """Tell whose result was refused."""
        for run in (one.run for one in lost):
            error = LeaseLost(f"the result of job {key_text(run.key)} came after its lease had passed to another run")
            self._tell("lease_lost", run, error=error)

    def tell_rescued(self, keys: Sequence[Key]) -> None:
        """Tell which jobs were taken back from workers that died."""
        for key in keys:
            self.emitter.emit(JobEvent("rescued", self.plan.spec.name, key))

    def _tell(self, name: EventName, run: Run, delay: float | None = None, error: BaseException | None = None) -> None:
        self.emitter.emit(make_event(name, self.plan.spec.name, run, delay, error))
