"""Several Consumers of one process: started together, and stopped together by a signal or the first error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Self

import sqlalchemy as sa

from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.sessions.connection_checks import check_shared_pool
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.exc import ConfigurationError, HandlerNotStopped
from sqlaqueue.log import fields, logger

_LONGEST_WAIT = 600.0
"""Seconds between two checks of the threads: not every system interrupts a wait when a signal arrives."""


class ConsumerGroup:
    """Consumers of one process that stop together."""

    def __init__(self, consumers: Sequence[Any]) -> None:
        self.consumers: Sequence[Any] = consumers
        self.error: BaseException | None = None
        self._stopped = False

    @classmethod
    def of(cls, kind: type[ConsumerBase], consumers: Sequence[Any]) -> Self:
        """Return the group that one call of ``run_all()`` runs.

        :raises ConfigurationError: for no Consumer, one of the other kind, one given twice, or different ``signals=``.
        """
        name = kind.__name__
        for consumer in consumers:
            if not isinstance(consumer, kind):
                msg = f"{name}.run_all({consumer!r}): give {name}s as separate arguments: {name}.run_all(one, other)"
                raise ConfigurationError(msg)
        if not consumers:
            msg = f"{name}.run_all(): give at least one {name}"
            raise ConfigurationError(msg)
        if len({id(consumer) for consumer in consumers}) < len(consumers):
            msg = f"{name}.run_all(): one of the {name}s is given twice; make another one, or raise its concurrency"
            raise ConfigurationError(msg)
        if len({consumer.handles_signals for consumer in consumers}) > 1:
            msg = f"{name}.run_all(): signals=False is given to some only; a signal stops all of them or none"
            raise ConfigurationError(msg)
        return cls(consumers)

    def check_pools(self, engines: Sequence[sa.Engine]) -> None:
        """Refuse a pool that is too small for the Consumers that share it.

        :param engines: the engines of the Consumers, in their order.
        :raises ConfigurationError: if one is too small.
        """
        for engine in dict.fromkeys(engines):
            sharing = [one for one, used in zip(self.consumers, engines, strict=True) if used is engine]
            check_shared_pool(engine, sharing, "the Consumers of run_all()")

    def stop(self) -> None:
        """Stop all Consumers, including those that have not started yet."""
        # Set first: a Consumer that is starting either sees this value, or is running and can be stopped.
        self._stopped = True
        for consumer in self.consumers:
            consumer.stop()

    @contextmanager
    def running(self, *, signals: bool) -> Iterator[None]:
        """End Consumers that start after :meth:`stop` at once; at the end of the block, raise the first error.

        :param signals: whether SIGTERM and SIGINT stop the group.
        """
        for consumer in self.consumers:
            consumer.stop_requested = lambda: self._stopped
        try:
            with signal_handlers.stop_on_signal(self.stop, wanted=signals):
                yield
        finally:
            for consumer in self.consumers:
                consumer.stop_requested = None
        if self.error is not None:
            raise self.error

    def run_in_threads(self, runs: Sequence[tuple[str, Callable[[], object]]]) -> None:
        """Run functions, which must not raise, each in a thread of its own, until all have returned.

        :param runs: pairs of a thread's name and its function.
        """
        waker, running = Waker(), set(range(len(runs)))

        def run(number: int, function: Callable[[], object]) -> None:
            try:
                function()
            finally:
                running.discard(number)
                waker.wake()

        threads = [
            threading.Thread(target=copy_context().run, args=[run, number, function], name=name, daemon=True)
            for number, (name, function) in enumerate(runs)
        ]
        for thread in threads:
            thread.start()
        try:
            while running:
                waker.wait(_LONGEST_WAIT)
        except BaseException:
            self.stop()
            raise
        finally:
            for thread in threads:
                thread.join()
            waker.close()

    def failed(self, consumer: ConsumerBase, error: BaseException) -> None:
        """Store and log the error that a Consumer raised, and stop the others."""
        kind = type(error).__name__
        extra = fields("consumer_failed", queue=consumer.queue, error_kind=kind)
        if self.error is None:
            self.error = error
            logger.error("%r raised %s: %s; stopping the other Consumers", consumer, kind, error, extra=extra)
        else:
            logger.error("%r raised an error as well", consumer, exc_info=error, extra=extra)
            if isinstance(error, HandlerNotStopped):
                # The caller has to know, whatever else has failed.
                self.error = error
        self.stop()
