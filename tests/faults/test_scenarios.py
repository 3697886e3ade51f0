"""Real processes under faults: every scenario, for every strategy and both Consumers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.consumer.conftest import COLOURS
from tests.consumer.models import STRATEGIES
from tests.faults.conftest import MakeScene
from tests.faults.scenarios import IN_TURN, ONLY, SCENARIOS

pytestmark = pytest.mark.once


def casts() -> Iterator[tuple[str, str, str]]:
    """Return who plays what: every scenario, the strategy, the Consumer."""
    for name in SCENARIOS:
        for turn, strategy in enumerate(ONLY.get(name, (*STRATEGIES, "own_message"))):
            # A row that is its own message is served as one that has a message: one Consumer shows it.
            one = name in IN_TURN or strategy == "own_message"
            for colour in [COLOURS[turn % 2]] if one else COLOURS:
                yield name, strategy, colour


@pytest.mark.parametrize(("name", "strategy", "colour"), list(casts()))
def test_the_queue_keeps_its_promises(make_scene: MakeScene, name: str, strategy: str, colour: str) -> None:
    with make_scene(strategy, colour, crash=name == "restarted") as scene:
        SCENARIOS[name](scene)
