"""run_job() names what holds a job back, and drain(scheduled=True) moves to when a rate lets the next job begin."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Limit, Order, Rate, Throttle
from sqlaqueue.exc import NotClaimableError
from sqlaqueue.testing import drain, run_job
from tests.flow_control.models import HELD, create, make_job

# Not where the claim deletes the row: in the one transaction of a test no other statement could read its key.
CONFIGS = [{}, HELD["batch_select"], HELD["delete_returning"]]

PER_CUSTOMER = Rate(1, every=timedelta(hours=1), per="customer_id")


def do_nothing(session: Session, job: Any) -> None:
    pass


def refused(engine: sa.Engine, model: Any, *others: dict[str, Any]) -> str:
    """Return what is said of the second job, behind others of the same customer."""
    create(engine, model)
    with Session(engine) as session:
        jobs = [model(customer_id=1, **values) for values in (*others, {})]
        session.add_all(jobs)
        with pytest.raises(NotClaimableError) as raised:
            run_job(session, jobs[-1], do_nothing)
        return str(raised.value)


def test_a_limit(engine: sa.Engine) -> None:
    said = refused(engine, make_job(limits=[Limit(1, per="customer_id")]), {"status": "processing"})
    assert said == (
        "run_job(): Job 2 is held back. The limit of 1 job of customer_id 1 is reached, held by 1; the end of one lets "
        "another begin"
    )


def test_an_order(engine: sa.Engine) -> None:
    said = refused(engine, make_job(order=Order("customer_id")), {"status": "failed"})
    assert said == (
        "run_job(): Job 2 is held back. Job 1 of customer_id 1 comes first, and has failed and blocks its key; requeue "
        "or delete it"
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_a_rate(engine: sa.Engine, config: dict[str, Any]) -> None:
    job = make_job(rates=[PER_CUSTOMER], **config)
    create(engine, job)
    with Session(engine) as session:
        first, second = jobs = [job(customer_id=1), job(customer_id=1)]
        session.add_all(jobs)
        run_job(session, first, do_nothing)
        message = r"is held back\. The rate of customer_id 1 is used up; .*in 59 min.*travel\(session, \d+\) moves it"
        with pytest.raises(NotClaimableError, match=message):
            run_job(session, second, do_nothing)


@pytest.mark.parametrize("config", [*CONFIGS, {"columns": {"run_at": None}}])
def test_jobs_run_when_their_rates_let_them_begin(engine: sa.Engine, config: dict[str, Any]) -> None:
    job = make_job(rates=[PER_CUSTOMER, Rate(2, every=timedelta(hours=3))], **config)
    create(engine, job)
    with Session(engine) as session:
        session.add_all([job(customer_id=1) for _ in range(5)])
        assert drain(session, job, do_nothing) == 1
        assert drain(session, job, do_nothing, scheduled=True) == 4


def test_only_the_rates_of_the_selected_jobs_count(engine: sa.Engine) -> None:
    job = make_job(rates=[PER_CUSTOMER])
    create(engine, job)
    with Session(engine) as session:
        session.add_all([job(customer_id=customer) for customer in (1, 1, 2)])
        assert drain(session, sa.select(job).where(job.customer_id == 1), do_nothing) == 1
        # The time of customer 1 does not pass.
        assert drain(session, sa.select(job).where(job.customer_id == 2), do_nothing, scheduled=True) == 1
        assert drain(session, job, do_nothing) == 0


def test_a_throttled_key_is_waited_for(engine: sa.Engine) -> None:
    job = make_job(rates=[PER_CUSTOMER])
    create(engine, job)
    calls: list[int] = []

    def refuse_once(session: Session, one: Any) -> None:
        calls.append(one.id)
        if len(calls) == 1:
            raise Throttle(timedelta(days=2), rate="customer_id")

    with Session(engine) as session:
        session.add_all([job(customer_id=1), job(customer_id=1)])
        assert drain(session, job, refuse_once, scheduled=True) == 2
        assert set(calls) == {1, 2}


def test_a_job_that_an_order_holds_back_does_not_keep_it_running(engine: sa.Engine) -> None:
    job = make_job(rates=[PER_CUSTOMER], order=Order("customer_id"), max_attempts=1)
    create(engine, job)

    def fail(session: Session, one: Any) -> None:
        raise ValueError

    with Session(engine) as session:
        session.add_all([job(customer_id=1), job(customer_id=1)])
        assert drain(session, job, fail, scheduled=True) == 1
