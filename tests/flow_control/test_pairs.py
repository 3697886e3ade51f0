"""Every pair of statements in two transactions that are open at once, on one key.

The first statement is executed, then the second one, which may have to wait for the first transaction; then both
transactions end, in each order, or one of them is rolled back. After that, what runs is within the limit, an ordered
key has one run, the row of a rate is not behind what has begun, and the next claims take exactly what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa

from tests.faults.mutants import lose_in_database
from tests.flow_control.pairs import (
    ANY,
    ENDINGS,
    OF_QUEUE,
    OF_RUN,
    PENDING,
    QUEUES,
    RUNNING,
    World,
    check,
    come_beside_a_claim,
    make_engine,
    play,
)
from tests.servers import Server

pytestmark = pytest.mark.once


def _pairs() -> Iterator[Any]:
    for name in QUEUES:
        for state in ("idle", "busy"):
            all_of_queue = ANY | OF_QUEUE[name] | (OF_RUN if state == "busy" else {})
            for first in all_of_queue:
                for second in all_of_queue:
                    marks = () if _is_quick(name, state, {first, second}) else pytest.mark.thorough
                    title = f"{name}-{state}-{first}-{second}"
                    yield pytest.param(name, state, first, second, marks=marks, id=title)


def _is_quick(name: str, state: str, pair: set[str]) -> bool:
    """Return whether each session runs a pair: a claim, and one of each kind that may let it begin too many jobs."""
    others = {"complete", "rescue", "requeue", "enqueue an earlier job", "lower the limit", "throttle"}
    is_one_of_them = state == "busy" and name != "limit 2" and not pair.isdisjoint(others)
    return pair in ({"claim"}, {"claim", "throttle"}) or ("claim" in pair and is_one_of_them)


TOUCHED = dict.fromkeys(OF_RUN, RUNNING) | dict.fromkeys(OF_QUEUE["limit 1"], "the limit")
TOUCHED |= dict.fromkeys(["cancel", "delete a waiting job"], PENDING)
"""The row that a statement changes; two statements of one row wait for each other."""


def _may_wait(first: str, second: str) -> bool:
    """Return whether the second statement may wait for the first transaction: claims and rescues pass locked rows."""
    if second in {"claim", "rescue"}:
        return False
    same_row = TOUCHED.get(first, first) == TOUCHED.get(second, second)
    # A claim has moved the row of the rate, or locked the job.
    return same_row or first == "claim"


@pytest.mark.parametrize(("name", "state", "first", "second"), list(_pairs()))
def test_a_pair(
    pair_engine: sa.Engine,
    thread: ThreadPoolExecutor,
    name: str,
    state: str,
    first: str,
    second: str,
) -> None:
    world = World(name, pair_engine)
    for ending in ENDINGS:
        world.reset(busy=state == "busy", expired="rescue" in {first, second})
        blocked = play(world, thread, first, second, ending)
        assert not blocked or _may_wait(first, second), f"{second} waits for a lock"
        check(world)


@pytest.mark.parametrize("earlier", ["requeue", "enqueue an earlier job"])
def test_an_earlier_job_that_comes_beside_a_claim_waits_for_its_run(pair_engine: sa.Engine, earlier: str) -> None:
    world = World("order", pair_engine)
    come_beside_a_claim(world, earlier)
    check(world)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        ("limit without a lock", "limit 1"),
        ("limit without a lock", "limit 2"),
        ("order without a lock", "order"),
        ("order is not checked", "order"),
        ("order does not see running jobs", "order"),
        ("rate without a lock", "rate"),
    ],
)
@pytest.mark.thorough
def test_a_lost_safeguard_is_detected(server: Server, thread: ThreadPoolExecutor, mutant: str, name: str) -> None:
    with server.database() as database, ExitStack() as stack:
        engine = stack.enter_context(make_engine(database))
        with engine.begin() as connection:
            lose_in_database(connection, mutant)
        with pytest.raises(AssertionError):
            for first in ("claim", "fail", "requeue"):
                world = World(name, engine)
                world.reset(busy=first != "claim", expired=False)
                play(world, thread, first, "claim", "both commit")
                check(world)
            come_beside_a_claim(World("order", engine), "requeue")
            check(World("order", engine))
