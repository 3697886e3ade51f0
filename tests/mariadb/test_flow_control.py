"""Limits on MariaDB: how a claim locks the keys of its jobs, and for how long."""

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, mapped_column

from sqlaqueue import ConcurrencyLimit, prepare
from sqlaqueue.exc import StatementError
from tests.flow_control.models import claim_and_commit, claimed, ids, make_queue, of_customers
from tests.mariadb.server import MariaDBServer
from tests.models import create, make_job

LIMIT = ConcurrencyLimit(1, per="customer_id")

pytestmark = pytest.mark.once


@pytest.fixture
def engine(mariadb: MariaDBServer) -> Iterator[sa.Engine]:
    with mariadb.database() as name:
        engine = prepare(sa.create_engine(mariadb.url(name)))
        yield engine
        engine.dispose()


def test_a_key_has_one_lock_whatever_the_default_database_is(mariadb: MariaDBServer, engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1), flow_control=[LIMIT])
    with mariadb.database() as name, Session(engine) as first:
        elsewhere = prepare(sa.create_engine(mariadb.url(name)))
        there = elsewhere.execution_options(schema_translate_map={None: engine.url.database})
        with Session(there) as second:
            assert len(claimed(first, job)) == 1
            assert claimed(second, job) == []
        elsewhere.dispose()


def test_a_key_has_one_lock_whatever_its_attribute_is(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1), flow_control=[LIMIT])
    attributes = {
        "customer": mapped_column("customer_id", sa.Integer),
        "kind": mapped_column(sa.String(20)),
        "document_id": mapped_column(sa.Integer),
        "most": mapped_column(sa.Integer),
    }
    renamed = make_job(attributes=attributes, flow_control=[ConcurrencyLimit(1, per="customer")])
    with Session(engine) as first, Session(engine) as second:
        assert len(claimed(first, job)) == 1
        assert claimed(second, renamed) == []


@pytest.mark.parametrize("limits", [[LIMIT], [LIMIT, ConcurrencyLimit(5)]])
def test_the_place_of_a_job_that_another_transaction_has_locked_goes_to_the_next(
    engine: sa.Engine, limits: list[Any]
) -> None:
    job = make_queue(engine, of_customers(1, 1, 1), flow_control=limits)
    with Session(engine) as other:
        other.execute(sa.select(job).where(job.id == 1).with_for_update())
        assert ids(claim_and_commit(engine, job, 10)) == [2]


def test_a_claim_that_got_no_key_is_contended_until_its_transaction_ends(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1), flow_control=[LIMIT])
    flag = sa.text("SELECT @sqlaqueue_contended")
    with Session(engine) as first, Session(engine) as second:
        claimed(first, job)
        assert claimed(second, job) == []
        assert second.scalar(flag) == "on"
        second.rollback()
        assert second.scalar(flag) is None
        first.rollback()
        assert len(claimed(second, job)) == 1


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_the_keys_are_released_with_the_transaction(engine: sa.Engine, end: str) -> None:
    job = make_queue(engine, of_customers(1, 2), flow_control=[LIMIT])
    session = Session(engine)
    assert len(claimed(session, job)) == 2
    with Session(engine) as other:
        assert claimed(other, job) == []
        other.rollback()
        getattr(session, end)()
        assert len(claimed(other, job)) == (0 if end == "commit" else 2)
    session.close()


def test_the_keys_of_a_transaction_in_two_phases_are_released_with_it(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1), flow_control=[LIMIT])
    with engine.connect() as connection, Session(engine) as other:
        transaction = connection.begin_twophase()
        assert len(claimed(Session(connection), job)) == 1
        transaction.prepare()
        transaction.rollback()
        assert len(claimed(other, job)) == 1


def test_a_level_at_which_a_claim_would_not_see_what_runs_is_refused(engine: sa.Engine) -> None:
    job = create(engine, make_job(attributes={"customer_id": mapped_column(sa.Integer)}, flow_control=[LIMIT]))
    with Session(engine) as session:
        session.add(job(customer_id=1))
        session.commit()
    stricter = engine.execution_options(isolation_level="REPEATABLE READ")
    with Session(stricter) as session, pytest.raises(StatementError, match="READ COMMITTED; this transaction"):
        claimed(session, job)
