"""Several Consumers of one process: begun together, ended together, by a signal or by the first error. No I/O."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.serving.base import ConsumerBase, pool_limit
from sqlaqueue.serving.signals import doorbell

logger = logging.getLogger("sqlaqueue")


class Together:
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
        self.consumers: Sequence[Any] = consumers
        self.error: BaseException | None = None
        self._stopped = False

    def check_pools(self, engines: Sequence[sa.Engine]) -> None:
        """Refuse a pool that is too small for all Consumers that share it.

        :param engines: those of the Consumers, in their order.
        """
        needed: Counter[sa.Engine] = Counter()
        for consumer, engine in zip(self.consumers, engines, strict=True):
            needed[engine] += consumer.connections
        for engine, number in needed.items():
            limit = pool_limit(engine.pool)
            if limit is not None and limit < number:
                sharing = [repr(one) for one, its in zip(self.consumers, engines, strict=True) if its is engine]
                msg = (
                    f"run_all() needs {number} connections for the Consumers that share this engine "
                    f"({', '.join(sharing)}), and its pool allows {limit}; use create_engine(..., pool_size={number})"
                )
                raise ConfigurationError(msg)

    def stop(self) -> None:
        """Stop all of them, those as well that have not begun."""
        # In this order: one that is about to begin either sees the word, or can be told.
        self._stopped = True
        for consumer in self.consumers:
            consumer.stop()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Have a signal stop all of them meanwhile, and those that begin after a stop end at once."""
        for consumer in self.consumers:
            consumer.told_to_stop = lambda: self._stopped
        try:
            with doorbell.answered_by(self.stop):
                yield
        finally:
            for consumer in self.consumers:
                consumer.told_to_stop = None
        if self.error is not None:
            raise self.error

    def failed(self, consumer: ConsumerBase, error: BaseException) -> None:
        """Note that one has ended with an error, and stop the others."""
        if self.error is None:
            self.error = error
            logger.error("%r ended with %s: %s; the others are stopped", consumer, type(error).__name__, error)
        else:
            logger.error("%r ended with an error as well", consumer, exc_info=error)
        self.stop()
