"""A context manager around each call of a handler, for both kinds of Consumers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.exc import ConfigurationError, HandlerSignal
from sqlaqueue.log import fields, logger


def surround(consumer: ConsumerBase, manager: Callable[[Any], AbstractContextManager[object]]) -> None:
    """Enter ``manager(job)`` before each call of the handler, and exit it when the handler has returned or raised.

    It is a middleware outside of those that the Consumer has. One function serves a Consumer and an AsyncConsumer, as
    long as it waits for nothing.

    An exception of the manager itself is logged and changes nothing else, as telemetry must not fail jobs. It may raise
    ``Retry``, ``Snooze``, ``Fail`` and the other signals of handlers.

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
    """Refuse anything but a Consumer or an AsyncConsumer.

    :param what: the name of the function to which it was given, for the error.
    :raises ConfigurationError: for anything else.
    """
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
        except Exception as own:  # noqa: BLE001 - as above; the result of the handler stays what it is
            if own is not error:
                self._log(own)
            return False

    def _log(self, error: Exception) -> None:
        text = "queue %s: telemetry around a handler raised %s: %s; the job is not affected"
        kind = type(error).__name__
        extra = fields("telemetry_failed", queue=self._queue, error_kind=kind)
        logger.error(text, self._queue, kind, error, exc_info=error, extra=extra)
