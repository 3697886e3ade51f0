"""Of a claim of a few jobs the server may keep a plan, which saves half of its time; of one of many it does not."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session, mapped_column

from sqlaqueue import QueueConfig, QueueMixin, claim
from sqlaqueue.serving.plan import ASKED, EXCEPT, KEYS, LIMIT, TOKEN, Plan, make_plan
from sqlaqueue.strategies.replanning import FEW

KEPT = sa.text("""SELECT generic_plans > 0 FROM pg_prepared_statements
                  WHERE statement LIKE '%SKIP LOCKED%' AND statement NOT LIKE '%pg_prepared%'
                  ORDER BY prepare_time DESC LIMIT 1""")


def make_model(strategy: Any) -> Any:
    class Base(DeclarativeBase):
        pass

    class Job(QueueMixin, Base):
        __tablename__ = "job"
        __queue__ = QueueConfig(strategy=strategy)
        id = mapped_column(sa.Integer(), primary_key=True)

    return Job


def plan_of(model: Any) -> Plan:
    return make_plan(
        model, batch_size=None, concurrency=1, lease=None, timeout=None, retry=None, name=None, batch=False
    )


def test_a_claim_of_whatever_there_is_takes_no_longer(engine: sa.Engine) -> None:
    model = make_model("batch_select")
    model.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([model(), model()])
        session.execute(sa.text("SET LOCAL statement_timeout = '5s'"))
        assert len(session.scalars(claim(model, 2**40)).all()) == 2


@pytest.mark.parametrize("strategy", ["update_status", "batch_select", "delete_returning"])
@pytest.mark.parametrize(
    ("limit", "from_mark", "kept"),
    [(1, False, True), (FEW, False, True), (2 * FEW + 2, False, False), (1, True, False)],
)
def test_a_plan_is_kept_for_a_few(engine: sa.Engine, strategy: Any, limit: int, *, from_mark: bool, kept: bool) -> None:
    """Behind a claim that was full there may be many, however few are claimed at once."""
    model = make_model(strategy)
    model.metadata.create_all(engine)
    plan = plan_of(model)
    with Session(engine) as session:
        driver: Any = session.connection().connection.driver_connection
        driver.prepare_threshold = 0
        session.add_all(model() for _ in range(30 * FEW))
        session.commit()
        parameters: dict[str, Any] = {LIMIT: limit, EXCEPT: []}
        if from_mark:
            (job,) = session.execute(plan.claim, parameters).scalars()
            parameters |= plan.mark_of([job]) or {}
            session.commit()
        for _ in range(12):
            session.execute(plan.claim_from if from_mark else plan.claim, parameters).scalars().all()
            session.commit()
        assert session.scalar(KEPT) is kept
        driver.prepare_threshold = 5


@pytest.mark.parametrize("strategy", ["update_status", "batch_select"])
def test_no_plan_is_kept_for_what_a_consumer_ends_in_bulk(engine: sa.Engine, strategy: Any) -> None:
    model = make_model(strategy)
    model.metadata.create_all(engine)
    plan = plan_of(model)
    kept = sa.text("SELECT sum(generic_plans) FROM pg_prepared_statements WHERE statement LIKE 'WITH ended%'")
    with Session(engine) as session:
        driver: Any = session.connection().connection.driver_connection
        driver.prepare_threshold = 0
        for number in range(12):
            bound = {KEYS: [number, number + 1], ASKED: 2, TOKEN: None}
            assert session.connection().execute(plan.complete, bound).all() == [(0, None)]
        assert session.scalar(kept) == 0
        driver.prepare_threshold = 5
