"""``explain_job()`` says what holds a job back, and ``stats()`` which keys are at their limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.orm import Session

from sqlaqueue import Limit, Order, Rate, admin
from sqlaqueue.cli import main
from tests.flow_control import models
from tests.flow_control.models import claim_and_commit, create, insert, make_job, of_customers, set_status
from tests.servers import Database


def explained(engine: sa.Engine, job: Any, key: int) -> dict[str, str]:
    """Return the reasons of a job by their codes."""
    with Session(engine) as session:
        return {reason.code: reason.text for reason in admin.explain_job(session, job, key).reasons}


def test_a_limit_names_the_jobs_that_hold_it(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit(2, per=("customer_id", "kind")), Limit(5)])
    create(engine, job)
    insert(engine, job, of_customers(1, 1, 1, 2, None))
    assert len(claim_and_commit(engine, job, 2)) == 2
    text = explained(engine, job, 3)["limit"]
    assert text.startswith("The limit of 2 jobs of customer_id 1, kind 'a' is reached, held by 1, 2;")
    assert "limit" not in explained(engine, job, 4)
    assert "limit" not in explained(engine, job, 5)


def test_a_limit_of_the_queue_and_one_that_lets_nothing_begin(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit(1), Limit("most", per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(1, 1, most=0))
    text = explained(engine, job, 1)["limit"]
    assert text == "The limit of 0 jobs of customer_id 1 is reached; raise it to let jobs begin."
    set_status(engine, job, "processing", 2)
    assert explained(engine, job, 1)["limit"]


def test_a_rate_says_until_when(engine: sa.Engine) -> None:
    job = make_job(rates=[Rate(1, every=3600, per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(1, 1, 2))
    claim_and_commit(engine, job, 1)
    assert explained(engine, job, 2)["rate"].startswith("The rate of customer_id 1 is used up; a job may begin in 59 m")
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
    job = make_job(order=Order("customer_id"))
    create(engine, job)
    insert(engine, job, of_customers(1, 1, 2))
    set_status(engine, job, status, 1)
    assert explained(engine, job, 2)["order"] == f"Job 1 of customer_id 1 comes first, {said}."
    assert "order" not in explained(engine, job, 3)


def test_stats_show_the_keys_at_their_limit(engine: sa.Engine) -> None:
    job = make_job(limits=[Limit(2, per=("customer_id", "kind")), Limit("most", per="customer_id"), Limit(4)])
    create(engine, job)
    insert(engine, job, [*of_customers(1, 1, 1, None), *of_customers(2, kind="b", most=1), *of_customers(3)])
    assert len(claim_and_commit(engine, job)) == 4
    with Session(engine) as session:
        found = admin.stats(session, job).at_limit
    assert [str(each) for each in found] == [
        "customer_id 1, kind 'a' (2 of 2)",
        "customer_id 2 (1 of 1)",
        "the queue (4 of 4)",
    ]


def test_why_names_the_keys_of_a_queue_that_are_at_their_limit(
    shared: Database, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(limits=[Limit(1, per="customer_id")])
    create(engine, job)
    insert(engine, job, of_customers(1, 1))
    assert len(claim_and_commit(engine, job)) == 1
    monkeypatch.setattr(models, "Limited", job, raising=False)
    arguments = ["why", f"{models.__name__}:Limited", "--url", shared.url()]
    said = CliRunner().invoke(main, arguments)
    assert "  At their limit: customer_id 1 (1 of 1); the end of a run makes room.\n" in said.output
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    assert found["at_limit"] == [{"key": {"customer_id": 1}, "running": 1, "most": 1}]
