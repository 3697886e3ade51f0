"""Results that several viewers share."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from sqlaqueue.web.context import shared_result


async def test_one_makes_it_and_the_others_wait() -> None:
    made: list[int] = []
    state: dict[str, Any] = {}

    async def make() -> int:
        made.append(1)
        await anyio.sleep(0.01)
        return len(made)

    results: list[int] = []

    async def ask() -> None:
        results.append((await shared_result(state, "key", 60, make)).value)

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(ask)
    assert results == [1] * 5


async def test_an_old_result_is_made_again_and_others_are_dropped() -> None:
    state: dict[str, Any] = {}
    numbers = iter(range(10))

    async def make() -> int:
        return next(numbers)

    assert (await shared_result(state, "other", -1, make)).value == 0
    assert [(await shared_result(state, "key", seconds, make)).value for seconds in (-1, -1, 60, 60)] == [1, 2, 3, 3]
    assert list(state["shared_results"]) == ["key"]


async def test_an_error_is_not_shared() -> None:
    state: dict[str, Any] = {}
    answers = iter([ValueError("x"), 5])

    async def make() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(ValueError, match="x"):
        await shared_result(state, "key", 60, make)
    assert (await shared_result(state, "key", 60, make)).value == 5
