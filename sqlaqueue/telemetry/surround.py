"""A context manager around each call of a handler, for both kinds of Consumers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from sqlaqueue.consumer.base import ConsumerBase


def surround(consumer: ConsumerBase, manager: Callable[[Any], AbstractContextManager[object]]) -> None:
    """Enter ``manager(job)`` before each call of the handler, and exit it when the handler has returned or raised.

    It is a middleware outside of those that the Consumer has. One function serves a Consumer and an AsyncConsumer, as
    long as it waits for nothing.

    :param manager: is called with what the handler gets: a job, or a list of jobs with ``batch=True``.
    """

    def call_inside(job: Any, call: Callable[[], Any]) -> Any:
        with manager(job):
            return call()

    async def await_inside(job: Any, call: Callable[[], Awaitable[Any]]) -> Any:
        with manager(job):
            return await call()

    consumer.add_middleware(await_inside if consumer.is_async else call_inside)
