"""Code around each call of a handler, and what it can learn about the attempt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.exc import ConfigurationError, HandlerSignal, StatementError
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.mixin import queue_spec, spec_of
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.run import Key, Run


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a job, as its middleware sees it."""

    queue: str
    key: Key
    """The primary key of the job, as a tuple."""
    number: int
    """The number of the attempt, from 1."""
    max_attempts: int
    traceparent: str | None
    """The trace of the transaction that enqueued the job; None if it is unknown, or the queue does not store it."""


def attempt_of(job: Any) -> Attempt:
    """Return the attempt for which a Consumer runs ``job``.

    ::

        def send(session: Session, email: Email) -> None:
            print(attempt_of(email).number, "of", attempt_of(email).max_attempts)

        Consumer(Email, send, sessions).run()

    :param job: one job; with ``batch=True`` middleware gets a list, whose jobs have an attempt each.
    :raises StatementError: if the job was not claimed, or for anything else.
    """
    run = _run_of(job, "attempt_of")
    return Attempt(spec_of(type(job)).name, run.key, run.attempt, run.max_attempts, run.traceparent)


def note(job: Any, values: Mapping[str, Any]) -> None:
    """Note something about the attempt of a job: the events of its end have it as ``event.notes``.

    It is kept in the memory of this process until then, and is not stored.

    ::

        def send(session: Session, email: Email) -> None:
            note(email, {"server": "mx1"})

        consumer = Consumer(Email, send, sessions)
        consumer.on("completed", lambda event: print(event.notes["server"]))
        consumer.run()

    :param job: a job, or the list of jobs that middleware gets with ``batch=True``: it is noted about each.
    :raises StatementError: if a job was not claimed, or for anything else.
    """
    for each in job if isinstance(job, list) else [job]:
        run = _run_of(each, "note")
        # A new dict: an event of an earlier end may be read by another thread.
        run.notes = {**(run.notes or {}), **values}


def seconds_waited(job: Any) -> float | None:
    """Return the seconds since a job was due, or was enqueued if that was later, by the clock of this machine.

    None if the model has neither ``run_at`` nor ``created_at``, or stores them without a time zone: it is unknown of
    which one they are.

    ::

        def send(session: Session, email: Email) -> None:
            print("waited", seconds_waited(email), "seconds")

        Consumer(Email, send, sessions).run()
    """
    _check_job(job, "seconds_waited")
    spec, values = spec_of(type(job)), job.__dict__
    # Not by getattr(), which would load an attribute that has expired.
    known = [values.get(spec.attributes.get(role, "")) for role in ("run_at", "created_at")]
    moments = [each for each in known if isinstance(each, datetime) and each.tzinfo is not None]
    if not moments:
        return None
    return max(0.0, (datetime.now(UTC) - max(moments)).total_seconds())


def waits_of(jobs: Iterable[Any]) -> Iterator[float]:
    """Return the seconds that jobs have waited, of those whose handler is called for the first time in their attempt.

    Jobs of a batch that has failed as a whole are tried again, each by itself.
    """
    for job in jobs:
        run = run_of(job)
        waited = seconds_waited(job) if run is None or run.calls <= 1 else None
        if waited is not None:
            yield waited


def _check_job(job: Any, what: str) -> None:
    if isinstance(job, list):
        msg = f"{what}(list): give one job; with batch=True the handler and its middleware get a list of jobs"
        raise StatementError(msg)
    if queue_spec(type(job)) is None:
        msg = f"{what}({job!r}): give a job, an instance of a queue class"
        raise StatementError(msg)


def _run_of(job: Any, what: str) -> Run:
    _check_job(job, what)
    run = run_of(job)
    if run is None:
        msg = f"{what}({type(job).__name__}): the job was not claimed; give the job that the handler gets"
        raise StatementError(msg)
    return run


def surround(consumer: ConsumerBase, manager: Callable[[Any], AbstractContextManager[object]]) -> None:
    """Enter ``manager(job)`` before each call of the handler, and exit it when the handler has returned or raised.

    It is a middleware outside of those that the Consumer has. One function is for a Consumer and an AsyncConsumer, as
    long as it waits for nothing.

    An exception of the manager itself is logged and changes nothing else, as telemetry must not fail jobs. It may raise
    ``Retry``, ``Snooze``, ``Fail`` and the other signals of handlers.

    ::

        @contextmanager
        def measure(email: Email) -> Iterator[None]:
            began = datetime.now(UTC)
            yield
            print(email.to, datetime.now(UTC) - began)

        consumer = Consumer(Email, send, sessions)
        surround(consumer, measure)
        consumer.run()

    :param consumer: a Consumer or an AsyncConsumer.
    :param manager: is called with what the handler gets: a job, or a list of jobs with ``batch=True``.
    :raises ConfigurationError: for anything but a Consumer and a callable.
    """
    check_consumer(consumer, "surround")
    if not callable(manager):
        msg = f"surround(consumer, {manager!r}): give a function that returns a context manager, manager(job)"
        raise ConfigurationError(msg)

    def call_inside(job: Any, call: Callable[[], Any]) -> Any:
        with _Harmless(manager, job, consumer.queue):
            return call()

    async def await_inside(job: Any, call: Callable[[], Awaitable[Any]]) -> Any:
        with _Harmless(manager, job, consumer.queue):
            return await call()

    consumer.add_middleware(await_inside if consumer.is_async else call_inside)


def check_consumer(consumer: object, what: str) -> None:
    """Refuse anything but a Consumer or an AsyncConsumer; ``what`` is the function to which it was given."""
    if not isinstance(consumer, ConsumerBase):
        msg = f"{what}({consumer!r}): give a Consumer or an AsyncConsumer"
        raise ConfigurationError(msg)


class _Harmless:
    """A context manager whose own errors are logged, so that they cost no attempt."""

    __slots__ = ("_argument", "_entered", "_make", "_queue")

    def __init__(self, make: Callable[[Any], AbstractContextManager[object]], argument: Any, queue: str) -> None:
        self._make, self._argument, self._queue = make, argument, queue
        self._entered: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        try:
            made = self._make(self._argument)
            made.__enter__()
        except HandlerSignal:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the job is run
            self._log(error)
        else:
            self._entered = made

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if self._entered is None:
            return False
        try:
            return bool(self._entered.__exit__(kind, error, at))
        except HandlerSignal:
            raise
        except Exception as own:  # noqa: BLE001 - whatever it is, the result of the handler stays what it is
            if own is not error:
                self._log(own)
            return False

    def _log(self, error: Exception) -> None:
        text = "queue %s: telemetry around a handler raised %s: %s; the job is not affected"
        kind = type(error).__name__
        extra = fields("telemetry_failed", queue=self._queue, error_kind=kind)
        logger.error(text, self._queue, kind, error, exc_info=error, extra=extra)
