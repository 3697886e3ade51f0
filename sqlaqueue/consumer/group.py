"""Several Consumers of one process: begun together, ended together, by a signal or by the first error. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from sqlaqueue.consumer.base import ConsumerBase
from sqlaqueue.consumer.sessions.connection_checks import check_shared_pool
from sqlaqueue.consumer.signals import signal_handlers
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger


class ConsumerGroup:
    """The Consumers that one call of ``run_all()`` runs.

    :raises ConfigurationError: when they are none, not of the kind, or not different ones.
    """

    def __init__(self, kind: type[ConsumerBase], consumers: Sequence[Any]) -> None:
        name = kind.__name__
        for consumer in consumers:
            if not isinstance(consumer, kind):
                msg = f"{name}.run_all({consumer!r}): give it {name}s, one after the other: {name}.run_all(one, other)"
                raise ConfigurationError(msg)
        if not consumers:
            msg = f"{name}.run_all(): give at least one {name}"
            raise ConfigurationError(msg)
        if len({id(consumer) for consumer in consumers}) < len(consumers):
            msg = f"{name}.run_all(): one of the {name}s is given twice; make another one, or raise its concurrency"
            raise ConfigurationError(msg)
        if len({consumer.handles_signals for consumer in consumers}) > 1:
            msg = f"{name}.run_all(): signals=False is given to some only; signals stop all of them, or none"
            raise ConfigurationError(msg)
        self.consumers: Sequence[Any] = consumers
        self.error: BaseException | None = None
        self._stopped = False

    def check_pools(self, engines: Sequence[sa.Engine]) -> None:
        """Refuse a pool that is too small for all Consumers that share it.

        :param engines: those of the Consumers, in their order.
        """
        for engine in dict.fromkeys(engines):
            sharing = [one for one, its in zip(self.consumers, engines, strict=True) if its is engine]
            check_shared_pool(engine, sharing, "the Consumers of run_all()")

    def stop(self) -> None:
        """Stop all of them, those as well that have not begun."""
        # In this order: one that is about to begin either sees the word, or can be told.
        self._stopped = True
        for consumer in self.consumers:
            consumer.stop()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have a signal stop all of them meanwhile, and those that begin after a stop end at once."""
        for consumer in self.consumers:
            consumer.stop_requested = lambda: self._stopped
        try:
            with signal_handlers.stop_on_signal(self.stop, wanted=self.consumers[0].handles_signals):
                yield
        finally:
            for consumer in self.consumers:
                consumer.stop_requested = None
        if self.error is not None:
            raise self.error

    def failed(self, consumer: ConsumerBase, error: BaseException) -> None:
        """Note that one has ended with an error, and stop the others."""
        kind = type(error).__name__
        extra = fields("consumer_failed", queue=consumer.queue, error_kind=kind)
        if self.error is None:
            self.error = error
            logger.error("%r ended with %s: %s; the others are stopped", consumer, kind, error, extra=extra)
        else:
            logger.error("%r ended with an error as well", consumer, exc_info=error, extra=extra)
        self.stop()
