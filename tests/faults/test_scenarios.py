"""Every scenario with real processes, for every strategy and for the sync and the async API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.consumer.conftest import APIS
from tests.consumer.models import STRATEGIES
from tests.faults.conftest import MakeHarness
from tests.faults.scenarios import CRASHES_SERVER, ONE_API, SCENARIOS, STRATEGIES_OF

pytestmark = pytest.mark.once


def combinations() -> Iterator[Any]:
    """Return the combinations of scenario, strategy and API; all but a few of each scenario are marked ``thorough``.

    Each scenario runs under the strategy with leases and under one that holds a transaction, with one API each. Every
    third one runs for rows that are their own messages as well. Strategies and APIs alternate from scenario to
    scenario, so each strategy runs with both APIs.
    """
    for row, name in enumerate(SCENARIOS):
        strategies = STRATEGIES_OF.get(name, (*STRATEGIES, "own_message"))
        left_out = {"delete_returning": row % 2 == 0, "batch_select": row % 2 == 1, "own_message": row % 3 > 0}
        for column, strategy in enumerate(strategies):
            first, second = APIS if (row + column) % 2 == 0 else APIS[::-1]
            is_left_out = len(strategies) > 2 and left_out.get(strategy, False)
            yield pytest.param(name, strategy, first, marks=pytest.mark.thorough if is_left_out else ())
            if len(strategies) == 1:
                yield name, strategy, second
            # Rows that are their own messages take the same path as rows with a message, so one API suffices.
            elif name not in ONE_API and strategy != "own_message":
                yield pytest.param(name, strategy, second, marks=pytest.mark.thorough)


@pytest.mark.each_value
@pytest.mark.parametrize(("scenario", "strategy", "api"), list(combinations()))
def test_guarantees_hold_under_faults(make_harness: MakeHarness, scenario: str, strategy: str, api: str) -> None:
    with make_harness(strategy, api, own_server=scenario in CRASHES_SERVER) as harness:
        SCENARIOS[scenario](harness)
