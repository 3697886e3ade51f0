"""A few rounds of random faults on queues under flow control; ``python -m tests.faults`` runs more."""

from __future__ import annotations

import pytest

from tests.faults.key_queues import ACTIONS, FAULTS, Configuration
from tests.faults.key_rounds import run_round
from tests.servers import Database

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

pytestmark = pytest.mark.once


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_of_faults(database: Database, name: str) -> None:
    assert set(FAULTS) >= set(ROUNDS[name].faults)
    result = run_round(ROUNDS[name], database)
    assert not result.violations, str(result)
    assert result.counts["runs"] > 30
