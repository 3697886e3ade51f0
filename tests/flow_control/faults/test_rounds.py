"""A few rounds of random faults, and rounds without a safeguard, which the checker must report."""

from __future__ import annotations

import pytest

from tests.faults.fork_server import ForkServer
from tests.flow_control.faults.a_round import run_round
from tests.flow_control.faults.configuration import ACTIONS, FAULTS, Configuration
from tests.flow_control.faults.mutants import IN_DATABASE, IN_WORKERS
from tests.servers import Database

WORKERS = (("sync", 4, None, None), ("async", 4, None, None), ("sync", 2, 5, None))
BUSY = {"jobs": 400, "work": 0.002, "customers": 3, "documents": 3, "workers": WORKERS, "payloads": ("ok",)}
"""Many claims that compete for a few keys."""

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

MUTANTS = {
    "limit without a lock": ("limits", Configuration(1, limits=("number",), most=1, **BUSY)),
    "limit always one more": ("limits", Configuration(1, limits=("attribute",), **BUSY)),
    "limit counts in the snapshot of the statement": ("limits", Configuration(1, limits=("queue",), **BUSY)),
    "limit without the claim's own jobs": ("limits", Configuration(1, limits=("pair",), **BUSY)),
    "order is not checked": ("order", Configuration(1, order="continue", **BUSY | {"jobs": 100})),
    "order does not see failed jobs": (
        "order",
        Configuration(1, order="block", **BUSY | {"payloads": ("ok", "fails")}),
    ),
    "order does not see begun jobs": (
        "order",
        Configuration(1, order="continue", **BUSY | {"payloads": ("ok", "snooze"), "jobs": 100}),
    ),
    "a failed job cancels nothing": (
        "cancelled_behind",
        Configuration(1, order="cancel", **BUSY | {"payloads": ("ok", "fails"), "jobs": 60}),
    ),
    # The row of a rate is locked as well, once a first job of the key has begun.
    "rate without a lock": ("rates", Configuration(1, rates=((5, 1.0, "customer_id", 1),), **BUSY | {"customers": 60})),
    "rate always has its burst": ("rates", Configuration(1, rates=((40, 1.0, None, 3),), **BUSY)),
    "rate is not held back": (
        "throttled",
        Configuration(1, rates=((200, 1.0, "customer_id", 200),), **BUSY | {"payloads": ("ok", "throttle")}),
    ),
    "no notification of free places": (
        "forgotten",
        Configuration(1, limits=("number",), most=1, poll_interval=600, **BUSY | {"customers": 1}),
    ),
    "a slot without a lock": ("slots", Configuration(1, strategy="batch_select", limits=("number",), **BUSY)),
    "one slot more": ("running", Configuration(1, strategy="delete_row", limits=("number",), **BUSY | {"work": 0.02})),
    "the slots of a changing limit are not counted": (
        "slots",
        Configuration(1, strategy="delete_returning", limits=("attribute",), **BUSY),
    ),
    "the head is not looked for": ("order", Configuration(1, strategy="batch_select", order="continue", **BUSY)),
    "beginnings are not reserved": (
        "reserved",
        Configuration(1, strategy="delete_row", rates=((40, 1.0, None, 3),), **BUSY | {"jobs": 60}),
    ),
    "turns are forgotten": ("turns", Configuration(1, fair=1, **BUSY | {"customers": 20})),
}
"""For each mutant the rule that reports it, and the round in which it does."""

IN_PAIRS = {"order without a lock", "order does not see running jobs"}
"""Those that a requeue shows only within the milliseconds of a claim, see ``tests/flow_control/test_pairs.py``."""

pytestmark = pytest.mark.once


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_of_faults(database: Database, fork_server: ForkServer, name: str) -> None:
    assert set(FAULTS) >= set(ROUNDS[name].faults)
    result = run_round(ROUNDS[name], database, fork_server)
    assert not result.violations, str(result)
    assert result.counts["runs"] > 30


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_checker_reports_a_lost_safeguard(database: Database, fork_server: ForkServer, mutant: str) -> None:
    rule, configuration = MUTANTS[mutant]
    without = {**configuration.__dict__, "mutant": mutant}
    result = run_round(Configuration(**without), database, fork_server)
    assert rule in result.violations, str(result)


def test_each_mutant_has_a_round() -> None:
    assert MUTANTS.keys() == (IN_DATABASE.keys() | IN_WORKERS.keys()) - IN_PAIRS
