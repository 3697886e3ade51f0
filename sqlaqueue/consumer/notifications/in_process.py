"""Wake-ups within this process, for a database that sends no notifications to other processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa

from sqlaqueue.consumer.notifications.subscriptions import Subscriber
from sqlaqueue.notify_payloads import parse
from sqlaqueue.queue.engine import engine_of


@contextlib.contextmanager
def woken_by(
    engine: sa.Engine, channel: str, subscriber: Subscriber, loop: asyncio.AbstractEventLoop | None = None
) -> Iterator[None]:
    """Deliver what transactions of this process send on ``channel``, if the engine is one that can send it.

    :param loop: the event loop in which the subscriber is called; None if any thread may call it.
    """
    other = engine_of(engine.dialect)
    if other is None:
        yield
        return
    receive: Callable[[Any], object] = subscriber.receive
    if loop is not None:

        def receive(payload: Any) -> None:
            # The loop may have ended a moment ago.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(subscriber.receive, payload)

    def deliver(name: str, text: str) -> None:
        payload = parse(text) if name == channel else None
        if payload is not None:
            receive(payload)

    end = other.subscribe(engine, deliver)
    try:
        yield
    finally:
        end()
