"""The context of a Consumer that does not run, for tests of single operations."""

from typing import Any

from sqlalchemy.orm import sessionmaker

from sqlaqueue import Consumer
from sqlaqueue.consumer.context import ConsumerContext, ConsumerParts
from sqlaqueue.consumer.pace import BatchSizer
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.consumer.statements import ConsumerStatements


class IdleRunner:
    """A runner without threads or tasks."""

    can_interrupt = False

    def wake_workers(self, number: int) -> None:
        """No worker waits."""

    def wake_poller(self) -> None:
        """No worker waits."""

    def wake_maintenance(self) -> None:
        """No maintenance waits."""

    def stop(self) -> None:
        """Nothing runs."""

    def listen(self) -> None:
        """There is no listener."""

    def reconnect(self) -> None:
        """There is no listener."""


def make_context(
    model: Any, *, session_factory: Any = None, duration: float | None = None, **options: Any
) -> ConsumerContext:
    """Return the context of a Consumer with these options.

    :param duration: the seconds that its handlers have taken so far.
    """
    parts = _parts(model, **options)
    if duration is not None:
        parts.sizer = BatchSizer(100, parts.settings.concurrency)
        parts.sizer.record_calls(duration, unused=True)
    return ConsumerContext("test", parts, session_factory, IdleRunner(), draining=False)


def settings_of(model: Any, **options: Any) -> ConsumerSettings:
    """Return the settings of a Consumer with these options."""
    return _parts(model, **options).settings


def statements_of(model: Any, **options: Any) -> ConsumerStatements:
    """Return the statements of a Consumer with these options."""
    return _parts(model, **options).statements


def _parts(model: Any, **options: Any) -> ConsumerParts:
    return Consumer(model, _handle, sessionmaker(), **options)._parts


def _handle(_session: Any, _job: Any) -> None:
    """No job is run."""
