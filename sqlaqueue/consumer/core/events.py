"""What a Consumer tells about its jobs, to listeners and to the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

from sqlaqueue.consumer.settling.outcomes import kind_of, text_of
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.keys import Key, key_text, key_value
from sqlaqueue.log import fields, logger, seconds_text
from sqlaqueue.queue.run import Run
from sqlaqueue.statements.claim import worker_name

EventName = Literal["claimed", "completed", "retried", "failed", "cancelled", "released", "rescued", "lease_lost"]


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One thing that happened to one job.

    An event follows the commit that made it true, except ``lease_lost``, which reports a result that was refused.
    """

    name: EventName
    queue: str
    key: Key
    """The job's primary key, as a tuple."""
    attempt: int | None = None
    """The number of this attempt, from 1; None for ``rescued``."""
    delay: float | None = None
    """Seconds until the job is due again, where it is held back."""
    error: BaseException | None = None
    """What the handler raised, with its traceback."""
    max_attempts: int | None = None
    """How many attempts the job has; None for ``rescued``."""
    started_at: datetime | None = None
    """When the handler was called, by this machine's clock; None where none was."""
    duration: float | None = None
    """For how many seconds the handler ran; None where none was called. Jobs of one batch share it."""


def make_event(name: EventName, queue: str, run: Run, delay: float | None, error: BaseException | None) -> JobEvent:
    """Return what happened to the job of a run."""
    started = duration = None
    if run.handler_started_at is not None:
        ago = time.monotonic() - run.handler_started_at
        started = datetime.now(UTC) - timedelta(seconds=ago)
        # A handler that goes on after its time has run for as long as this.
        duration = ago if run.duration is None else run.duration
    return JobEvent(name, queue, run.key, run.attempt, delay, error, run.max_attempts, started, duration)


EventListener = Callable[[JobEvent], object]

_LEVELS: dict[EventName, int] = {
    "failed": logging.ERROR,
    "retried": logging.WARNING,
    "lease_lost": logging.WARNING,
    "rescued": logging.WARNING,
}
_MOST_SHOWN = 300
"""Characters of an error in the line itself; all of it follows with its traceback."""


class EventEmitter:
    """Calls the listeners of a Consumer and writes its log.

    :param worker: returns the name of the worker, as jobs have it in ``claimed_by``.
    """

    def __init__(self, worker: Callable[[], str] = worker_name) -> None:
        self._listeners: dict[str, list[EventListener]] = {name: [] for name in get_args(EventName)}
        self._worker = worker

    def add(self, name: EventName, listener: EventListener) -> None:
        """Have ``listener`` called with each event of that name.

        :raises ConfigurationError: for a name that is no event.
        """
        if name not in self._listeners:
            msg = f"on({name!r}): there is no such event; there are {', '.join(self._listeners)}"
            raise ConfigurationError(msg)
        self._listeners[name].append(listener)

    def wants(self, name: EventName) -> bool:
        """Return whether anybody listens to an event, or the log has it."""
        return bool(self._listeners[name]) or logger.isEnabledFor(_LEVELS.get(name, logging.DEBUG))

    def emit(self, event: JobEvent) -> None:
        """Announce ``event``; a listener that raises is logged and never disturbs the work."""
        level = _LEVELS.get(event.name, logging.DEBUG)
        if logger.isEnabledFor(level):
            # A failed attempt has its traceback, whether or not there is another one.
            trace = event.error if event.name in {"failed", "retried"} else None
            said = _said(event)
            logger.log(
                level,
                "job %s of queue %s: %s",
                key_text(event.key),
                event.queue,
                said,
                exc_info=trace,
                extra=self._fields(event),
            )
        for listener in self._listeners[event.name]:
            try:
                listener(event)
            except BaseException:
                extra = self._fields(event) | {"event": "listener_failed"}
                logger.exception("a listener for %r failed", event.name, extra=extra)

    def _fields(self, event: JobEvent) -> dict[str, Any]:
        return fields(
            event.name,
            queue=event.queue,
            worker=self._worker(),
            job_key=key_value(event.key),
            attempt=event.attempt,
            max_attempts=event.max_attempts,
            delay=event.delay,
            duration=event.duration,
            error_kind=None if event.error is None else kind_of(event.error),
        )


def _said(event: JobEvent) -> str:
    """Return what happened to the job, in words."""
    attempt = f"attempt {event.attempt} of {event.max_attempts}"
    took = "" if event.duration is None else f" in {seconds_text(event.duration)}"
    # Some of these cost more than others, and only one is wanted.
    words: dict[EventName, Callable[[], str]] = {
        "claimed": lambda: f"claimed for {attempt}",
        "completed": lambda: f"completed{took}, {attempt}",
        "retried": lambda: f"{attempt} failed, next try {_when(event)}: {_error(event)}",
        "failed": lambda: f"{attempt} failed, no further try: {_error(event)}",
        "cancelled": lambda: f"cancelled: {_error(event)}",
        "released": lambda: f"released, due again {_when(event)}",
        "rescued": lambda: "rescued: the lease of its worker had expired",
        "lease_lost": lambda: f"the result of {attempt} is refused: its lease had passed to another run",
    }
    return words[event.name]()


def _when(event: JobEvent) -> str:
    return f"in {seconds_text(event.delay)}" if event.delay else "at once"


def _error(event: JobEvent) -> str:
    first, *_ = (text_of(event.error) or "no error").splitlines() or [""]
    return first if len(first) <= _MOST_SHOWN else f"{first[:_MOST_SHOWN]}..."
