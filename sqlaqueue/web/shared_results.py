"""Results that are expensive to make, and that several viewers share for some seconds."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import anyio
from anyio.lowlevel import RunVar

T = TypeVar("T")

_STATE = "shared_results"
_LOCKS: RunVar[dict[Any, anyio.Lock]] = RunVar("sqlaqueue_dashboard_locks")
"""Of each event loop, as a lock cannot be used by two."""


@dataclass(frozen=True)
class SharedResult(Generic[T]):
    """A result, and when it was made."""

    value: T
    made_at: datetime
    until: float


async def shared_result(
    state: dict[str, Any], key: Any, seconds: float, make: Callable[[], Awaitable[T]]
) -> SharedResult[T]:
    """Return what ``make`` returns, or what it has returned for the same key less than ``seconds`` ago.

    Only one request makes it at a time, and the others wait for it. An error is not shared.

    :param state: where the results of one dashboard are kept.
    :param key: all that the result depends on, such as the queues that the user sees.
    """
    results: dict[Any, SharedResult[T]] = state.setdefault(_STATE, {})
    async with _locks().setdefault((id(state), key), anyio.Lock()):
        found = results.get(key)
        if found is None or found.until < time.monotonic():
            value = await make()
            now = time.monotonic()
            for other in [name for name, each in results.items() if each.until < now]:
                results.pop(other, None)
            found = results[key] = SharedResult(value, datetime.now(UTC), now + seconds)
        return found


def _locks() -> dict[Any, anyio.Lock]:
    try:
        return _LOCKS.get()
    except LookupError:
        locks: dict[Any, anyio.Lock] = {}
        _LOCKS.set(locks)
        return locks
