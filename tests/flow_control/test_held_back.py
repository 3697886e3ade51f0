"""What is said of a job that is held back: by ``explain_job()``, ``stats()`` and ``run_job()``."""

import json
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.orm import Session

from sqlaqueue import ConcurrencyLimit, InOrder, RateLimit, Throttle
from sqlaqueue.admin import QueueAdmin
from sqlaqueue.cli import main
from sqlaqueue.exc import NotClaimableError
from sqlaqueue.testing import drain, run_job
from tests.flow_control import models
from tests.flow_control.models import (
    HELD,
    claim_and_commit,
    create,
    insert,
    make_job,
    make_queue,
    of_customers,
    set_status,
)
from tests.servers import Database


def explained(engine: sa.Engine, job: Any, key: int) -> dict[str, str]:
    """Return the reasons of a job by their codes."""
    with Session(engine) as session:
        return {reason.code: reason.text for reason in QueueAdmin(session, job).explain(key).reasons}


def test_a_limit_names_the_jobs_that_hold_it(engine: sa.Engine) -> None:
    job = make_queue(
        engine,
        of_customers(1, 1, 1, 2, None),
        flow_control=[ConcurrencyLimit(2, per=("customer_id", "kind")), ConcurrencyLimit(5)],
    )
    assert len(claim_and_commit(engine, job, 2)) == 2
    text = explained(engine, job, 3)["limit"]
    assert text.startswith("The limit of 2 jobs of customer_id 1, kind 'a' is reached, held by 1, 2;")
    assert "limit" not in explained(engine, job, 4)
    assert "limit" not in explained(engine, job, 5)


def test_a_limit_of_the_queue_and_one_that_lets_nothing_begin(engine: sa.Engine) -> None:
    job = make_queue(
        engine,
        of_customers(1, 1, most=0),
        flow_control=[ConcurrencyLimit(1), ConcurrencyLimit("most", per="customer_id")],
    )
    text = explained(engine, job, 1)["limit"]
    assert text == "The limit of 0 jobs of customer_id 1 is reached; raise it to let jobs start."
    set_status(engine, job, "processing", 2)
    assert explained(engine, job, 1)["limit"]


def test_a_rate_says_until_when(engine: sa.Engine) -> None:
    job = make_queue(engine, of_customers(1, 1, 2), flow_control=[RateLimit(1, every=3600, per="customer_id")])
    claim_and_commit(engine, job, 1)
    assert explained(engine, job, 2)["rate"].startswith("The rate of customer_id 1 is used up; a job may start in 59 m")
    assert "rate" not in explained(engine, job, 3)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("processing", "and runs"),
        ("failed", "and has failed and blocks its key; requeue or delete it"),
        ("pending", "and has not finished"),
    ],
)
def test_an_order_names_the_job_that_comes_first(engine: sa.Engine, status: str, said: str) -> None:
    job = make_queue(engine, of_customers(1, 1, 2), flow_control=[InOrder("customer_id")])
    set_status(engine, job, status, 1)
    assert explained(engine, job, 2)["order"] == f"Job 1 of customer_id 1 comes first, {said}."
    assert "order" not in explained(engine, job, 3)


def test_stats_show_the_keys_at_their_limit(engine: sa.Engine) -> None:
    job = make_job(
        flow_control=[
            ConcurrencyLimit(2, per=("customer_id", "kind")),
            ConcurrencyLimit("most", per="customer_id"),
            ConcurrencyLimit(4),
        ]
    )
    create(engine, job)
    insert(engine, job, [*of_customers(1, 1, 1, None), *of_customers(2, kind="b", most=1), *of_customers(3)])
    assert len(claim_and_commit(engine, job)) == 4
    with Session(engine) as session:
        found = QueueAdmin(session, job).stats().at_limit
    assert [str(each) for each in found] == [
        "customer_id 2 (1 of 1)",
        "customer_id 1, kind 'a' (2 of 2)",
        "the queue (4 of 4)",
    ]


@pytest.mark.postgresql("the command gets the URL of its server")
def test_why_names_the_keys_of_a_queue_that_are_at_their_limit(
    shared: Database, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_queue(engine, of_customers(1, 1), flow_control=[ConcurrencyLimit(1, per="customer_id")])
    assert len(claim_and_commit(engine, job)) == 1
    monkeypatch.setattr(models, "Limited", job, raising=False)
    arguments = ["why", f"{models.__name__}:Limited", "--url", shared.url()]
    said = CliRunner().invoke(main, arguments)
    assert "  At their limit: customer_id 1 (1 of 1); the end of a run makes room.\n" in said.output
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    assert found["at_limit"] == [{"key": {"customer_id": 1}, "running": 1, "most": 1}]


# -- ``run_job()``, and ``drain(scheduled=True)``, which moves to when a rate lets the next job begin --------------


# Not where the claim deletes the row: in the one transaction of a test no other statement could read its key.
HOLDS = pytest.mark.postgresql("other engines have no strategy that holds a transaction")
CONFIGS = [{}, *(pytest.param(HELD[name], marks=HOLDS) for name in ("batch_select", "delete_returning"))]
PER_CUSTOMER = RateLimit(1, every=timedelta(hours=1), per="customer_id")


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
    said = refused(engine, make_job(flow_control=[ConcurrencyLimit(1, per="customer_id")]), {"status": "processing"})
    assert said == (
        "run_job(): Job 2 is blocked. The limit of 1 job of customer_id 1 is reached, held by 1; the end of one lets "
        "another start"
    )


def test_an_order(engine: sa.Engine) -> None:
    said = refused(engine, make_job(flow_control=[InOrder("customer_id")]), {"status": "failed"})
    assert said == (
        "run_job(): Job 2 is blocked. Job 1 of customer_id 1 comes first, and has failed and blocks its key; requeue "
        "or delete it"
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_a_rate(engine: sa.Engine, config: dict[str, Any]) -> None:
    job = create(engine, make_job(flow_control=[PER_CUSTOMER], **config))
    with Session(engine) as session:
        first, second = jobs = [job(customer_id=1), job(customer_id=1)]
        session.add_all(jobs)
        run_job(session, first, do_nothing)
        message = r"is blocked\. The rate of customer_id 1 is used up; .*in 59 min.*travel\(session, \d+\) moves it"
        with pytest.raises(NotClaimableError, match=message):
            run_job(session, second, do_nothing)


@pytest.mark.few(1)
@pytest.mark.parametrize("config", [*CONFIGS, {"columns": {"run_at": None}}])
def test_jobs_run_when_their_rates_let_them_begin(engine: sa.Engine, travelling: Any, config: dict[str, Any]) -> None:
    job = travelling(flow_control=[PER_CUSTOMER, RateLimit(2, every=timedelta(hours=3))], **config)
    with Session(engine) as session:
        session.add_all([job(customer_id=1) for _ in range(5)])
        assert drain(session, job, do_nothing) == 1
        assert drain(session, job, do_nothing, scheduled=True) == 4


def test_only_the_rates_of_the_selected_jobs_count(engine: sa.Engine, travelling: Any) -> None:
    job = travelling(flow_control=[PER_CUSTOMER])
    with Session(engine) as session:
        session.add_all([job(customer_id=customer) for customer in (1, 1, 2)])
        assert drain(session, sa.select(job).where(job.customer_id == 1), do_nothing) == 1
        # The time of customer 1 does not pass.
        assert drain(session, sa.select(job).where(job.customer_id == 2), do_nothing, scheduled=True) == 1
        assert drain(session, job, do_nothing) == 0


def test_a_throttled_key_is_waited_for(engine: sa.Engine, travelling: Any) -> None:
    job = travelling(flow_control=[PER_CUSTOMER])
    calls: list[int] = []

    def refuse_once(session: Session, one: Any) -> None:
        calls.append(one.id)
        if len(calls) == 1:
            raise Throttle(timedelta(days=2), per="customer_id")

    with Session(engine) as session:
        session.add_all([job(customer_id=1), job(customer_id=1)])
        assert drain(session, job, refuse_once, scheduled=True) == 2
        assert set(calls) == {1, 2}


def test_a_job_that_an_order_holds_back_does_not_keep_it_running(engine: sa.Engine, travelling: Any) -> None:
    job = travelling(flow_control=[PER_CUSTOMER, InOrder("customer_id")], max_attempts=1)

    def fail(session: Session, one: Any) -> None:
        raise ValueError

    with Session(engine) as session:
        session.add_all([job(customer_id=1), job(customer_id=1)])
        assert drain(session, job, fail, scheduled=True) == 1
