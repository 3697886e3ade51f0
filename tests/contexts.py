"""The context of a Consumer that does not run, for tests of single operations."""

from __future__ import annotations

from typing import Any

from sqlaqueue.consumer.configuration.settings import make_settings
from sqlaqueue.consumer.configuration.statements import ConsumerStatements, make_statements
from sqlaqueue.consumer.context import ConsumerContext, ConsumerParts


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


def make_context(model: Any, *, session_factory: Any = None, **options: Any) -> ConsumerContext:
    """Return the context of a Consumer with these options."""
    settings = make_settings(model, **options)
    parts = ConsumerParts(settings, make_statements(settings))
    return ConsumerContext("test", parts, session_factory, IdleRunner(), draining=False)


def statements_of(model: Any, **options: Any) -> ConsumerStatements:
    """Return the statements of a Consumer with these options."""
    return make_statements(make_settings(model, **options))
