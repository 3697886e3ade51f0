"""A handler that throttles a rate while another worker claims."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.statements.throttle import hold_back
from tests.flow_control.pairs import INTERVAL, PENDING, RATED, STATEMENTS, TWO_RATES, World, is_blocked, throttle

pytestmark = pytest.mark.once


@pytest.mark.xfail(reason="the last throttle replaces one that lasts longer")
def test_a_shorter_throttle_leaves_a_longer_one(pair_engine: sa.Engine) -> None:
    world = World("rate", pair_engine)
    world.reset(busy=False, expired=False)
    with Session(pair_engine) as session:
        for seconds in (60.0, 0.0):
            for statement in hold_back(spec_of(RATED), ("customer_id",), [(PENDING,)], seconds):
                session.execute(statement)
            session.commit()
        assert session.scalars(claim(RATED, 1)).all() == []


@pytest.mark.xfail(reason="the clock is read before and after the wait for the row")
def test_a_claim_that_waits_for_the_row_of_a_rate_uses_the_rate_up(
    pair_engine: sa.Engine, thread: ThreadPoolExecutor
) -> None:
    world = World("rate", pair_engine)
    world.reset(busy=True, expired=False)
    next_at = sa.text("SELECT extract(epoch FROM next_at) FROM sqlaqueue_rate")
    with Session(pair_engine) as one, Session(pair_engine) as other:
        before = one.scalar(next_at)
        throttle(world, one)
        waiting = thread.submit(STATEMENTS["claim"], world, other)
        time.sleep(0.3)
        one.commit()
        assert len(waiting.result(30)) == 1
        other.commit()
        assert float(other.scalar(next_at) - before) > INTERVAL - 0.1


@pytest.mark.xfail(reason="a claim writes the rows of several rates in the opposite order")
def test_a_claim_and_a_throttle_of_two_rates_do_not_deadlock(
    pair_engine: sa.Engine, thread: ThreadPoolExecutor
) -> None:
    with Session(pair_engine) as one, Session(pair_engine) as other:
        one.execute(sa.insert(TWO_RATES.__table__), [{"id": key, "customer_id": 1} for key in (1, 2)])
        one.commit()
        [first] = one.scalars(claim(TWO_RATES, 1)).all()
        one.commit()
        pid = other.scalar(sa.text("SELECT pg_backend_pid()"))
        first_rate, second_rate = hold_back(spec_of(TWO_RATES), ("customer_id",), [(first.id,)], 0)
        one.execute(first_rate)
        waiting = thread.submit(lambda: other.scalars(claim(TWO_RATES, 1)).all())
        with Session(pair_engine) as third:
            is_blocked(third, pid, waiting)
        one.execute(second_rate)
        one.commit()
        assert len(waiting.result(30)) <= 1
