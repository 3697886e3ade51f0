"""A handler that throttles a rate while another worker claims."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim
from sqlaqueue.flow_control.admission import was_contended
from sqlaqueue.flow_control.rates import hold_back
from sqlaqueue.mapping.mixin import spec_of
from tests.flow_control.pairs import PENDING, RATED, STATEMENTS, TWO_RATES, World, throttle

pytestmark = pytest.mark.once


def test_a_shorter_throttle_leaves_a_longer_one(pair_engine: sa.Engine) -> None:
    world = World("rate", pair_engine)
    world.reset(busy=False, expired=False)
    with Session(pair_engine) as session:
        for seconds in (60.0, 0.0):
            for statement in hold_back(spec_of(RATED), ("customer_id",), [(PENDING,)], seconds):
                session.execute(statement)
            session.commit()
        assert session.scalars(claim(RATED, 1)).all() == []


def test_a_claim_passes_over_a_key_that_a_throttle_holds_back(pair_engine: sa.Engine) -> None:
    world = World("rate", pair_engine)
    world.reset(busy=True, expired=False)
    with Session(pair_engine) as one, Session(pair_engine) as other:
        throttle(world, one)
        other.execute(sa.text("SET LOCAL lock_timeout = '5s'"))
        assert STATEMENTS["claim"](world, other) == []
        assert other.scalar(sa.select(was_contended()))
        one.rollback()
        assert len(STATEMENTS["claim"](world, other)) == 1


def test_a_claim_and_a_throttle_of_two_rates_do_not_wait_for_each_other(pair_engine: sa.Engine) -> None:
    with Session(pair_engine) as one, Session(pair_engine) as other:
        one.execute(sa.insert(TWO_RATES.__table__), [{"id": key, "customer_id": 1} for key in (1, 2)])
        one.commit()
        [first] = one.scalars(claim(TWO_RATES, 1)).all()
        one.commit()
        other.execute(sa.text("SET LOCAL lock_timeout = '5s'"))
        for statement in hold_back(spec_of(TWO_RATES), ("customer_id",), [(first.id,)], 0):
            one.execute(statement)
            assert other.scalars(claim(TWO_RATES, 1)).all() == []
        one.commit()
        assert len(other.scalars(claim(TWO_RATES, 1)).all()) == 1
