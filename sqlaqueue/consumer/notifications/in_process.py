"""Notifications within this process, of a database that sends none to other processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import sqlalchemy as sa

from sqlaqueue.consumer.notifications.subscriptions import Subscriber
from sqlaqueue.notify_payloads import parse
from sqlaqueue.sql.engine import engine_of

_ends: dict[Subscriber, Callable[[], None]] = {}


def sends_in_process(engine: sa.Engine) -> bool:
    """Return whether the notifications of an engine's database stay in the process of the sender."""
    return engine_of(engine.dialect) is not None


def subscribe(
    engine: sa.Engine, channel: str, subscriber: Subscriber, loop: asyncio.AbstractEventLoop | None = None
) -> None:
    """Deliver what transactions of this process send on ``channel`` to ``subscriber``.

    :param loop: the event loop in which the subscriber is called; None if any thread may call it.
    """
    other = engine_of(engine.dialect)
    if other is None:
        return

    def deliver(name: str, text: str) -> None:
        payload = parse(text) if name == channel else None
        if payload is None:
            return
        if loop is None:
            subscriber.receive(payload)
            return
        # The loop may have ended a moment ago.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(subscriber.receive, payload)

    _ends[subscriber] = other.subscribe(engine, deliver)


def unsubscribe(subscriber: Subscriber) -> None:
    """Deliver nothing more to ``subscriber``."""
    end = _ends.pop(subscriber, None)
    if end is not None:
        end()


@contextlib.contextmanager
def woken_by(
    engine: sa.Engine, channel: str, subscriber: Subscriber, loop: asyncio.AbstractEventLoop | None = None
) -> Iterator[None]:
    """Deliver them in a block, if the engine is one that sends them in its process."""
    subscribe(engine, channel, subscriber, loop)
    try:
        yield
    finally:
        unsubscribe(subscriber)
