"""The systems and loads of the workloads about flow control."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, copy_in
from sqlaqueue.mapping.mixin import spec_of
from tests.benchmarks.systems import FLOW, SYSTEMS
from tests.benchmarks.systems.protocol import payloads
from tests.benchmarks.systems.sqlaqueue_consumer import make_model
from tests.benchmarks.workloads import flow_claims
from tests.servers import Database

pytestmark = pytest.mark.once


def options_of(name: str) -> dict[str, Any]:
    return dict(SYSTEMS[f"sqlaqueue {name}"].options)


@pytest.mark.parametrize("name", FLOW)
def test_a_model_has_the_flow_control_of_its_system(name: str) -> None:
    config, flow = spec_of(make_model(options_of(name))).config, FLOW[name]
    found = {
        "limit": [(one.most, one.per) for one in config.limits],
        "rate": [(one.most, one.per) for one in config.rates],
        "order": [] if config.order is None else [(1, config.order.per)],
        "fair": [] if config.fair is None else [(None, config.fair.per)],
    }
    expected = [(flow.get("most"), ("account",) if flow["per_key"] else ())]
    assert found == {kind: expected if kind == flow["kind"] else [] for kind in found}


def test_the_plain_system_has_none() -> None:
    config = spec_of(make_model(options_of("plain"))).config
    assert [config.limits, config.rates, config.order, config.fair] == [(), (), None, None]


def test_jobs_that_a_load_starts_count_as_running(database: Database) -> None:
    model = make_model(options_of("Limit(1) of each key"))
    engine = sa.create_engine(database.url("psycopg"))
    model.metadata.create_all(engine)
    with Session(engine) as session:
        copy_in(session, model, payloads(20, keys=10))
        session.commit()
        session.execute(sa.text(f"{flow_claims._START} WHERE id <= 10 AND account < 8"))
        session.commit()
        assert sorted(job.account for job in session.scalars(claim(model, 100))) == [8, 9]
    engine.dispose()
