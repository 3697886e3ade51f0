"""The events of jobs: a Consumer calls the application's event listeners and writes them to the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Literal, get_args

from sqlaqueue.consumer.core.errors import kind_of, text_of
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger, seconds_text
from sqlaqueue.queue.run import Key, Run, key_text, key_value
from sqlaqueue.statements.claim import worker_name

EventName = Literal["claimed", "completed", "retried", "failed", "cancelled", "released", "rescued", "lease_lost"]

_NO_NOTES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PollEvent:
    """A poll of a queue, emitted after the commit of its claim, even if it has found no job.

    ::

        def count(event: PollEvent) -> None:
            print(event.queue, event.jobs, "jobs in", event.duration, "seconds")

        consumer = Consumer(Email, send, sessions)
        consumer.on("polled", count)
    """

    queue: str
    jobs: int
    """The number of claimed jobs."""
    duration: float
    """Seconds from the first statement to the end of the last one; under a lease with the commit."""
    settled: int = 0
    """The number of runs that the same transaction has ended."""
    traceparents: tuple[str, ...] = ()
    """The traces of the claimed jobs, if the queue stores them."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A change of one job.

    An event is emitted after the commit that made the change, except ``lease_lost``, which reports a refused result.

    ::

        def report(event: JobEvent) -> None:
            print(event.key, "failed in attempt", event.attempt, "with", event.error)

        consumer = Consumer(Email, send, sessions)
        consumer.on("failed", report)
    """

    name: EventName
    queue: str
    key: Key
    """The primary key of the job, as a tuple."""
    attempt: int | None = None
    """The number of the attempt, from 1; None for ``rescued``."""
    delay: float | None = None
    """Seconds until the job is due again; None if its due time is unchanged, or it is finished."""
    error: BaseException | None = None
    """The exception that the handler raised, with its traceback; None if it raised none."""
    max_attempts: int | None = None
    """The job's maximum number of attempts; None for ``rescued``."""
    started_at: datetime | None = None
    """When the handler was called, by the clock of the worker's machine; None if it was not called."""
    duration: float | None = None
    """Seconds for which the handler ran; None if it was not called. The jobs of one batch share the value."""
    traceparent: str | None = None
    """The trace of the transaction that enqueued the job; None for ``rescued``, and if the queue does not store it."""
    notes: Mapping[str, Any] = field(default_factory=lambda: _NO_NOTES, repr=False, compare=False)
    """What middleware has noted about this attempt by :func:`~sqlaqueue.telemetry.note`."""


def make_event(name: EventName, queue: str, run: Run, delay: float | None, error: BaseException | None) -> JobEvent:
    started = duration = None
    if run.handler_started_at is not None:
        ago = time.monotonic() - run.handler_started_at
        started = datetime.now(UTC) - timedelta(seconds=ago)
        # Without a duration the handler is still running, after its timeout.
        duration = ago if run.duration is None else run.duration
    notes = _NO_NOTES if run.notes is None else run.notes
    event = (name, queue, run.key, run.attempt, delay, error, run.max_attempts, started, duration)
    return JobEvent(*event, traceparent=run.traceparent, notes=notes)


def is_attempt(event: JobEvent) -> bool:
    """Return whether an event is more than the release of a job whose handler was not called."""
    return event.name != "released" or event.started_at is not None


EventListener = Callable[[JobEvent], object]
PollListener = Callable[[PollEvent], object]

_LEVELS: dict[EventName, int] = {
    "failed": logging.ERROR,
    "retried": logging.WARNING,
    "lease_lost": logging.WARNING,
    "rescued": logging.WARNING,
}
_MAX_ERROR_LENGTH = 300
"""Characters of an error in the message of a record; the traceback contains all of it."""


class EventEmitter:
    """Calls the event listeners of a Consumer, and logs its events; ``worker`` returns the name of the worker."""

    def __init__(self, worker: Callable[[], str] = worker_name) -> None:
        self._listeners: dict[str, list[Callable[[Any], object]]] = {
            name: [] for name in (*get_args(EventName), "polled")
        }
        self._worker = worker

    def add(self, name: str, listener: Callable[[Any], object]) -> None:
        """Call ``listener`` with each event of this name, which must exist."""
        if name not in self._listeners:
            msg = f"on({name!r}): there is no such event; give one of {', '.join(self._listeners)}"
            raise ConfigurationError(msg)
        if not callable(listener):
            msg = f"on({name!r}, {listener!r}): give a function that is called with each event"
            raise ConfigurationError(msg)
        self._listeners[name].append(listener)

    @property
    def wants_polls(self) -> bool:
        return bool(self._listeners["polled"])

    def wants(self, name: EventName) -> bool:
        """Return whether an event has listeners or is logged, so that it is worth making."""
        return bool(self._listeners[name]) or logger.isEnabledFor(_LEVELS.get(name, logging.DEBUG))

    def emit(self, event: JobEvent) -> None:
        """Log an event and call its listeners; an exception of a listener is logged, and changes nothing else."""
        level = _LEVELS.get(event.name, logging.DEBUG)
        if logger.isEnabledFor(level):
            traceback = event.error if event.name in {"failed", "retried"} else None
            values = (event.queue, key_text(event.key), _description(event))
            logger.log(level, "queue %s: job %s: %s", *values, exc_info=traceback, extra=self._fields(event))
        self.call_listeners(event)

    def emit_poll(self, event: PollEvent) -> None:
        """Call the listeners of a poll; it is not logged."""
        self._call(
            "polled",
            event,
            lambda: fields("event_listener_failed", queue=event.queue, worker=self._worker(), count=event.jobs),
        )

    def call_listeners(self, event: JobEvent) -> None:
        """Call the listeners of an event without logging it."""
        self._call(event.name, event, lambda: self._fields(event) | {"event": "event_listener_failed"})

    def _call(self, name: str, event: JobEvent | PollEvent, extra: Callable[[], dict[str, Any]]) -> None:
        for listener in self._listeners[name]:
            try:
                # What it sets in context variables must not reach the next one.
                copy_context().run(listener, event)
            except BaseException:
                logger.exception("an event listener for %r failed", name, extra=extra())

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


def _description(event: JobEvent) -> str:
    attempt = f"attempt {event.attempt} of {event.max_attempts}"
    took = "" if event.duration is None else f" in {seconds_text(event.duration)}"
    # Functions, as only one of these texts is needed, and some take longer to make than others.
    texts: dict[EventName, Callable[[], str]] = {
        "claimed": lambda: f"claimed for {attempt}",
        "completed": lambda: f"completed{took}, {attempt}",
        "retried": lambda: f"{attempt} failed, next try {_when(event)}: {_error(event)}",
        "failed": lambda: f"{attempt} failed, no further try: {_error(event)}",
        "cancelled": lambda: f"cancelled: {_error(event)}",
        "released": lambda: f"released, due {_when(event)}",
        "rescued": lambda: "rescued: its lease expired",
        "lease_lost": lambda: f"the result of {attempt} is refused: the lease expired before it arrived",
    }
    return texts[event.name]()


def _when(event: JobEvent) -> str:
    return f"in {seconds_text(event.delay)}" if event.delay else "immediately"


def _error(event: JobEvent) -> str:
    first, *_ = (text_of(event.error) or "no error").splitlines() or [""]
    return first if len(first) <= _MAX_ERROR_LENGTH else f"{first[:_MAX_ERROR_LENGTH]}..."
