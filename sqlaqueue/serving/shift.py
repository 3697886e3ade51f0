"""One run of a Consumer: what its lanes and its keeper share, without the threads or tasks that they are."""

from __future__ import annotations

import time

from sqlaqueue.serving.crew import Crew
from sqlaqueue.serving.events import Announcer
from sqlaqueue.serving.pace import HEARTBEATS_A_LEASE, Agenda, Pace
from sqlaqueue.serving.plan import Plan

_KEEPERS_REST, _KEEPERS_REST_AT_WORK = 1.0, 0.25


class Shift:
    """One ``run()`` or ``drain()``.

    Each has a state of its own: a handler that outlives the grace period goes on in its thread, and must not meet the
    next run.

    :param draining: whether the shift ends when nothing is due.
    """

    interrupts = False
    """Whether handlers can be interrupted."""

    def __init__(self, name: str, plan: Plan, pace: Pace, announcer: Announcer, *, draining: bool) -> None:
        self.name, self.draining = name, draining
        self.plan = plan.for_a_shift()
        self.crew = Crew(self.plan, pace, announcer, self.wake)
        self.agenda = Agenda()
        self.proven = False
        """Some claim has worked: what fails from now on is the database's health, not a mistake in the program."""
        self.over = False
        """The lanes have ended; the keeper may."""
        self.error: BaseException | None = None
        for duty in ("heartbeat", "sweep", "reconcile"):
            self.agenda.set(duty, time.monotonic())

    def wake(self) -> None:
        """Wake the lanes that rest."""
        raise NotImplementedError

    def stop(self) -> None:
        """Take on no more work."""
        raise NotImplementedError

    def works(self) -> None:
        """Note that the database has answered a claim."""
        self.proven = True
        self.crew.pace.succeeded()

    def fail(self, error: BaseException) -> None:
        """End with an error, which ``run()`` raises."""
        self.error = self.error or error
        self.stop()

    @property
    def heartbeat(self) -> float:
        """The seconds between extensions of the leases."""
        return self.plan.lease.total_seconds() / HEARTBEATS_A_LEASE

    def until_next_duty(self) -> float:
        """Return the seconds until the keeper has something to look at."""
        at_work = not self.crew.at_rest
        wait = min(self.agenda.wait(time.monotonic()), _KEEPERS_REST_AT_WORK if at_work else _KEEPERS_REST)
        if self.plan.timeout is not None:
            wait = min(wait, self.plan.timeout / 4)
        return max(wait, 0.02)
