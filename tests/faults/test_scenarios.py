"""Real processes under faults: every scenario, for every strategy and both Consumers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.consumer.conftest import COLOURS
from tests.consumer.models import STRATEGIES
from tests.faults.conftest import MakeScene
from tests.faults.scenarios import IN_TURN, ONLY, SCENARIOS

pytestmark = pytest.mark.once


def casts() -> Iterator[Any]:
    """Return who plays what: every scenario, the strategy, the Consumer.

    Each scenario is played under leases and under one of the strategies that hold a transaction, each with one of the
    two Consumers, and each third one by rows that are their own message; the rest is left to the session that runs
    everything. Whose turn it is changes from scenario to scenario, so that each strategy meets both Consumers.
    """
    for row, name in enumerate(SCENARIOS):
        strategies = ONLY.get(name, (*STRATEGIES, "own_message"))
        left_out = {"delete_returning": row % 2 == 0, "batch_select": row % 2 == 1, "own_message": row % 3 > 0}
        for turn, strategy in enumerate(strategies):
            first, second = COLOURS if (row + turn) % 2 == 0 else COLOURS[::-1]
            is_left_out = len(strategies) > 2 and left_out.get(strategy, False)
            yield pytest.param(name, strategy, first, marks=pytest.mark.thorough if is_left_out else ())
            if len(strategies) == 1:
                yield name, strategy, second
            # A row that is its own message is served as one that has a message: one Consumer shows it.
            elif name not in IN_TURN and strategy != "own_message":
                yield pytest.param(name, strategy, second, marks=pytest.mark.thorough)


@pytest.mark.parametrize(("name", "strategy", "colour"), list(casts()))
def test_the_queue_keeps_its_promises(make_scene: MakeScene, name: str, strategy: str, colour: str) -> None:
    with make_scene(strategy, colour, crash=name == "restarted") as scene:
        SCENARIOS[name](scene)
