"""Contexts of Consumers without a database, for tests of what workers decide."""

from __future__ import annotations

from sqlaqueue import Consumer
from sqlaqueue.consumer.claiming.batch_sizer import BatchSizer
from sqlaqueue.consumer.context import ConsumerContext
from tests.consumer.models import models
from tests.consumer.test_arguments import handler, sessions


class NoRunner:
    """A runner without threads or tasks."""

    can_interrupt = False

    def wake_workers(self, number: int) -> None:
        """Wake none."""

    def wake_poller(self) -> None:
        """Wake none."""

    def wake_maintenance(self) -> None:
        """Wake none."""

    def stop(self) -> None:
        """Stop nothing."""

    def listen(self) -> None:
        """Do not listen."""

    def reconnect(self) -> None:
        """Do not listen."""


def make_context(*, concurrency: int = 10, duration: float = 0.1) -> ConsumerContext:
    """Return the context of a Consumer with leases.

    :param duration: the seconds that its handlers have taken so far.
    """
    parts = Consumer(models("update_status").job, handler, sessions, concurrency=concurrency)._parts
    parts.sizer = BatchSizer(100, concurrency)
    parts.sizer.record_calls(duration, unused=True)
    return ConsumerContext("Consumer", parts, sessions, NoRunner(), draining=False)
