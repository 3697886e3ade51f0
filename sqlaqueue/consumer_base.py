"""What Consumer and AsyncConsumer have in common: arguments, checks, listeners, what is due when."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import Pool

from sqlaqueue.backoff import Delay, RetryPolicy, seconds
from sqlaqueue.crew import Crew
from sqlaqueue.events import Announcer, EventName, Listener
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.pace import HEARTBEATS_A_LEASE, Agenda, Pace
from sqlaqueue.plan import make_plan


class ConsumerBase:
    """The part of a Consumer that neither waits nor talks to a database."""

    def __init__(
        self,
        model: Any,
        handler: Any,
        session_factory: Any,
        *,
        batch_size: int = 100,
        concurrency: int = 1,
        poll_interval: Delay = 1.0,
        lease: Delay | None = None,
        timeout: Delay | None = None,
        grace: Delay = 30.0,
        retry: RetryPolicy | None = None,
        name: str | None = None,
        batch: bool = False,
    ) -> None:
        self._check_handler(handler, batch)
        self._plan = make_plan(
            model,
            batch_size=batch_size,
            concurrency=concurrency,
            lease=lease,
            timeout=timeout,
            retry=retry,
            name=name,
            batch=batch,
        )
        interval = seconds(poll_interval, "Consumer(poll_interval=...)")
        if interval <= 0:
            msg = f"Consumer(poll_interval={poll_interval!r}): give more than zero seconds, or the database gets no rest"
            raise ConfigurationError(msg)
        self._handler = handler
        self._factory = session_factory
        self._grace = seconds(grace, "Consumer(grace=...)")
        self._announcer = Announcer()
        self._crew = Crew(self._plan, Pace(batch_size, concurrency, interval), self._announcer)
        self._agenda = Agenda()
        self._draining = False
        self._proven = False
        """Some claim has worked: what fails from now on is the database's health, not a mistake in the program."""

    def on(self, event: EventName, listener: Listener) -> None:
        """Call ``listener`` with a :class:`~sqlaqueue.JobEvent` whenever ``event`` happens.

        Listeners run in the thread or task that makes the event happen; keep them short. One that raises is logged.

        :raises ConfigurationError: for a name that is no event.
        """
        self._announcer.add(event, listener)

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._plan.spec.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.queue!r}, {self._plan.spec.config.strategy!r}>"

    def _check_handler(self, handler: Any, batch: bool) -> None:  # noqa: FBT001 - passed on
        if not callable(handler):
            msg = f"{type(self).__name__}(handler={handler!r}): a handler is a callable, handler(session, {'jobs' if batch else 'job'})"
            raise ConfigurationError(msg)
        try:
            inspect.signature(handler).bind(None, None)
        except TypeError as error:
            msg = (
                f"{type(self).__name__}: the handler {_name(handler)}{inspect.signature(handler)} is called as "
                f"{_name(handler)}(session, {'jobs' if batch else 'job'}): {error}"
            )
            raise ConfigurationError(msg) from None
        except ValueError:
            return  # a callable without a signature, such as some built-ins; the call will tell

    def _check_pool(self, pool: Pool) -> None:
        """Refuse a pool that has fewer connections than the handlers and the Consumer itself may need at once."""
        size: Callable[[], int] | None = getattr(pool, "size", None)
        overflow = getattr(pool, "_max_overflow", None)
        if size is None or overflow is None or overflow < 0:
            return
        needed, there = self._plan.concurrency + 1, size() + overflow
        if there < needed:
            msg = (
                f"{type(self).__name__}(concurrency={self._plan.concurrency}) needs {needed} connections, one for each "
                f"handler and one to tend the queue, and the engine's pool allows {there}; use "
                f"create_engine(..., pool_size={needed}) or lower concurrency"
            )
            raise ConfigurationError(msg)

    # -- what is due when ------------------------------------------------------------------------------------

    def _start_agenda(self) -> None:
        now = time.monotonic()
        self._plan.stopping = False
        if self._plan.has_leases:
            self._agenda.set("heartbeat", now + self._heartbeat)
        self._agenda.set("sweep", now)
        self._agenda.set("reconcile", now)

    @property
    def _heartbeat(self) -> float:
        return self._plan.lease.total_seconds() / HEARTBEATS_A_LEASE

    def _reconciled(self, began: float) -> None:
        done = time.monotonic()
        self._agenda.set("reconcile", done + self._crew.pace.reconcile(done - began))

    def _keeper_wait(self) -> float:
        """Return the seconds until the keeper has something to look at."""
        wait = self._agenda.wait(time.monotonic())
        if self._crew.has_finished or (self._plan.timeout is not None and self._crew.running()):
            wait = min(wait, 0.1)
        return max(wait, 0.01)


def is_programs_fault(error: Exception) -> bool:
    """Return whether ``error`` tells of a mistake in the program, such as a missing table, and not of the database."""
    if isinstance(error, sa.exc.ProgrammingError):
        return True
    return not isinstance(error, sa.exc.DBAPIError | sa.exc.TimeoutError | OSError)


def _name(handler: Any) -> str:
    return str(getattr(handler, "__name__", type(handler).__name__))
