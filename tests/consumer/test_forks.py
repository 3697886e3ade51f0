"""Handlers that fork: the child never serves the queue, however it leaves the handler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from tests.consumer.bench import Bench
from tests.programs import wait_until

pytestmark = pytest.mark.once

ENDS = {"return": 0, "raise": 1, "exit": 7, "commit": 1, "statement": 1, "suspend": 0}
"""The ways in which a child leaves the handler, and the exit code of each."""


def test_a_child_that_returns_from_the_handler_is_ended(bench: Bench) -> None:
    children_are_ended(bench, ENDS)


def children_are_ended(bench: Bench, ends: Mapping[str, int]) -> None:
    """Assert that the children end with these codes, and that their parent does its jobs."""
    keys = [bench.enqueue(1, payload=way)[0] for way in ends for _ in range(2)]
    with bench.worker("forking", concurrency=2) as worker:
        wait_until(lambda: worker.has_ended or bench.states() == {"completed": len(keys)})
        assert not worker.has_ended, worker.lines[-20:]
        worker.signal(15)
        assert worker.await_end() == 0
    assert bench.effects() == dict.fromkeys(keys, 1)
    assert set(bench.attempts().values()) == {1}
    codes = Counter(worker.said("copy ended:"))
    assert codes == {f"{way} {code}": 2 for way, code in ends.items()}
    bench.assert_tidy()


def test_children_that_exit_in_the_handler_are_left_alone(bench: Bench) -> None:
    """By os._exit(), exec() and multiprocessing; SIGTERM ends them as well."""
    keys = [bench.enqueue(1, payload=way)[0] for way in ("_exit", "exec", "process", "pool", "terminate")]
    with bench.worker("with_children") as worker:
        wait_until(lambda: worker.has_ended or bench.states() == {"completed": len(keys)})
        worker.signal(15)
        assert worker.await_end() == 0
    assert bench.effects() == dict.fromkeys(keys, 1)
    assert sorted(worker.said("child:")) == ["_exit 5", "exec 6", "pool [1, 4, 9]", "process 8", "terminate -15"]
