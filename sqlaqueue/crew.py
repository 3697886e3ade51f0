"""What the threads or tasks of one Consumer share: claimed jobs, finished runs, who is running what. No I/O.

The same object serves both Consumers; the lock costs an event loop nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlaqueue.events import Announcer, JobEvent
from sqlaqueue.exc import Cancel, JobTimeout, LeaseLost
from sqlaqueue.mapping import run_of
from sqlaqueue.operations import Ended
from sqlaqueue.outcomes import Abandoned
from sqlaqueue.pace import Pace
from sqlaqueue.plan import Plan
from sqlaqueue.runs import Report
from sqlaqueue.spec import Key, Run

FLUSH_AFTER = 0.05
"""Seconds that a finished run may wait to be settled together with others."""


@dataclass(eq=False)
class Running:
    """A handler at work."""

    runs: Sequence[Run]
    started: float = field(default_factory=time.monotonic)
    timed_out: bool = False
    abandoned: bool = False
    cancelled: bool = False
    """Somebody asked the job to stop."""
    task: Any = None
    """The asyncio task that runs the handler, for AsyncConsumer."""

    def verdict(self, raised: BaseException | None, timeout: float | None) -> BaseException | None:
        """Return what the handler's run came to, given what it raised and what happened to it meanwhile."""
        if self.abandoned:
            return Abandoned()
        if self.timed_out:
            return JobTimeout(f"the handler ran for longer than {timeout:g} seconds")
        if self.cancelled and raised is not None:
            return Cancel("cancelled on request while it ran")
        return raised


class Crew:
    """The shared state of one Consumer at work."""

    def __init__(self, plan: Plan, pace: Pace, announcer: Announcer) -> None:
        self.plan, self.pace, self.announcer = plan, pace, announcer
        self.jobs_ended = 0
        self.claiming = False
        """Whether some thread or task is claiming, or rests after it found nothing."""
        self.at_work = 0
        """How many threads or tasks have claimed jobs in hand."""
        self.turns_ended = 0
        """How many turns with claimed jobs have ended."""
        self.lock = threading.RLock()
        self._inbox: deque[Any] = deque()
        self._finished: list[Ended] = []
        self._finished_since: float | None = None
        self._running: set[Running] = set()

    # -- claimed jobs that wait for a handler ------------------------------------------------------------------

    def fill(self, jobs: Sequence[Any]) -> None:
        """Take claimed jobs in."""
        with self.lock:
            self._inbox.extend(jobs)

    def next_unit(self) -> list[Any]:
        """Return the next jobs for one call of the handler: one, or with batches all; empty when there are none."""
        with self.lock:
            if self.plan.batch:
                unit = list(self._inbox)
                self._inbox.clear()
                return unit
            return [self._inbox.popleft()] if self._inbox else []

    def empty_inbox(self) -> list[Run]:
        """Return the runs of jobs that nobody has started, and forget them."""
        with self.lock:
            runs = [run for job in self._inbox if (run := run_of(job)) is not None]
            self._inbox.clear()
            return runs

    @property
    def has_work(self) -> bool:
        """Whether claimed jobs wait for a handler."""
        return bool(self._inbox)

    # -- handlers at work ----------------------------------------------------------------------------------

    def start(self, jobs: Sequence[Any]) -> Running:
        """Note that a handler begins with ``jobs``."""
        running = Running([run for job in jobs if (run := run_of(job)) is not None])
        with self.lock:
            self._running.add(running)
        return running

    def stop(self, running: Running) -> None:
        """Note that a handler has returned."""
        with self.lock:
            self._running.discard(running)
        duration = time.monotonic() - running.started
        self.pace.ended(duration / max(1, len(running.runs)))

    def running(self) -> list[Running]:
        """Return the handlers at work."""
        with self.lock:
            return list(self._running)

    def alive(self) -> list[Run]:
        """Return the runs whose leases are to be extended: all that wait or run and are not given up."""
        with self.lock:
            waiting = [run for job in self._inbox if (run := run_of(job)) is not None]
            working = [
                run for running in self._running if not running.timed_out and not running.abandoned for run in running.runs
            ]
            return waiting + working + [ended.run for ended in self._finished]

    def working_runs(self) -> list[Run]:
        """Return the runs whose handlers are at work."""
        return [run for one in self.running() for run in one.runs]

    def asked_to_stop(self, asked: Sequence[tuple[Key, float]], now: float) -> list[Running]:
        """Mark and return the handlers whose jobs somebody asked to stop.

        A request that is older than the run was meant for an earlier one.

        :param asked: keys with the ages of the requests in seconds.
        """
        stopped = []
        for key, age in asked:
            for one in self.running():
                if any(run.key == key for run in one.runs) and age <= now - one.started + 1:
                    one.cancelled = True
                    stopped.append(one)
        return stopped

    def overdue(self, now: float) -> list[Running]:
        """Return the handlers that have just run into the Consumer's timeout, and mark them."""
        timeout = self.plan.timeout
        if timeout is None:
            return []
        late = [one for one in self.running() if not one.timed_out and now - one.started > timeout]
        for one in late:
            one.timed_out = True
        return late

    # -- runs that ended ---------------------------------------------------------------------------------------

    def report(self, report: Report) -> None:
        """Take in what a script has done."""
        for ended in report.settled:
            self.announce(ended)
        self.tell_lost(report.lost)
        with self.lock:
            if report.unsettled and not self._finished:
                self._finished_since = time.monotonic()
            self._finished.extend(report.unsettled)

    def take_finished(self) -> list[Ended]:
        """Return the runs that are to be settled together, and forget them."""
        with self.lock:
            finished, self._finished, self._finished_since = self._finished, [], None
            return finished

    def give_back(self, finished: list[Ended]) -> None:
        """Take runs back that could not be settled, to try again."""
        with self.lock:
            self._finished = finished + self._finished
            self._finished_since = self._finished_since or time.monotonic()

    def wants_settling(self, now: float) -> bool:
        """Return whether a run has waited long enough to be settled."""
        since = self._finished_since
        return since is not None and now - since >= FLUSH_AFTER

    @property
    def has_finished(self) -> bool:
        """Whether runs wait to be settled."""
        return bool(self._finished)

    def settled(self, finished: Sequence[Ended], lost: Sequence[Ended]) -> None:
        """Announce runs that were settled together."""
        gone = {id(one) for one in lost if not one.uncertain}
        for ended in finished:
            if id(ended) not in gone:
                self.announce(ended)
        self.tell_lost([one for one in lost if id(one) in gone])

    # -- events ----------------------------------------------------------------------------------------------

    def announce(self, ended: Ended) -> None:
        """Tell how one run ended."""
        outcome = ended.outcome
        if outcome.ending != "released":
            self.jobs_ended += 1
        self.announcer.tell(
            JobEvent(
                outcome.ending,
                self.plan.spec.name,
                ended.run.key,
                ended.run.attempt,
                outcome.delay,
                outcome.cause,
            )
        )

    def tell_claimed(self, jobs: Sequence[Any]) -> None:
        """Tell which jobs were claimed."""
        for job in jobs:
            run = run_of(job)
            if run is not None:
                self.announcer.tell(JobEvent("claimed", self.plan.spec.name, run.key, run.attempt))

    def tell_lost(self, lost: Sequence[Ended]) -> None:
        """Tell whose result was refused."""
        for ended in lost:
            error = LeaseLost(f"the result of job {ended.run.key} came after its lease had passed to another run")
            self.announcer.tell(JobEvent("lease_lost", self.plan.spec.name, ended.run.key, ended.run.attempt, error=error))

    def tell_rescued(self, keys: Sequence[Key]) -> None:
        """Tell which jobs were taken back from workers that died."""
        for key in keys:
            self.announcer.tell(JobEvent("rescued", self.plan.spec.name, key))
