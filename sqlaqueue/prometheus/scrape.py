"""A scrape of several queues, as a routine for threads and tasks, and its last result."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from prometheus_client.core import Metric

from sqlaqueue.admin.queue_depth import DEFAULT_LIMIT
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.mixin import specs_by_name
from sqlaqueue.prometheus.gauges import SCRAPE_DURATION, SCRAPE_SUCCESS, Sample, families
from sqlaqueue.prometheus.reading import QueueReader, Reading, ReadOptions
from sqlaqueue.queue.config import is_count
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.spec import QueueSpec

DEFAULT_TIMEOUT = 2.0
"""Seconds after which the server cancels a statement of a scrape by default."""

DEFAULT_MAX_AGE = 10.0
"""Seconds for which the result of a scrape is served again by default."""

_LONGEST_TIMEOUT = 86400.0

_OF_ONE_NAME = (
    ", so their gauges could not be told apart; export each in a registry of its own, or set QueueConfig(name=...)"
)


@dataclass(frozen=True, kw_only=True)
class ScrapeOptions:
    """The options of a scrape, see :class:`~sqlaqueue.prometheus.QueueCollector`."""

    statement_timeout: float | timedelta = DEFAULT_TIMEOUT
    max_age: float | timedelta = DEFAULT_MAX_AGE
    count_limit: int = DEFAULT_LIMIT
    finished: bool = False


class Scrape:
    """Reads the gauges of several queues, one after the other.

    :param models: the queue classes.
    :param what: the class or function that was given them, for error messages.
    :raises NotAQueueError: if one of ``models`` is not a queue.
    :raises ConfigurationError: for an invalid option, and for two queues of one name.
    """

    def __init__(self, models: Iterable[type[Any]], what: str, options: ScrapeOptions) -> None:
        self.specs = list(specs_by_name(models, what, of_one_name=_OF_ONE_NAME).values())
        timeout = seconds(options.statement_timeout, f"{what}(statement_timeout=...)")
        if not 0 < timeout <= _LONGEST_TIMEOUT:
            msg = f"{what}(statement_timeout={options.statement_timeout!r}): give more than zero, and at most a day"
            raise ConfigurationError(msg)
        if not is_count(options.count_limit):
            msg = f"{what}(count_limit={options.count_limit!r}): give an integer of 1 or more"
            raise ConfigurationError(msg)
        self._max_age = seconds(options.max_age, f"{what}(max_age=...)")
        read = ReadOptions(statement_timeout=timeout, count_limit=options.count_limit, finished=bool(options.finished))
        tables = [(id(spec.table.metadata), spec.table.schema) for spec in self.specs]
        self._readers = [
            QueueReader(spec, read, has_schedules=tables.index(tables[number]) == number)
            for number, spec in enumerate(self.specs)
        ]
        self._failing: set[str] = set()
        self._last: list[Metric] = []
        self._expires = float("-inf")

    @property
    def cached(self) -> list[Metric] | None:
        """The result of the last scrape; None if it is too old."""
        return self._last if time.monotonic() < self._expires else None

    def routine(self) -> Generator[QueueReader, Reading, list[Metric]]:
        """Yield each reader, and return the metrics.

        The driver sends what :meth:`QueueReader.read` returns in a new session of the queue's database, or throws what
        that raised.
        """
        samples: list[Sample] = []
        for reader in self._readers:
            began = time.monotonic()
            try:
                reading = yield reader
            except ConfigurationError:
                raise  # a mistake of the program, such as a factory of another kind of sessions
            except Exception as error:  # noqa: BLE001 - the other queues are read nevertheless
                reading = Reading(errors=[error])
            samples += reading.samples
            samples.append(reader.sample(SCRAPE_SUCCESS, not reading.errors))
            samples.append(reader.sample(SCRAPE_DURATION, time.monotonic() - began))
            self._log(reader.spec, reading.errors)
        self._last = list(families(samples))
        self._expires = time.monotonic() + self._max_age
        return self._last

    def _log(self, spec: QueueSpec, errors: Sequence[Exception]) -> None:
        """Log the first failure, and the first success after it: a scrape is repeated every few seconds."""
        if not errors:
            if spec.name in self._failing:
                self._failing.discard(spec.name)
                extra = fields("scrape_recovered", queue=spec.name)
                logger.info("queue %s: its gauges can be read again", spec.name, extra=extra)
            return
        if spec.name not in self._failing:
            self._failing.add(spec.name)
            error = errors[0]
            kind, what = type(error).__name__, str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            extra = fields("scrape_failed", queue=spec.name, error_kind=kind)
            logger.warning("queue %s: its gauges cannot be read: %s: %s", spec.name, kind, what, extra=extra)
