"""Waits for several things at the same time."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import anyio

A = TypeVar("A")
B = TypeVar("B")


async def both(one: Awaitable[A], other: Awaitable[B]) -> tuple[A, B]:
    """Return the results of two awaitables, which are awaited at the same time.

    :raises Exception: what the first of them raises, if one does, as it is; a task group would wrap it.
    """
    ones, others, errors = list[A](), list[B](), list[Exception]()

    async def keep(awaitable: Awaitable[A | B], results: list[A] | list[B]) -> None:
        try:
            results.append(await awaitable)  # type: ignore[arg-type]  # each list has the results of its awaitable
        except Exception as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(keep, one, ones)
        group.start_soon(keep, other, others)
    if errors:
        raise errors[0]
    return ones[0], others[0]
