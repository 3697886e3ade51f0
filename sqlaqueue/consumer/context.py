"""One run of a Consumer: what its lanes and its keeper share, without the threads or tasks that they are."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from sqlaqueue.consumer.claiming.batch_size import HEARTBEATS_A_LEASE, Agenda, Pace
from sqlaqueue.consumer.claiming.job_buffer import Crew
from sqlaqueue.consumer.core.events import EventEmitter
from sqlaqueue.consumer.core.fork_guard import ForkGuard
from sqlaqueue.consumer.maintenance.retention import Retention
from sqlaqueue.consumer.notifications.poll_schedule import Calls
from sqlaqueue.consumer.sessions.write_routing import open_session
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.keys import Key
from sqlaqueue.log import fields, logger

_MISSED = 2
"""How many check-ins in a row have to be missed before it is said: the first may be a connection that just broke."""

_REST_AT_WORK, _LONGEST_DOZE = 0.25, 60.0
"""Seconds between two looks of the keeper: while there are claimed jobs, and without any."""

_AFTER_WORK = 1.0
"""Seconds without claimed jobs after which the keeper dozes: to be woken costs more than to look again."""


class Shift:
    """One ``run()`` or ``drain()``.

    Each has a state of its own: a handler that outlives the grace period goes on in its thread, and must not meet the
    next run.

    :param draining: whether the shift ends when nothing is due.
    """

    interrupts = False
    """Whether handlers can be interrupted."""

    engine: sa.Engine
    """The engine of its sessions."""
    factory: Any
    """What makes its sessions."""

    def __init__(self, name: str, plan: Plan, pace: Pace, emitter: EventEmitter, *, draining: bool) -> None:
        self.name, self.draining = name, draining
        self.id = uuid.uuid4().hex
        """Its name among the Consumers that are alive."""
        self.handles_signals = True
        self.start_known: Callable[[], object] | None = None
        """Called when a first claim has worked or is going to be tried again; None when nobody asks."""
        self.plan = plan.for_a_shift()
        sweep = pace.sweep if plan.has_leases else None
        self.calls = Calls(
            self.id, pace.poll, self.call, self._noticed, sweep=sweep, share=pace.claim_size, awaited=self.plan.awaited
        )
        self.crew = Crew(self.plan, pace, emitter, self.wake, self.calls, self.attend)
        self.forks = ForkGuard(plan.spec.name, self.crew.sessions)
        self.agenda = Agenda()
        self.retention = Retention(plan.spec)
        self._proofs_missed = 0
        self._said_deaf = False
        self.said_to_hear: bool | None = None
        """What its last check-in said of it; None before the first."""
        self.said_start = False
        """The log says that it has started."""
        self.drained = False
        """A run that drains its queue has come to its end."""
        self.before_shutdown: tuple[int, int] | None = None
        """How many runs had ended, and how many jobs had been given back, when the shutdown began."""
        self.over = False
        """The lanes have ended; the keeper may."""
        self.error: BaseException | None = None
        self.compared_upto: Key | None = None
        """Up to which job the keeper has compared messages with jobs; None between two rounds."""
        self.comparing_took = 0.0
        """The seconds that the parts of this round have taken."""
        for duty in ("check-in", "reconcile", *(["retention"] if self.retention.walks else [])):
            self.agenda.set(duty, time.monotonic())
        self._busy_at = time.monotonic()
        """When the keeper has seen claimed jobs last."""

    def _noticed(self) -> None:
        self.attend()
        if self.proven:
            self.tell_start()

    def tell_start(self) -> None:
        """Tell those who wait for the start what has become of it."""
        if self.start_known is not None:
            self.start_known()
            self.start_known = None

    def fields(self, event: str, **values: Any) -> dict[str, Any]:
        """Return what a record of the log carries."""
        return fields(event, queue=self.plan.spec.name, worker=self.plan.worker(), **values)

    def wake(self, lanes: int) -> None:
        """Wake some of the lanes that rest."""
        raise NotImplementedError

    def call(self) -> None:
        """Wake the lane that watches for calls."""
        raise NotImplementedError

    def attend(self) -> None:
        """Wake the keeper."""
        raise NotImplementedError

    def stop(self) -> None:
        """Take on no more work."""
        raise NotImplementedError

    def listen(self) -> None:
        """Begin to listen for calls, if it has not been done."""
        raise NotImplementedError

    def reconnect(self) -> None:
        """Listen by another connection."""
        raise NotImplementedError

    def hears_nothing(self) -> None:
        """Note that a check-in has not been heard: look by polling, and try another connection."""
        self.calls.listening_lost()
        # By this connection another one would be missed as well.
        self.calls.wants_check_in = False
        self._proofs_missed += 1
        if self._proofs_missed.bit_count() == 1:
            # Less and less often: behind a pooler each try leaves a connection to the server that listens for nobody.
            self.reconnect()
        if self._proofs_missed == _MISSED and not self._said_deaf:
            self._said_deaf = True
            logger.warning(
                "%s: notifications do not arrive, as behind a pooler in transaction mode, so new jobs are found by "
                "polling; give the Consumer an engine that is connected to the server itself, or say "
                "QueueConfig(notify=False)",
                self.name,
                extra=self.fields("notifications_missed"),
            )

    def hears_again(self) -> None:
        """Note that a check-in has been heard."""
        self._proofs_missed = 0

    @property
    def checked_in(self) -> bool:
        """Whether it is among the Consumers that are alive, as others see it."""
        return self.said_to_hear is not None

    def wants_look(self) -> bool:
        """Return whether it is time to look for jobs."""
        return self.draining or self.calls.wants_look() or bool(self.plan.suspects.remembered())

    def until_look(self) -> float:
        """Return the seconds until it is time to look for jobs."""
        return max(0.0, self.calls.next_look() - time.monotonic())

    @property
    def proven(self) -> bool:
        """Whether some claim has worked: what fails from then on is the database's health, and no mistake."""
        return self.calls.has_looked

    def works(self) -> None:
        """Note that the database has answered a claim."""
        self.crew.pace.succeeded()

    def open(self) -> Any:
        """Return a new session.

        To make one asks no database: what goes wrong before anything has worked is the program's mistake, such as a
        factory that only works in the main thread.
        """
        try:
            return open_session(self.factory)
        except Exception as error:
            if not self.proven:
                self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """End with an error, which ``run()`` raises."""
        self.error = self.error or error
        self.stop()

    @property
    def heartbeat(self) -> float:
        """The seconds between extensions of the leases."""
        return self.plan.lease.total_seconds() / HEARTBEATS_A_LEASE

    def until_next_duty(self) -> float:
        """Return the seconds until the keeper has something to look at, if nobody wakes it before."""
        if not self.proven:
            return _REST_AT_WORK
        now, crew, calls = time.monotonic(), self.crew, self.calls
        # Set before it is asked whether there is work: whoever begins some after that wakes the keeper.
        crew.keeper_dozes = now - self._busy_at >= _AFTER_WORK
        told = min(calls.until_outlook(), calls.until_proof(), calls.sweeps.until_due(hears=calls.hears))
        wait = min(self.agenda.wait(now), told, _LONGEST_DOZE)
        busy = crew.busy_since is not None
        if not crew.is_found_at_rest() or busy:
            self._busy_at = now
        elif crew.keeper_dozes:
            return max(wait, 0.02)
        if self.plan.timeout is not None:
            wait = min(wait, self.plan.timeout / 4)
        return max(min(wait, _REST_AT_WORK), 0.02)
