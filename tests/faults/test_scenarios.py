"""The guarantees under faults: every scenario of jobs, and a few random rounds of queues under flow control.

``python -m tests.faults`` runs more rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.consumer.conftest import APIS
from tests.consumer.models import STRATEGIES
from tests.faults.key_queues import ACTIONS, FAULTS, Configuration
from tests.faults.key_rounds import run_round
from tests.faults.scenarios import CRASHES_SERVER, ONE_API, SCENARIOS, STRATEGIES_OF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import MakeHarness
    from tests.servers import Database


def combinations() -> Iterator[Any]:
    """Yield scenarios with strategies and APIs; by default each has one of both, in turn, and all in `full`."""
    for row, name in enumerate(SCENARIOS):
        strategies = STRATEGIES_OF.get(name, (*STRATEGIES, "own_message"))
        for column, strategy in enumerate(strategies):
            apis = APIS if (row // len(strategies) + column) % 2 == 0 else APIS[::-1]
            # Rows that are their own messages take the same path as rows with a message, so one API suffices.
            if len(strategies) > 1 and (name in ONE_API or strategy == "own_message"):
                apis = apis[:1]
            for api in apis:
                in_turn = column == row % len(strategies) and api == apis[0]
                yield pytest.param(name, strategy, api, marks=() if in_turn else pytest.mark.thorough)


@pytest.mark.once
@pytest.mark.parametrize(("scenario", "strategy", "api"), list(combinations()))
def test_guarantees_hold_under_faults(make_harness: MakeHarness, scenario: str, strategy: str, api: str) -> None:
    with make_harness(strategy, api, own_server=scenario in CRASHES_SERVER) as harness:
        SCENARIOS[scenario](harness)


# -- a few rounds of random faults on queues under flow control; ``python -m tests.faults`` runs more --------------
ROUNDS = {
    "limits": Configuration(
        1, limits=("tenant", "queue"), jobs=60, seconds=1, faults=("kill", "pause"), actions=ACTIONS, customers=5
    ),
    "order and rate": Configuration(
        2,
        order="block",
        rates=((100, 1.0, None, 5),),
        jobs=60,
        seconds=1,
        faults=("terminate",),
        payloads=("ok", "flaky", "retry", "snooze", "throttle"),
        actions=("requeue", "claim", "settle", "cancel"),
    ),
    "slots and order": Configuration(
        4,
        strategy="batch_select",
        limits=("tenant", "queue"),
        order="cancel",
        jobs=60,
        seconds=1,
        faults=("kill", "terminate"),
        actions=("cancel", "requeue", "claim", "limit", "delete"),
    ),
    "reservations and turns": Configuration(
        5,
        strategy="delete_row",
        rates=((100, 1.0, None, 5),),
        fair=1,
        limits=("number",),
        jobs=60,
        seconds=1,
        faults=("kill",),
        actions=("cancel", "requeue", "delete"),
    ),
    "turns": Configuration(3, fair=1, limits=("queue",), jobs=80, seconds=0.5, priorities=True, customers=40),
}


@pytest.mark.once
@pytest.mark.thorough
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_of_faults(database: Database, name: str) -> None:
    assert set(FAULTS) >= set(ROUNDS[name].faults)
    result = run_round(ROUNDS[name], database)
    assert not result.violations, str(result)
    assert result.counts["runs"] > 30
